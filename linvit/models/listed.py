"""The networks of every task with size, cost and published values, as rows; counted once and stored beside this file.

`make counts` counts them again; a test compares the two.
"""

import json
from pathlib import Path
from typing import Any

from linvit.layers.checks import known

STORED = Path(__file__).with_name("networks.json")
Rows = list[dict[str, Any]]


def list_networks(task: str = "classification", family: str | None = None) -> Rows:
    """Rows on the networks of a task; their keys are explained by `listing` in its file of `linvit.runs.tasks`.

    family: only this one, such as ravlt or swin_tiny. Raises ValueError for an unknown task or family.
    """
    rows = known("task", task, _stored())["rows"]
    if family is None:
        return rows
    families = {row["family"] for row in rows if "family" in row}
    if not families:
        raise ValueError(f"`family` is {family!r}, but the networks of the task {task} have no families: leave it out.")
    known("family", family, dict.fromkeys(sorted(families)))
    return [row for row in rows if row["family"] == family]


def caption(task: str) -> str:
    """What the numbers of a task's rows are."""
    return _stored()[task]["caption"]


def _stored() -> dict[str, dict[str, Any]]:
    return json.loads(STORED.read_text(encoding="utf-8"))
