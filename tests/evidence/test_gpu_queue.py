"""The queue of jobs for GPUs, without one: rows, resuming, and every job at toy sizes."""

import shutil
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from evidence.gpu import __main__ as queue
from evidence.gpu import carry, kernels, operators, rows
from evidence.gpu.jobs import JOBS, QUEUE, Case

COMMAND = [sys.executable, "-m", "evidence.gpu"]
KEY = dict(zip(rows.KEY, ("ceilings", "copy", "Some GPU", "2.11.0", "3.6.0", "code"), strict=True))
ROW = KEY | {
    "cells": [{"copy": "rows", "TB/s": 3.1234}],
    "about": {"commit": "1" * 40, "cores": 2, "processor": "a processor"},
}


def start(*options):
    return subprocess.Popen([*COMMAND, *options], cwd=carry.ROOT, text=True, stdout=subprocess.PIPE)


def options(folder, **given):
    return Namespace(rows=folder, dry=True, first=None, out=None, jobs=[], **given)


@pytest.mark.slow
def test_the_first_case_of_every_job_at_toy_sizes(tmp_path):
    process = start("--dry", "--first", "1", "--rows", str(tmp_path))
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    for job in QUEUE:
        (row,) = rows.read(tmp_path, job.name)
        assert row["cells"]
        assert row["card"] == "cpu"
        assert {"commit", "processor", "cores", "python"} <= row["about"].keys()
        assert rows.section([row]).startswith("cpu, torch")


@pytest.mark.slow
def test_every_case_at_toy_sizes(tmp_path):
    process = start("--dry", "--rows", str(tmp_path))
    printed, _ = process.communicate()
    assert process.returncode == 0, printed


@pytest.mark.slow
def test_a_killed_job_goes_on(tmp_path):
    process = start("ceilings", "--dry", "--rows", str(tmp_path))
    deadline = time.monotonic() + 100
    while not rows.read(tmp_path, "ceilings") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    measured = rows.read(tmp_path, "ceilings")
    cases = [case.name for case in JOBS["ceilings"].cases(True)]
    assert 0 < len(measured) < len(cases)
    printed, _ = start("ceilings", "--dry", "--rows", str(tmp_path)).communicate()
    assert f"ceilings: {len(measured)} of {len(cases)} rows are there" in printed
    after = rows.read(tmp_path, "ceilings")
    assert after[: len(measured)] == measured
    assert sorted(row["case"] for row in after) == sorted(cases)


def test_a_job_ends_when_its_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(queue, "LIMIT", 0.5)
    began = time.monotonic()
    assert queue.supervise(JOBS["sweep"], options(tmp_path)) == queue.STOPPED
    assert time.monotonic() - began < 20
    assert "the same command goes on" in capsys.readouterr().out


def job_of(*named):
    """Stands for a job."""

    def cases(toy):
        return [Case(name, measure, ("timm",)) for name, measure in named]

    return Namespace(name="ceilings", processes=1, cases=cases)


def test_a_case_that_failed_has_a_row_and_the_others_go_on(tmp_path):
    def fail():
        raise RuntimeError("no kernel image")

    job = job_of(("bad", fail), ("good", lambda: {"cells": [{"a": 1}]}))
    assert queue.work(job, options(tmp_path)) == queue.FAILED
    bad, good = rows.read(tmp_path, "ceilings")
    assert bad["failed"] == "RuntimeError: no kernel image"
    assert "in fail" in bad["trace"]
    assert good["cells"] == [{"a": 1}]
    assert queue.work(job, options(tmp_path)) == 0
    assert len(rows.read(tmp_path, "ceilings")) == 2
    assert "- bad: RuntimeError: no kernel image" in rows.section([bad, good])


