"""What the pages name exists: commands with their flags and recipe keys, modules, files and settings."""

import ast
import builtins
import pkgutil
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch

from linvit.bundled import bundled_files
from linvit.ranges import declared
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.runs.tasks import RUNS, SOURCES
from linvit_cli import _parser, parse
from linvit_cli.run_arguments import recipe_overrides

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "contribute" / "log.md")  # which tells what was
PLACEHOLDERS = ("RECIPE", "my.yaml")  # which a reader replaces or has written
OTHERS = {"tests/test_models.py"}  # timm's
FILE = re.compile(r"`((?:linvit|tests|recipes|docs)/[a-z0-9_/.]+\.(?:py|yaml|md))`")


def python_blocks(page):
    """(line, code) of every Python block of a page."""
    text = page.read_text()
    for block in re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL):
        yield text[: block.start()].count("\n") + 2, textwrap.dedent(block[1])


def names_of(tree):
    """The names that a block makes, and those that it reads."""
    made, read = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
    return made, read


def test_python_runs_from_top_to_bottom():
    """As far as names go: each is made in the block or in one above it."""
    for page in PAGES:
        names = set(dir(builtins))
        for line, code in python_blocks(page):
            made, read = names_of(ast.parse(code))
            names |= made
            assert not read - names, f"{page}, block at line {line}: {sorted(read - names)}"


def test_attention_of_a_network_from_a_file_is_aligned():
    page = ROOT / "docs" / "use" / "linearize.md"
    copying, aligning = (code for _, code in python_blocks(page) if "pairs" in code)
    torch.manual_seed(0)
    names = {}
    exec(copying, names)
    exec(aligning.replace("range(20)", "range(1)"), names)
    first = sum(names["errors"])
    exec(aligning, names)
    assert sum(names["errors"]) < 0.95 * first


def commands(page):
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "linvit" in words and words[0] != "python":
                yield tuple(words[words.index("linvit") + 1 :])


def test_commands_are_understood():
    for words in dict.fromkeys(words for page in PAGES for words in commands(page)):
        options = parse(words)
        check_data_keys(f"{override.partition('=')[0]} " for override in options.overrides)
        if options.command == "train" and options.recipe not in PLACEHOLDERS:
            named = options.recipe in bundled_files()
            Recipe(read_recipe(options.recipe if named else ROOT / options.recipe, recipe_overrides(options.rest)))


def test_flags_in_the_text_exist(capsys):
    for command in {text for page in PAGES for text in re.findall(r"`linvit ([^`]*--[^`]*)`", page.read_text())}:
        words = command.split()
        with pytest.raises(SystemExit, match="0"):
            _parser().parse_args([*words[: 2 if words[0] in ("bench", "data") else 1], "--help"])
        text = capsys.readouterr().out
        for flag in re.findall(r"--[a-z-]+", command):
            assert f"{flag} " in text or f"{flag}\n" in text, command
        for task in re.findall(r"--task (\w+)", command):
            assert task in (*RUNS, "NAME"), command


def check_data_keys(texts):
    known = {name for source in SOURCES.values() for name in declared(source)} | {"name", "key"}
    for text in texts:
        for key in re.findall(r"\bdata\.(\w+)", text):
            assert key in known, text


def test_names_files_and_settings_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"(?<![\w./])linvit(?:\.\w+)+", text)):
        pkgutil.resolve_name(name.removesuffix(".py"))
    for file in set(FILE.findall(text)) - OTHERS:
        assert (ROOT / file).is_file(), file
    code = set(re.findall(r"`([^`\n]+)`", text))
    check_data_keys(snippet for snippet in code if not snippet.startswith("linvit."))
    settings = {name for run in RUNS.values() for name in declared(run.task_class)} | {"name"}
    for snippet in code:
        for key in re.findall(r"\btask\.(\w+)", snippet):
            assert key in settings, snippet


def test_statements_on_safety_name_tests_that_exist():
    text = (ROOT / "docs" / "reference" / "safety.md").read_text()
    tests, named = set(), 0
    for file, test in re.findall(r"`([\w/]+\.py)?::(test_\w+)`", text):  # without a file: of the one before
        if file:
            tests = set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), flags=re.MULTILINE))
        assert test in tests, test
        named += 1
    assert named > 30


def test_links_lead_somewhere():
    """On GitHub: to a file, and to a heading in it. The first page of the site links to generated pages too."""
    for page in PAGES:
        for target, _, anchor in re.findall(r"\]\((?!https://|mailto:)([^)#\s]*)(#([^)\s]+))?\)", page.read_text()):
            file = (page.parent / target).resolve() if target else page
            if page == ROOT / "docs" / "index.md" and not file.exists():
                assert file.parts[-2] in ("python", "reference", "models", "contribute"), target
                continue
            assert file.is_file(), (page, target)
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file.read_text()), f"{page}: {target}#{anchor}"


def anchors(text):
    """The anchors that GitHub and the site make of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
