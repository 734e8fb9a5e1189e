"""The networks of every task with size, cost and published values, as rows; counted once and stored next to this file.

`python -m evidence run counts` does so again, and a test compares the two. This module needs only the standard library,
so that `linvit models` can load it without the networks.
"""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

STORED = Path(__file__).with_name("networks.json")
Rows = list[dict[str, Any]]


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
        raise ValueError(
            f"`family` is {family!r}, but the networks of the task {task!r} have no families: leave it out."
        )
    _check("family", family, sorted(families))
    return [row for row in rows if row["family"] == family]


def caption(task: str) -> str:
    """The explanation of the numbers in a task's rows."""
    return _of_task(task)["caption"]


def _of_task(task: str) -> Listed:
    stored: dict[str, Listed] = json.loads(STORED.read_text(encoding="utf-8"))
    _check("task", task, stored)
    return stored[task]


def _check(argument: str, name: str, names: Iterable[str]) -> None:
    """As `linvit.ranges.known`, whose import would import the networks."""
    known = list(names)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{argument}` is {name!r}, expected one of {', '.join(known)}.{hint}")
