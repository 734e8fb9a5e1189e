"""Library rooms speak of Python arguments, and through logging: recipes, flags and printing are the command line's."""

import ast
import re
from pathlib import Path

import pytest

import linvit

ROOT = Path(linvit.__file__).parent
SPEAKING = ("data", "models", "layers", "ops", "analysis", "fusion")
FOREIGN = re.compile(
    r"\b(data|task|trainer|model)\.[a-z_]+(?![a-z_.(])|(?<![\w-])--[a-z][a-z-]*(?![a-z-]*[:)])|\brecipes?\b"
)
NOT_SENTENCES = {"--stdout"}  # espeak-ng's


def files_of(rooms):
    return [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0].removesuffix(".py") in rooms]


def sentences(tree):
    """(line, text) of every string that is no docstring; what f-strings insert reads as {}."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= set(map(id, node.values))
            texts = [value.value if isinstance(value, ast.Constant) else "{}" for value in node.values]
            yield node.lineno, "".join(texts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def foreign(text):
    return text not in NOT_SENTENCES and FOREIGN.search(text) is not None


@pytest.mark.parametrize(
    "text", ["set data.size to 3", "`task.draws`", "(trainer.devices=1)", "give --data", "the recipe names"]
)
def test_keys_and_flags_are_recognized(text):
    assert foreign(text)


def test_messages_name_arguments_not_keys_flags_or_recipes():
    said = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files_of(SPEAKING)
        for line, text in sentences(ast.parse(path.read_text()))
        if foreign(text)
    ]
    assert not said, "\n".join(said)


def test_library_rooms_do_not_print():
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
    said = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files_of(rooms)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not said, "\n".join(said)
