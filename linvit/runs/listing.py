"""The networks that can be trained, or that recipes train, with size, cost and published values, as rows."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm

from linvit.analysis.cost import Cost, count_cost
from linvit.models.by_name import create_classifier
from linvit.runs.bundled import files_below, header, shown_name
from linvit.runs.progress import tracked
from linvit.runs.recipe import base_of, read_recipe
from linvit.runs.settings import check_names, group
from linvit.runs.tasks import TASKS

Rows = list[dict[str, Any]]


def list_networks(task: str = "classification", family: str | None = None, progress: bool = False) -> Rows:
    """Rows on the networks of a task, see `listing` in its file of `linvit.runs.tasks`.

    family: only this one, such as ravlt or swin_tiny. Raises ValueError for an unknown task or family.
    """
    check_names("task", [task], TASKS)
    listing = TASKS[task].listing
    if family is not None and "family" not in inspect.signature(listing).parameters:
        raise ValueError(f"`family` is {family!r}, but the networks of the task {task} have no families: leave it out.")
    rows = listing() if family is None else listing(family)  # type: ignore[call-arg]
    return list(tracked(rows, "Counting", progress=progress))


def list_recipes(paths: Sequence[str | Path], progress: bool = False) -> Rows:
    """The classifiers that recipes train, against those of their bases.

    paths: files, folders (searched at any depth), or the names of bundled ones.

    Keys: recipe, those of Cost (at the recipe's size), published (the words of the recipe's header, None without), base
    (path of the recipe below, None where that names no network), more_parameters, more_macs (what the recipe's network
    has over its base's).

    Raises ValueError where no recipe names a classifier.
    """
    costs: dict[Path, Cost] = {}

    def cost_of(file: Path) -> Cost:
        if file.resolve() not in costs:
            costs[file.resolve()] = _count(file)
        return costs[file.resolve()]

    rows = []
    for file in tracked(recipe_files(paths), "Counting", progress=progress):
        cost, base = cost_of(file), base_of(file)
        below = cost_of(base) if base is not None and _names_classifier(base) else None
        rows.append(
            {
                "recipe": shown_name(file),
                **asdict(cost),
                "published": header(file)["published"] or None,
                "base": shown_name(base) if below else None,
                "more_parameters": cost.parameters - below.parameters if below else None,
                "more_macs": cost.macs - below.macs if below else None,
            }
        )
    return rows


def recipe_files(paths: Sequence[str | Path]) -> list[Path]:
    """The recipes that name a classifier among the given files and below the given folders, or bundled ones by name.

    Raises ValueError where there is none.
    """
    files = [file for path in paths for file in files_below(path)]
    recipes = [file for file in files if _names_classifier(file)]
    if not recipes:
        raise ValueError(f"No recipe in {', '.join(map(str, paths))} names a model: give a recipe or a folder of them.")
    return recipes


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


def _names_classifier(file: Path) -> bool:
    values = read_recipe(file)
    task = (values.get("task") or {}).get("name", "classification")
    return task == "classification" and bool((values.get("model") or {}).get("name"))


def _count(file: Path) -> Cost:
    """Of the network with its own number of classes, whatever data the recipe reads, for colour images."""
    values = read_recipe(file)
    name = values["model"]["name"]
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise ValueError(f"{file} names the model {name!r}, which timm does not know: `linvit models` lists ours.")
    size = (values.get("data") or {}).get("size", config.input_size[-1])
    with group("model", None):
        network = create_classifier({**values["model"], "device": "meta"}, config.num_classes, 3)
    return count_cost(network, (3, size, size))