def test_a_case_that_was_killed_is_tried_last(tmp_path):
    def end():
        raise SystemExit  # leaves what a kill leaves

    named = [("slow", end), ("quick", lambda: {"cells": []})]
    for expected in ([], ["quick"]):
        with pytest.raises(SystemExit):
            queue.work(job_of(*named), options(tmp_path))
        assert [row["case"] for row in rows.read(tmp_path, "ceilings")] == expected
    named[0] = ("slow", lambda: {"cells": []})
    queue.work(job_of(*named), options(tmp_path))
    assert [row["case"] for row in rows.read(tmp_path, "ceilings")] == ["quick", "slow"]


@pytest.mark.slow
def test_code_is_generated_in_processes_and_a_failure_ends_nothing(tmp_path, capsys):
    files = [tmp_path / name for name in "abc"]
    queue.generate([partial(int, "no number"), *(partial(file.write_text, "code") for file in files)], 2)
    assert [file.read_text() for file in files] == ["code"] * 3
    assert "code of 4 of 4 cases" in capsys.readouterr().out


def test_a_torn_line_costs_one_row(tmp_path):
    for _ in range(2):
        rows.append(tmp_path, ROW)
    file = tmp_path / "ceilings.jsonl"
    file.write_text(file.read_text()[:-9])
    rows.append(tmp_path, ROW)
    assert rows.read(tmp_path, "ceilings") == [ROW, ROW]


