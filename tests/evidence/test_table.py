"""The table of evidence: its rows can be run, have their places on pages, and are what the ledgers contain."""

import re
import shlex
from itertools import chain
from pathlib import Path

import pytest

from evidence import rows, speeds
from evidence.__main__ import PAGES, arguments, main
from evidence.rows import EVIDENCE, ROOT, Bench, Call, Claims, Commands, Comparison
from evidence.table import ALL, GROUPS, ROWS, chosen
from linvit.analysis.markdown import check_marks, marks
from linvit.bench.kinds import options_of
from linvit.bundled import find_recipe
from linvit_cli import parse

BENCHES = [row for row in ROWS.values() if isinstance(row, Bench)]
COMPARISONS = [row for row in ROWS.values() if isinstance(row, Comparison)]
STUDIES = [row for row in ROWS.values() if isinstance(row, Claims)]


def test_names_are_of_one_row_or_group():
    assert sum(map(len, GROUPS.values())) == len(ROWS)
    assert not ROWS.keys() & GROUPS.keys()
    assert [row.name for row in chosen(["speech", "bench-op"])] == ["an4", "bench-op"]
    assert chosen(["all"]) == list(chain(*(GROUPS[name] for name in ALL)))
    with pytest.raises(ValueError, match="There is no 'bench-opp' in the table"):
        chosen(["bench-opp"])


@pytest.mark.parametrize("row", BENCHES, ids=lambda row: row.name)
def test_every_benchmark_is_a_command_with_a_place(row):
    options = arguments().parse_args(["bench", *shlex.split(row.words)])
    assert options_of(options.kind, {**vars(options), "device": "cpu"}).rounds >= 3
    if row.page:
        speeds.check_page(EVIDENCE / f"{row.page}.md", row.output)


def test_pages_have_no_other_benchmarks():
    found = [part for page in EVIDENCE.glob("*.md") for part in speeds.PART.findall(page.read_text())]
    assert sorted(found) == sorted(row.output.name for row in BENCHES if row.page)


def test_the_first_page_says_what_came_out_before_how():
    text = (EVIDENCE / "benchmarks.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[:2] == ["Main results", "Start-up"]
    assert all(f"({row.page}.md)" in text for row in BENCHES if row.page)


def test_every_recipe_exists_and_every_page_has_its_marks():
    for row in COMPARISONS:
        for recipe in row.options(Call())["recipes"]:
            find_recipe(ROOT / recipe)
    for row in (*COMPARISONS, *STUDIES):
        if row.page:
            check_marks(EVIDENCE / f"{row.page}.md", *marks(row.name))


@pytest.mark.parametrize("name", ["pyramid_llss_mala", "bccd", "an4", "books", "linearize_hybrid", "rates-cifar10"])
def test_ledgers_have_the_settings_of_the_table(name, capsys):
    assert main(["run", name, "--left"]) == 0
    complete, total = re.fullmatch(rf"{name}: (\d+) of (\d+) runs are complete\n", capsys.readouterr().out).groups()
    assert complete == total


@pytest.mark.slow
def test_everything_on_the_pages_is_complete():
    for row in chosen(list(ALL)):
        if isinstance(row, Claims | Comparison):
            assert re.fullmatch(r"(\d+) of \1 runs are complete", row.left(Call())), row.name


def test_pages_and_recipes_name_rows_and_parts_that_exist():
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").rglob("*.yaml"),
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert len(chosen(re.findall(r"python -m evidence run ((?!NAME)[\w-]+)", text))) > 100
    for command in re.findall(r"`python -m evidence ((?:run (?!NAME)|list|pages|bench \w)[^`]*)`", text):
        options = arguments().parse_args(command.split())
        assert options.command != "run" or chosen(options.names)
        assert not set(getattr(options, "parts", [])) - PAGES.keys()


def test_commands_are_understood():
    for row in ROWS.values():
        for line in row.lines if isinstance(row, Commands) else ():
            parse(shlex.split(line))


def test_what_a_machine_has_is_told_to_recipes(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert Call().settings == []
    assert Call(on="gpu").settings == ["trainer.accelerator=gpu"]
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert ROWS["bccd"].options(Call())["overrides"][-1] == "task.cpp=true"
    assert ROWS["pilot-vit"].options(Call(on="gpu"))["overrides"][-1] != "trainer.accelerator=gpu"
    assert ROWS["linearize_align"].options(Call(again=True))["ledger"] is None
    assert ROWS["vit_from_6"].runs(Call(seeds=3)).seeds == range(6, 9)


def test_rows_run_in_turn_and_one_that_fails_ends_nothing(monkeypatch, capsys):
    started = []

    def run(command, check):
        started.append(command[2:])
        if "retinanet" in " ".join(command):
            raise OSError("no data")

    monkeypatch.setattr(rows.subprocess, "run", run)
    monkeypatch.setattr("evidence.__main__.os.nice", lambda by: None)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "scenes")
    assert main(["run", "scenes", "bodies", "--note", "a sentence"]) == 2
    assert "scenes: no data" in capsys.readouterr().err
    assert ["linvit_cli", "train", "recipes/pretrain/mala.yaml", "--resume"] in started
    assert started[-1][-2:] == ["--note", "a sentence"]


def test_a_benchmark_is_measured_once(tmp_path, monkeypatch):
    row, started = Bench("bench-op", "op --rounds 3", "benchmarks-operator", str(tmp_path)), []
    monkeypatch.setattr(rows.subprocess, "run", lambda command, check: started.append(command[2:]))
    row.run(Call())
    (tmp_path / "bench.json").write_text("{}")
    row.run(Call())
    (command,) = started
    page = str(EVIDENCE / "benchmarks-operator.md")
    assert command == ["evidence", "bench", "op", "--rounds", "3", "--output", str(tmp_path), "--write", page]
    assert row.left(Call()).endswith("is there")
