"""4,000 generated mistakes, 33 in the quick tests: none ends in a traceback, a hang, a leak or silent success."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_calls import command_lines, python_calls
from fuzz_files import checkpoints, image_files
from fuzz_play import trouble
from fuzz_readers import READERS, damaged
from fuzz_recipes import class_paths, recipe_files, recipe_values
from fuzz_run import tiny_checkpoint
from hypothesis import HealthCheck, Phase, given, settings

QUICK = 100  # one in so many of the cases
WRITTEN_SLOWLY = {"ExecuTorch files", "Core ML files", "compiled libraries"}
"""Whose first file takes longer than the quick tests have."""
KINDS = {
    "recipe values": (recipe_values(), 500),
    "recipe files": (recipe_files(), 150),
    "class paths": (class_paths(), 100),
    "command lines": (command_lines(), 400),
    "checkpoints": (checkpoints(), 300),
    "image files": (image_files(), 200),
    "Python calls": (python_calls(), 200),
    **{kind: (damaged(kind), 550 if kind == "data" else 200) for kind in READERS},
}
"""Class of mistakes → its cases, and how many there are."""


def failures(kind: str, count: int, folders: Iterator) -> list[str]:
    """One line for each of so many cases that ended badly."""
    strategy, _ = KINDS[kind]
    tiny_checkpoint()  # trains, which a strategy must not: it seeds the generators
    ended = []

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def play(case):
        folder = next(folders)
        wrong = trouble(case, folder)
        shutil.rmtree(folder, ignore_errors=True)
        if wrong is not None:
            ended.append(f"{case}: {wrong}")

    play()
    return ended


@pytest.fixture
def folders(tmp_path):
    """New empty folders, one after the other."""

    def new():
        for number in range(10**6):
            folder = tmp_path / str(number)
            folder.mkdir()
            yield folder

    return new()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WRITTEN_SLOWLY))
def test_some_mistakes(kind, folders):
    assert failures(kind, KINDS[kind][1] // QUICK, folders) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_mistakes(kind, folders):
    assert failures(kind, KINDS[kind][1], folders) == []


def test_the_page_on_safety_counts_the_cases():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "safety.md").read_text()
    counts = {kind: int(count) for kind, count in re.findall(r"^\| ([^|]+) \| (\d+) \|$", page, flags=re.MULTILINE)}
    assert counts == {kind: count for kind, (_, count) in KINDS.items()}
