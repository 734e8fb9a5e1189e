"""What the site says of linvit that is not written by hand: commands, networks, recipes, and the public names."""

import argparse
import ast
import inspect
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from model_cards import BIBTEX, network_card

from linvit.analysis.markdown import markdown_rows, markdown_table
from linvit.bundled import bundled_files, caption, header, list_networks
from linvit.runs.recipe_values import read_recipe
from linvit.runs.tasks import RUNS
from linvit_cli import _parser
from linvit_cli.commands import GROUPS
from linvit_cli.models import readable
from linvit_cli.parser import HelpFormatter, Parser

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = {"CONTRIBUTING.md": "contribute/index.md", "CHANGELOG.md": "contribute/changes.md"}
LINK = re.compile(r"\]\(docs/")
CITE = """# Cite

Please cite the paper of the method that you use, and linvit.

## The papers

```bibtex
{papers}```

## linvit

The file `CITATION.cff` of the repository, which reference managers and GitHub read:

```yaml
{software}```
"""
COLUMNS = 100  # of usage and help texts
COMMANDS = """# Commands

Every command with all its options, as `linvit COMMAND --help` prints them. `key.key=value` changes a setting of a
recipe after `train`, `data.key=value` one of the data after `eval`, `predict` and `analyze`. A mistake ends in
[one sentence](errors.md) and exit code 2; `--debug`, which every command has, shows the traceback.
"""


def generated_pages() -> dict[str, str]:
    """Each page as Markdown, by its path in docs.

    Raises ValueError if a public name has no docstring.
    """
    return {
        **{target: LINK.sub("](../", _read(name)) for name, target in FROM_THE_ROOT.items()},
        "start/cite.md": CITE.format(papers=BIBTEX, software=_read("CITATION.cff")),
        "reference/commands.md": command_page(),
        "reference/recipes.md": recipe_page(),
        **{f"reference/python/{name}": text for name, text in python_pages().items()},
        **{f"reference/models/{name}": text for name, text in network_pages().items()},
    }


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def command_page() -> str:
    """The page as Markdown."""
    os.environ["COLUMNS"] = str(COLUMNS)
    commands = _choices(_parser())
    lines = [COMMANDS]
    for group, names in GROUPS.items():
        lines.append(f"## {group[0].upper()}{group[1:]}\n")
        for name in names:
            lines += _command(name, commands[name], level=3)
    return "\n".join(lines)


def _choices(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), {})


def _command(name: str, parser: Parser, level: int) -> Iterator[str]:
    yield f"{'#' * level} linvit {name} {{: #{name.replace(' ', '-')} }}\n"
    yield f"{(parser.description or '').partition(chr(10))[0]}\n"
    inner = _choices(parser)
    if not inner:
        yield f"```\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n"
        for group in parser._action_groups:
            yield from _options(group, parser)
        yield f"{_examples(parser)}\n"
    for word, action in inner.items():
        yield from _command(f"{name} {word}", action, level + 1)


def _options(group: argparse._ArgumentGroup, parser: Parser) -> Iterator[str]:
    formatter = HelpFormatter(parser.prog)
    actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
    if actions and group.title != "other":
        yield f"| {group.title} | |\n|---|---|"
        yield from (f"| `{_shown(formatter, action)}` | {_help(formatter, action)} |" for action in actions)
        yield ""


def _shown(formatter: HelpFormatter, action: argparse.Action) -> str:
    """Such as `--topk N` or `RECIPE`."""
    shown = formatter._format_action_invocation(action)
    return shown.replace("|", "\\|")


def _help(formatter: HelpFormatter, action: argparse.Action) -> str:
    text = formatter._expand_help(action) if action.help else ""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _examples(parser: Parser) -> str:
    commands = [line.strip() for line in (parser.epilog or "").splitlines()[1:]]
    return "```sh\n" + "\n".join(commands) + "\n```" if commands else ""