def test_a_row_holds_for_its_code_and_not_for_comments(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    file = tmp_path / "kernels" / "read.py"
    file.parent.mkdir()

    def digest(text):
        file.write_text(text)
        rows.code_digest.cache_clear()
        return rows.code_digest(("kernels",))

    first = digest("ROWS = 64\n")
    assert digest("# tokens\nROWS = 64  # per tile\n") == first
    assert digest("ROWS = 32\n") != first
    rows.code_digest.cache_clear()
    assert rows.code_digest(("timm",)).startswith(rows.code_digest(("timm",), exact=False))


def test_the_list_says_what_is_left(tmp_path):
    job = JOBS["ceilings"]
    cases = job.cases(False)
    assert queue.state(job, tmp_path) == (f"0 of {len(cases)} rows", False)
    for case in cases:
        code = rows.code_digest(case.code)
        rows.append(tmp_path, {**ROW, "case": case.name, "code": code})
        if case is cases[0]:
            assert queue.state(job, tmp_path)[0] == f"1 of {len(cases)} rows on Some GPU, torch 2.11.0, Triton 3.6.0"
    assert queue.state(job, tmp_path) == (
        f"finished: {len(cases)} of {len(cases)} rows on Some GPU, torch 2.11.0, Triton 3.6.0",
        True,
    )
    older = tmp_path / "older"
    older.mkdir()
    rows.append(older, ROW)
    assert queue.state(job, older) == (f"0 of {len(cases)} rows, and rows of older code", False)


def test_every_job_lists_its_cases_without_a_gpu():
    for job in QUEUE:
        names = [case.name for case in job.cases(False)]
        assert 0 < len(names) == len({*names})


def test_what_is_missing_is_said_before_anything_is_measured(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    monkeypatch.setattr(sys, "argv", ["evidence.gpu", "training"])
    assert queue.main() == queue.MISSING
    assert capsys.readouterr().err == "evidence.gpu: this machine lacks a GPU that torch sees: install that first.\n"
    monkeypatch.setattr(queue, "find_spec", lambda name: None if name in ("lightning", "yaml") else name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert queue.missing()[:2] == ["lightning", "yaml"]
    assert "C compiler" in queue.missing()[2]


def test_the_page_is_what_the_rows_make(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(rows.PAGE.read_text())
    rows.write_tables(JOBS, queue.ROWS, page)
    assert page.read_text() == rows.PAGE.read_text()


def test_tables_of_invented_rows():
    newer = {**ROW, "cells": [{"copy": "rows", "TB/s": 1234.5}]}
    other = {**ROW, "case": "issue", "cells": [{"warps": 4, "rate": None}]}
    text = rows.section([ROW, newer, other])
    assert text.startswith("Some GPU, torch 2.11.0, Triton 3.6.0; 2 cores of a processor; commit 111111111111.")
    assert "| rows | 1,234 |" in text
    assert "3.12" not in text
    assert "| 4 | – |" in text
    assert rows.section([]) == rows.NOT_MEASURED


def test_the_same_bits_are_asked_of_every_call(monkeypatch):
    results = iter([torch.zeros(3), torch.tensor([0.0, 1e-30, 0.0])])
    monkeypatch.setattr(kernels, "passes", lambda *_: lambda: (next(results),))
    with pytest.raises(ArithmeticError, match="1 of 2 results differ from the first"):
        kernels.same_bits("rala", "forward", (1, 2, (5, 5)), True)


def test_an_operator_is_checked_before_it_is_timed():
    tensors, rotary = operators.operands(1, 2, 5, True)
    for name in operators.ROTATED:
        right = operators.operator(name, tensors, rotary, True)()
        operators.check(name, right, tensors, rotary)
        with pytest.raises(ArithmeticError, match=f"{name} is wrong: its relative error is"):
            operators.check(name, 1.03 * right, tensors, rotary)


@pytest.mark.parametrize("backward", [False, True])
def test_softmax_attention_is_checked_before_it_is_timed(monkeypatch, backward):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for factor, wrong in ((1.0, False), (1.03, True)):
        monkeypatch.setattr(
            operators, "softmax_attention", lambda *x, f=factor, **y: f * operators.plain_softmax(*x, **y)
        )
        if wrong:
            with pytest.raises(ArithmeticError, match="one kernel is wrong: its relative error is 3"):
                operators.beside_rotation(3, backward, True)
        else:
            (cells,) = operators.beside_rotation(3, backward, True)["cells"]
            assert cells["tokens"] == 9
            assert len(cells) == 6


def test_where_curves_cross(monkeypatch):
    """Softmax takes as many milliseconds as tokens, rotated 2.5 times as many; ours 0, 25 or 1,000."""
    of_ours = {"rala": 0.0001, "mala": 25.0, "linear": 1000.0}

    def times(calls, toy):
        (count,) = {call().shape[2] for call in calls.values()}
        return {**of_ours, "SDPA": float(count), "SDPA, rotated": 2.5 * count}

    monkeypatch.setattr(operators, "medians", times)
    cells = operators.beside_softmax(8, 2, (3, 7), True)["cells"]
    assert [row["tokens"] for row in cells[:2]] == [9, 49]
    assert [row["operator"] for row in cells[2:]] == ["rala", "mala", "linear"]
    assert [row["beats SDPA from"] for row in cells[2:]] == ["the first size", "25 tokens", "nowhere"]
    assert cells[3]["beats SDPA, rotated from"] == "10 tokens"
    assert cells[2]["predicted"] == "200 to 300"


def test_the_share_is_of_what_a_copy_moves_in_the_same_time(monkeypatch):
    """MALA reads and writes four tensors, a copy two: in twice the time of a copy its rate is the same."""
    monkeypatch.setattr(operators, "medians", lambda calls, toy: {"ours": 2.0, "copy": 1.0})
    (cells,) = operators.beside_copy("mala", 3, False, True)["cells"]
    assert cells["share of the copy's rate"] == 1


def test_flash_bla_is_measured_once_its_source_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "FLASH", carry.CARRIED / tmp_path.name)
    (cells,) = operators.flash_bla(False, False)["cells"]
    assert cells["flash_bla"] == f"none: build/gpu/{tmp_path.name} is missing, see docs/contribute/gpu.md"
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    code = ("kernels", "flash")
    digests = []
    for name in code:
        (tmp_path / name).mkdir()
        (tmp_path / name / "read.py").write_text("ROWS = 64\n")
        rows.code_digest.cache_clear()
        digests.append(rows.code_digest(code))
    rows.code_digest.cache_clear()
    assert digests[0] != digests[1]
