"""The networks of every task with size, cost and published values, as rows; counted once and stored beside this file.

`make counts` counts them again; a test compares the two.
"""

import json
from collections.abc import Callable, Iterable, Mapping
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


def readable(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows as people read them, with a heading and unit for each key."""
    return [
        {heading: "–" if row[key] is None else cell(row[key]) for key, (heading, cell) in COLUMNS.items() if key in row}
        for row in rows
    ]


def _giga(value: int) -> str:
    return f"{value / 1e9:.3f} G"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "recipe": ("recipe", str),
    "framework": ("framework", str),
    "name": ("model", str),
    "variant": ("model", str),
    "backbone": ("backbone", str),
    "mechanism": ("mechanism", str),
    "pattern": ("pattern", str),
    "input_size": ("px", lambda size: str(size[-1])),
    "vocabulary": ("vocabulary", "{:,}".format),
    "pieces": ("pieces", "{:,}".format),
    "parameters": ("parameters", "{:,}".format),
    "more_parameters": ("parameters over base", "{:+,}".format),
    "macs": ("MACs", _giga),
    "more_macs": ("MACs over base", lambda value: f"{value / 1e9:+.3f} G"),
    "macs_attention": ("+ attention", _giga),
    "memory": ("memory", lambda value: f"{value / 2**20:.2f} MiB"),
    "ctc": ("with CTC", "{:,}".format),
    "transducer": ("as transducer", "{:,}".format),
    "published_parameters": ("published M", str),
    "published_macs": ("published G", str),
    "published_top1": ("top-1", "{} %".format),
    "released_weights": ("released weights", lambda value: "yes" if value else "–"),
    "published": ("published", str),
}
"""The heading of each key, and how its values are shown."""