NETWORKS = """# Networks

Every network with its size and cost, as `linvit models` prints them. Those for classification are timm models, each
with a model card; `features_only=True` makes them backbones. MACs are multiply-accumulates.
"""


def network_pages() -> dict[str, str]:
    """Each page as Markdown, by its path below reference/models."""
    names = [row["name"] for row in list_networks()]
    return {"index.md": _index(), **{f"{name}.md": network_card(name) for name in names}}


def _index() -> str:
    lines, seen = [NETWORKS], set()
    for task in RUNS:
        rows = readable(list_networks(task))
        key = markdown_rows([{k: v for k, v in row.items() if k != "weights"} for row in rows], left=2) if rows else ""
        if not rows or key in seen:
            continue
        seen.add(key)
        if task == "classification":
            rows = [{**row, "model": f"[`{row['model']}`]({row['model']}.md)"} for row in rows]
        lines += [
            f"## {task[0].upper()}{task[1:]}\n",
            markdown_rows(rows, left=2),
            f"\n{caption(task)}.\n".replace("..", "."),
        ]
    return "\n".join(lines)


RECIPES = """# Recipes

The recipes that come with linvit. `linvit train NAME` trains one of them, `linvit recipes WORD …` shows the published
and measured results, the cost and the command of those that match, and `key.key=value` changes a setting.
"""
FOLDERS = {
    "care": "CARE",
    "demo": "Demo",
    "dense": "Detection and segmentation",
    "evidence": "Evidence on real images",
    "generation": "Image generation",
    "language": "Language",
    "linearize": "From softmax to linear",
    "mavit": "MAViT",
    "mechanisms": "DeiT and Swin with other attention",
    "multilabel": "Several labels per image",
    "pretrain": "Backbones of the evidence",
    "ravlt": "RAVLT",
    "speech": "Speech",
    "study": "The study on digits",
    "weights": "Bundled weights",
}
HEAD = ("recipe", "task", "network", "data", "for")


def recipe_page() -> str:
    """The page as Markdown."""
    lines = [RECIPES]
    for folder, group in groupby(bundled_files().items(), key=lambda item: item[0].partition("/")[0]):
        rows = [_row(name, read_recipe(file), header(file)["about"]) for name, file in group]
        lines += [f"## {FOLDERS[folder]}\n", markdown_table(HEAD, rows, left=len(HEAD)), ""]
    return "\n".join(lines)


def _row(name: str, values: Mapping[str, Any], about: str) -> list[str]:
    task = values.get("task", {}).get("name", "classification")
    data = values.get("data", {}).get("name", "")
    return [f"`{name}`", task, ", ".join(_networks(values)), data, about.replace("<", "&lt;")]


def _networks(values: Mapping[str, Any]) -> Iterator[str]:
    model = values.get("model", {})
    for key in ("name", "mechanism", "framework", "backbone", "attention"):
        if isinstance(model.get(key), str):
            yield f"`{model[key]}`"


VERBS = ("analyze", "evaluate", "export", "predict", "prepare", "report", "source")
"""The methods of runs that the page of each task shows, also if a base of its class has them."""


def python_pages() -> dict[str, str]:
    """Each page as Markdown, by its path below reference/python.

    Raises ValueError if a public name has no docstring.
    """
    if missing := undocumented():
        raise ValueError(f"These public names have no docstring: {', '.join(missing)}. Write one for each.")
    names = reference()
    written = {f"{package.replace('.', '-')}.md": _page(package, names[package]) for package in ROOMS}
    rows = "\n".join(f"| [`{package}`]({package.replace('.', '-')}.md) | {about} |" for package, about in ROOMS.items())
    return written | {
        "index.md": f"# Python\n\nEvery public name, from its docstring.\n\n| package | |\n|---|---|\n{rows}\n"
    }


def _page(package: str, names: list[str]) -> str:
    return "\n".join([f"# {package}\n", f"{ROOMS[package]}\n", *map(_entry, names)])


