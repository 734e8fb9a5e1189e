"""Names say what they hold: docs/reference/words.md lists words that linvit does not use; the code is held to it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "linvit").rglob("*.py"), *(ROOT / "linvit_cli").rglob("*.py")])
EMPTY = {"one", "part", "found", "own", "told"}  # what do they hold?
ROOTS = ("judge", "judging", "heard", "hearing", "listen", "mixer")  # words of other ideas, in any name
PAPERS = {"TokenMixer", "FusedMixer", "mixer"}  # CARE's own word for its token mixer


def names(tree):
    """Every name that a file gives: variables, arguments, functions, classes, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_hold(path):
    given = list(names(ast.parse(path.read_text(encoding="utf-8"))))
    empty = [f"{name} in line {line}" for name, line in given if name in EMPTY]
    other = [
        f"{name} in line {line}"
        for name, line in given
        if name not in PAPERS and any(root in re.split(r"_|(?<=[a-z])(?=[A-Z])", name.lower()) for root in ROOTS)
    ]
    assert empty + other == []


def test_modules_are_named_by_the_words_too():
    modules = {path.stem for path in FILES}
    assert not modules & {"judge", "judged", "drawn", "listen", "pictures", "draw"}
