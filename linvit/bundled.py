"""What comes with linvit: its recipes with their headers, and its networks with their counts.

Nothing here needs torch, so that the command line lists both at once. `python -m evidence run counts` counts
the networks again, and a test compares the two.
"""

import fnmatch
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from linvit.errors import SettingError
from linvit.ranges import lookup, nearest

PACKAGE = Path(__file__).parent
NETWORKS = PACKAGE / "models" / "networks.json"
PUBLISHED, COST, RUN = "# published: ", "# cost: ", "# run:  "
Rows = list[dict[str, Any]]


def bundled_folder() -> Path:
    """The folder of the recipes: inside an installed package, next to it in a checkout."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def bundled_files() -> dict[str, Path]:
    """The file of each bundled recipe by its name, such as demo/ravlt_nano_digits; base.yaml files are left out."""
    folder = bundled_folder()
    files = (path for path in sorted(folder.rglob("*.yaml")) if path.name != "base.yaml")
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe, given by its path or by the name of a bundled one.

    Raises ValueError, offering the nearest name, if it is neither.
    """
    path = Path(os.path.expanduser(recipe))
    if path.is_file():
        return path
    files = bundled_files()
    if path.as_posix() in files:
        return files[path.as_posix()]
    if path.is_dir():
        raise ValueError(f"The recipe {path} is a folder: give the path of a .yaml file in it.")
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    here = {each.with_suffix(""): str(each) for each in path.parent.glob("*.y*ml")}
    alike = here.get(path.with_suffix(""))
    offer = f" Did you mean {alike!r}?" if alike else nearest(path, here.values()) or nearest(name, files)
    raise ValueError(
        f"There is no recipe at {path}: give the path of a .yaml file, or a name that `linvit recipes` lists.{offer}"
    )


def list_recipes(pattern: str = "*") -> list[str]:
    """The names of the bundled recipes that fit a pattern, such as "ravlt/*"."""
    return fnmatch.filter(bundled_files(), pattern)


def files_below(path: str | Path) -> list[Path]:
    """The YAML files below a folder or a bundled folder of that name; otherwise the file that `find_recipe` finds."""
    path = Path(path)
    if path.is_dir():
        return sorted(path.rglob("*.yaml"))
    bundled = [file for name, file in bundled_files().items() if name.startswith(f"{path.as_posix()}/")]
    return bundled or [find_recipe(path)]


def shown_name(file: Path) -> str:
    """The name of a bundled recipe if the file was found by name, otherwise its path as given."""
    if file.is_absolute() and file.is_relative_to(bundled_folder()):
        return file.relative_to(bundled_folder()).with_suffix("").as_posix()
    return str(file)


def recipes(*words: str) -> list[dict[str, str]]:
    """The bundled recipes whose name or header contains all of the words, in upper or lower case.

    Keys: name, about (what it reproduces), published, ours, cost, command. Raises ValueError if there is none.
    """
    rows = [{"name": name, **header(file)} for name, file in bundled_files().items()]
    wanted = [word.casefold() for word in words]
    chosen = [row for row in rows if all(word in " ".join(row.values()).casefold() for word in wanted)]
    if not chosen:
        words_there = {word for row in rows for word in re.findall(r"\w+", " ".join(row.values()))}
        strange = next((word for word in words if word not in words_there), "")
        raise ValueError(
            f"No recipe contains {' and '.join(map(repr, words))} in its name or header: try fewer or other words."
            f"{nearest(strange, words_there)}"
        )
    return chosen


def header(file: Path) -> dict[str, str]:
    """The header of a recipe: about, published, ours, cost and command, each "" if it is missing."""
    lines = file.read_text(encoding="utf-8").splitlines()
    lines = lines[: next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    title = next((number for number, line in enumerate(lines) if line.startswith((PUBLISHED, COST, RUN))), len(lines))
    published, _, ours = _value(lines, PUBLISHED).partition("ours:")
    return {
        "about": " ".join(line.removeprefix("#").strip() for line in lines[:title]),
        "published": published.strip(),
        "ours": ours.strip(),
        "cost": _value(lines, COST),
        "command": re.sub(r"recipes/(\S+)\.yaml", r"\1", _value(lines, RUN)),
    }


def _value(lines: Sequence[str], mark: str) -> str:
    return next((line.removeprefix(mark).strip() for line in lines if line.startswith(mark)), "")


class Listed(TypedDict):
    """The rows of one task, and an explanation of their numbers."""

    caption: str
    rows: Rows


def list_networks(task: str = "classification", family: str | None = None) -> Rows:
    """Rows on the networks of a task; their keys are explained by `listing` in its file of `linvit.runs.tasks`.

    family: only this family, such as ravlt or swin_tiny. Raises ValueError for an unknown task or family.
    """
    rows = _of_task(task)["rows"]
    if family is None:
        return rows
    families = {row["family"] for row in rows if "family" in row}
    if not families:
        raise SettingError(
            f"`family` is {family!r}, but the networks of the task {task!r} have no families: leave it out."
        )
    lookup("family", family, dict.fromkeys(sorted(families)))
    return [row for row in rows if row["family"] == family]


def caption(task: str) -> str:
    """The explanation of the numbers in a task's rows."""
    return _of_task(task)["caption"]


def _of_task(task: str) -> Listed:
    stored: dict[str, Listed] = json.loads(NETWORKS.read_text(encoding="utf-8"))
    return lookup("task", task, stored)
