"""Names say what they hold: docs/reference/words.md lists words that linvit does not use; the code is held to it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("linvit", "linvit_cli", "evidence") for path in (ROOT / folder).rglob("*.py"))
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


def test_names_say_what_they_hold():
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in names(ast.parse(path.read_text(encoding="utf-8")))
        if name in EMPTY
        or (name not in PAPERS and any(root in re.split(r"_|(?<=[a-z])(?=[A-Z])", name.lower()) for root in ROOTS))
    ]
    assert faults == []


def test_modules_are_named_by_the_words_too():
    modules = {path.stem for path in FILES}
    assert not modules & {"judge", "judged", "drawn", "listen", "pictures", "draw"}
