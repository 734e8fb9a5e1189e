"""Recipes over seeds, side by side, with intervals; optionally over the values of one setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linvit.runs.bundled import find_recipe
from linvit.studies.plan import Cell, Plan, Say, folder_name, train_plans
from linvit.studies.table import Comparison


def compare(
    recipes: Sequence[str | Path],
    folder: str | Path,
    seeds: int = 3,
    workers: int = 1,
    over: str | None = None,
    overrides: Sequence[str] = (),
    also: Sequence[str] = (),
    progress: Say | None = None,
) -> Comparison:
    """Trains every recipe with every seed, what is complete not again, and compares them with the first one.

    Args:
        recipes: files, or names of bundled recipes, all of one task; its score is what is compared.
        folder: gets a folder for each run and compared.md, .csv, .json and, with `over`, .svg and .png.
        seeds: how many, 0 … seeds - 1.
        workers: how many runs at once, one thread each.
        over: `data.pairs=4,8,16` trains every recipe at each of these values.
        overrides: `key.key=value` for every run.
        also: other measures of the task, for columns of their own.
        progress: gets a line when a run is complete; `print`, for example.

    Raises ValueError, before anything is trained, for recipes of different tasks or of one name, settings that each run
    has of its own and measures that the task does not have; and as `run_all` and `read_recipe`.
    """
    if seeds < 1 or workers < 1 or not recipes:
        raise ValueError(f"{len(recipes)} recipes, {seeds} seeds, {workers} workers: give one or more of each.")
    key, values = _varied(over)
    _check_settings(recipes, [*overrides, *([key] if key else [])])
    paths = [find_recipe(recipe) for recipe in recipes]
    cells = [
        Cell(path, (*overrides, *([f"{key}={value}"] if key else [])), value) for value in values for path in paths
    ]
    plans = [Plan.of(cell) for cell in cells]
    comparison = train_plans(plans, Path(folder), seeds, workers, [cells[0].name], also, key, progress=progress)
    comparison.save(folder)
    return comparison


def _varied(over: str | None) -> tuple[str | None, list[Any]]:
    if over is None:
        return None, [None]
    key, equals, text = over.partition("=")
    if not key or not equals or not text:
        raise ValueError(f"`over` is {over!r}, expected key=value,value,…: write data.pairs=4,8,16, for example.")
    values = text.split(",")
    if "" in values or len({folder_name(value) for value in values}) < len(values):
        raise ValueError(f"`over` is {over!r}, expected different values: leave out what is empty or repeated.")
    return key, values


def _check_settings(recipes: Sequence[str | Path], settings: Sequence[str]) -> None:
    """Raises ValueError where two runs would have one folder, or all of them one seed."""
    names = [Path(recipe).name.removesuffix(".yaml") for recipe in recipes]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"Two recipes are called {repeated[0]}, which names their runs: rename or leave out one file.")
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("seed", "folder"):
            raise ValueError(f"{setting!r} belongs to each run: leave it out, `seeds` and `folder` set it for all.")
