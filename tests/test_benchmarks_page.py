"""Every part of `make bench` can be asked for and has its place on the page."""

import re
import shlex
from pathlib import Path

import pytest

from linvit.bench.kinds import options_of
from linvit.bench.page import check_page, marks, write_page
from linvit.bench.rows import Report, Row
from linvit_cli import parse

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
PARTS = re.search(r"^BENCH_PARTS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
COMMANDS = dict(re.findall(r"^BENCH_(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
COMMANDS["gpu_op_backward"] = COMMANDS["gpu_op_backward"].replace("$(BENCH_gpu_op)", COMMANDS["gpu_op"])
ON_GPU = ["gpu_op", "gpu_op_backward"]


@pytest.mark.parametrize("part", [*PARTS, "compiled", *ON_GPU])
def test_every_part_is_a_command_with_a_place(part):
    check_page(PAGE, Path("runs/bench") / part)
    options = parse(["bench", *shlex.split(COMMANDS[part])])
    assert options_of(options.kind, vars(options)).rounds >= 3


def test_the_page_has_no_other_parts():
    assert re.findall(r"<!-- bench (\w+):begin -->", PAGE.read_text()) == [
        *PARTS[:3],
        *ON_GPU,
        *PARTS[3:8],
        "compiled",
        *PARTS[8:],
    ]


def test_a_part_is_written_between_its_marks(tmp_path):
    folder = tmp_path / "runs/op"
    folder.mkdir(parents=True)
    (folder / "growth.svg").write_text("<svg/>")
    begin, end = marks("op")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    rows = [
        Row("rala", "plain", "float32", 1, 1, tokens=49, clock="cpu", median_ms=1.234, spread_ms=0.1, ratio=1.0),
        Row("rala", "triton", "float32", 1, 1, tokens=49, skipped="no GPU"),
    ]
    machine = {"gpu": None, "processor": "P", "instructions": [], "cores": 2, "threads": 1, "load": None, "torch": "2"}
    write_page(Report("op", machine, rows, {"growth": {"rala plain float32": 1.0}}), page, folder)
    text = page.read_text()
    assert text.startswith(f"before\n{begin}\n\nP; 2 cores, 1 used; torch 2.")
    assert "| rala | plain | float32 | 49 | 1 | 1.23 | 0.1 | 1.00 | – | – | – | – |" in text
    assert "no GPU" in text
    assert "old" not in text
    assert "![growth](bench_op_growth.svg)" in text
    assert (tmp_path / "bench_op_growth.svg").read_text() == "<svg/>"
    with pytest.raises(ValueError, match="no place for the tables"):
        check_page(page, Path("model"))