def _entry(name: str) -> str:
    """A function that has its module's name is found where it is defined."""
    if isinstance(pkgutil.resolve_name(name), ModuleType):
        return f"::: {home_of(name)}\n    options: {{heading: {name}, toc_label: {name.rpartition('.')[2]}}}\n"
    if name.startswith("linvit.runs.") and name.endswith("Run"):
        return f"::: {name}\n    options: {{inherited_members: [{', '.join(VERBS)}]}}\n"
    return f"::: {name}\n"


ROOMS = {
    "linvit": "Models, training, loading: what `import linvit` offers.",
    "linvit.ops": "The attention operator and its parts, as functions of tensors; needs torch alone.",
    "linvit.layers": "Attention and blocks as modules.",
    "linvit.models": "The networks, swapping and linearizing.",
    "linvit.kernels": "Kernels for GPUs and CPUs.",
    "linvit.data": "Where batches come from: the sources that recipes name by `data.name`.",
    "linvit.tasks": "Losses and measures: the tasks that recipes name by `task.name`.",
    "linvit.runs": "Training, loading, evaluating, predicting, reporting.",
    "linvit.analysis": "Ranks, scores, magnitudes, costs and figures.",
    "linvit.streaming": "Images larger than memory.",
    "linvit.parallel": "One image over many processes.",
    "linvit.deploy": "Files of other runtimes.",
    "linvit.bench": "Time, memory and errors.",
    "linvit.studies": "Comparisons of many runs.",
}
"""The packages of the reference, each with what it is for."""

DOTTED = re.compile(r"(?<![\w./])linvit(?:\.[a-z]\w*)*\.\w+")
IMPORTED = re.compile(r"^from (linvit[\w.]*) import (.+)$", re.MULTILINE)


def offered(package: str) -> list[str]:
    """The full names that a package and the packages in it offer: re-exported, in `__all__`, or defined there."""
    names = [f"{package}.{name}" for name in _offered(import_module(package))]
    names = [name for name in names if _is_code(value_of(name))]
    if package == "linvit":
        return names
    path = import_module(package).__path__
    inner = [name for _, name, is_package in pkgutil.iter_modules(path, f"{package}.") if is_package]
    return names + [name for room in inner for name in offered(room)]


def _offered(module: ModuleType) -> Iterator[str]:
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
    for name, value in vars(module).items():
        if _is_code(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def _is_code(value: object) -> bool:
    return inspect.isfunction(value) or inspect.isclass(value)


def mentioned(pages: list[Path]) -> set[str]:
    """The full names of functions and classes that the pages mention in text or import in code."""
    names: set[str] = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        names |= set(DOTTED.findall(text))
        for module, imported in IMPORTED.findall(text):
            names |= {f"{module}.{name.strip()}" for name in imported.split("#")[0].split(",")}
    return {name for name in names if _is_code(value_of(name))}


def value_of(name: str) -> object:
    """The object with that full name, None without one; of a function and a module of one name, the function."""
    home, _, last = name.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(home), last, None)
    except (AttributeError, ImportError, ValueError):
        return None


def home_of(name: str) -> str:
    """The full name of a function or class where it is defined."""
    value = value_of(name)
    return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]


def written_pages() -> list[Path]:
    """All pages that are written by hand."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def reference() -> dict[str, list[str]]:
    """The full names of the reference by package, each object once: what it offers, then what the pages mention."""
    names: dict[str, list[str]] = {package: [] for package in ROOMS}
    listed: set[int] = set()

    def add(package: str, name: str) -> None:
        value = value_of(name)
        if id(value) not in listed:
            names[package].append(name)
            listed.add(id(value))

    for package in ROOMS:
        for name in offered(package):
            add(package, name)
    for name in sorted(mentioned(written_pages())):
        package = ".".join(home_of(name).split(".")[:2])
        add(package if package in names else "linvit", home_of(name))
    return names


def undocumented() -> list[str]:
    """The names of the reference that have no docstring."""
    names = (name for listed in reference().values() for name in listed)
    return [name for name in names if not inspect.getdoc(value_of(name))]
