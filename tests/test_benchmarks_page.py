"""Every part of `make bench` can be asked for and has its place on the page."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from linvit.bench.kinds import options_of
from linvit.bench.page import cells, check_page, marks, write_page
from linvit.bench.rows import Report, Row
from linvit_cli import parse

ROOT = Path(__file__).parents[1]
PAGES = {
    "benchmarks-operator": ["op", "op_own", "op_backward", "gpu_op", "gpu_op_backward", "gpu_softmax"],
    "benchmarks-networks": [
        "model",
        "model_threads",
        "model_batch8",
        "model_kept",
        "model_bf16",
        "compiled",
        "resolution",
        "gpu_model",
    ],
    "benchmarks-training": ["train", "curves", "gpu_train"],
    "deployment": ["onnxruntime", "openvino", "executorch"],
    "linearize": ["linearize", "gpu_linearize"],
}
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
PARTS = re.search(r"^BENCH_PARTS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
COMMANDS = dict(re.findall(r"^BENCH_(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
VARIABLES = dict(re.findall(r"^(\w+) := (.*)$", MAKEFILE, re.MULTILINE))
COMMANDS = {part: re.sub(r"\$\((\w+)\)", lambda match: VARIABLES[match[1]], line) for part, line in COMMANDS.items()}
DEPLOYED = VARIABLES["DEPLOY_PARTS"].split()
ON_GPU = VARIABLES["GPU_PARTS"].split()


def page(name):
    return ROOT / f"docs/evidence/{name}.md"


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PAGES.items() for part in parts])
def test_every_part_is_a_command_with_a_place(name, part):
    check_page(page(name), Path("runs/bench") / part)
    options = parse(["bench", *shlex.split(COMMANDS[part])])
    assert options_of(options.kind, vars(options)).rounds >= 3


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_have_no_other_parts(name):
    assert re.findall(r"<!-- bench (\w+):begin -->", page(name).read_text()) == PAGES[name]


def test_make_writes_every_part_to_its_page():
    assert sorted(itertools.chain(*PAGES.values())) == sorted([*PARTS, *DEPLOYED, "compiled", *ON_GPU])
    for name, parts in PAGES.items():
        for part in parts:
            command = ["make", "-n", "BENCH=nowhere", f"nowhere/{part}/bench.json"]
            shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
            assert f"--output nowhere/{part} --write docs/evidence/{name}.md" in shown, part


def test_the_first_page_says_what_came_out_before_how():
    text = (ROOT / "docs/evidence/benchmarks.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:2] == ["Main results", "Start-up"]
    assert all(f"({name}.md)" in text for name in PAGES)


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
    assert "| rala | plain | float32 | 49 | 1 | 1.23 | 0.1 | 1.00 |\n" in text
    assert "no GPU" in text
    assert "old" not in text
    assert "![growth](bench_op_growth.svg)" in text
    assert (tmp_path / "bench_op_growth.svg").read_text() == "<svg/>"
    with pytest.raises(ValueError, match="no place for the tables"):
        check_page(page, Path("model"))


@pytest.mark.parametrize(
    ("size", "variant", "shown"),
    [
        ((224, 224), "plain", "82.8"),
        ((224, 224), "fused+bf16", "82.8"),
        ((512, 512), "plain", "–"),
        ((224, 224), "openvino+int8", "–"),
    ],
)
def test_a_published_accuracy_is_that_of_its_own_size_and_kind_of_number(size, variant, shown):
    row = Row("ravlt_tiny", variant, "float32", 1, 1, size=size, median_ms=1.0)
    other = Row("ravlt_tiny", "plain", "float32", 1, 1, size=(224, 224), median_ms=1.0)
    assert cells(Report("model", rows=[row, other]))[0]["published top-1, %"] == shown
