"""Speeds on pages: written from bench.json, read back, and figures of accuracy drawn again from them."""

import json
import re
from pathlib import Path

import pytest

from evidence.bench.accuracy import family_colours
from evidence.speeds import check_page, marks, redraw, report_on_page, write_page
from linvit.bench.page import figures, to_markdown
from linvit.bench.rows import Report, Row
from linvit.layers.mechanisms import MECHANISMS

DOCS = Path(__file__).parents[2] / "docs"
MACHINE = {"gpu": None, "processor": "P", "instructions": [], "cores": 8, "threads": 4, "load": None, "torch": "2"}
FIGURES = [
    (page, *found)
    for page in sorted(DOCS.rglob("*.md"))
    for found in re.findall(r"\((bench_(\w+)_accuracy_batch(\d+)\.svg)\)", page.read_text())
]


def made_up(size=(224, 448)):
    rows = [
        Row("ravlt_tiny", "plain", "float32", 8, 4, size=size, pattern="LLSS", clock="wall", median_ms=1234.0),
        Row("convnext_tiny", "bf16", "bfloat16", 8, 4, size=size, clock="wall", median_ms=12.3),
        Row("repvit_m1_0", "bf16", "bfloat16", 8, 4, size=size, skipped="wrong"),
    ]
    return Report("model", MACHINE, rows)


def test_the_rows_of_a_table_are_read_back():
    begin, end = marks("part")
    report = report_on_page(f"{begin}\n{to_markdown(made_up())}\n{end}\n| a | b |\n", "part")
    names = ("name", "variant", "dtype", "batch", "threads", "size", "pattern", "median_ms")
    read, written = ([[getattr(row, name) for name in names] for row in rows.rows] for rows in (report, made_up()))
    assert read == written
    assert [row.clock for row in report.rows] == ["wall"] * 3


def test_only_the_figures_that_the_page_shows_are_drawn(tmp_path):
    (begin, end), page = marks("part"), tmp_path / "page.md"
    page.write_text(f"{begin}\n{to_markdown(made_up((224, 224)))}\n{end}\n")
    assert redraw(page) == []
    page.write_text(f"{begin}\n{to_markdown(made_up((224, 224)))}\n![x](bench_part_accuracy_batch8.svg)\n{end}\n")
    (file,) = redraw(page)
    assert file == tmp_path / "bench_part_accuracy_batch8.svg"
    text = file.read_text()
    assert "convnext_tiny" in text
    assert "wall time, 224 × 224 px, batch 8, 4 threads" in text


def test_every_figure_of_accuracy_is_listed():
    assert {part for _, _, part, _ in FIGURES} >= {"onnxruntime", "openvino", "model"}


@pytest.mark.parametrize(("page", "file", "part", "batch"), FIGURES)
def test_a_committed_figure_has_the_names_and_axis_of_its_table(page, file, part, batch):
    report = report_on_page(page.read_text(), part)
    drawn = dict(figures(report))[f"accuracy_batch{batch}"]
    committed = (page.parent / file).read_text()
    (axes,) = drawn.axes
    assert axes.get_xlabel() in committed
    for text in axes.texts:
        assert text.get_text() in committed
        assert text.get_color().lower() in committed


def test_a_family_has_one_colour_and_families_differ():
    names = ["ravlt_tiny", "ravlt_tiny_linear", "mavit_tiny", "care_s0", "convnext_tiny", "convnext_small"]
    names += [f"peer{number}_tiny" for number in range(8)]
    colours = family_colours(names)
    assert colours["ravlt_tiny"] == colours["ravlt_tiny_linear"] == MECHANISMS["rala"].colour
    assert colours["convnext_tiny"] == colours["convnext_small"]
    assert len(set(colours.values())) == 12


def test_a_part_is_written_between_its_marks(tmp_path):
    folder, page = tmp_path / "runs/op", tmp_path / "page.md"
    folder.mkdir(parents=True)
    (folder / "growth.svg").write_text("<svg/>")
    begin, end = marks("op")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    rows = [
        Row("rala", "plain", "float32", 1, 1, tokens=49, clock="cpu", median_ms=1.234, spread_ms=0.1, ratio=1.0),
        Row("rala", "triton", "float32", 1, 1, tokens=49, skipped="no GPU"),
    ]
    report = Report("op", MACHINE, rows, {"growth": {"rala plain float32": 1.0}})
    (folder / "bench.json").write_text(json.dumps(report.as_dict()))
    write_page(page, folder)
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\n\nP; 8 cores, 4 used; torch 2.")
    assert "| rala | plain | float32 | 49 | 1 | 1.23 | 0.1 | 1.00 |\n" in text
    assert "no GPU" in text
    assert "old" not in text
    assert "![growth](bench_op_growth.svg)" in text
    assert (tmp_path / "bench_op_growth.svg").read_text() == "<svg/>"
    with pytest.raises(ValueError, match="no place for the tables"):
        check_page(page, Path("model"))
