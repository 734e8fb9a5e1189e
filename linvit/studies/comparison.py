"""Recipes trained over seeds and compared, with intervals; on request at several values of one setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from linvit.analysis.markdown import check_marks, marks, replace_between_marks
from linvit.bundled import find_recipe
from linvit.errors import SettingError
from linvit.files import user_path
from linvit.ranges import Count, Seed, Some, check
from linvit.studies.ledger import Ledger
from linvit.studies.plan import Cell, Plan, Say, check_shared, folder_name, silent, train_plans
from linvit.studies.pool import remaining
from linvit.studies.table import Comparison

ARGUMENTS = {"recipes": Annotated[Sequence[str | Path], Some()], "seeds": Count, "workers": Count, "first_seed": Seed}


def compare(
    recipes: Sequence[str | Path],
    folder: str | Path,
    seeds: int = 3,
    workers: int = 1,
    over: str | None = None,
    overrides: Sequence[str] = (),
    also: Sequence[str] = (),
    progress: Say = silent,
    trust_recipe: bool = False,
    ledger: str | Path | None = None,
    write: str | Path | None = None,
    first_seed: int = 0,
) -> Comparison:
    """Trains every recipe with every seed and compares them with the first one. Complete runs are kept.

    A single recipe is compared with itself at the first value of `over`.

    Args:
        recipes: files or names of bundled recipes, all of the same task, whose score is compared.
        folder: gets a folder for each run, report.html, compared.md, .csv and .json and, with `over`, a figure.
        seeds: how many seeds.
        workers: how many runs are trained at once, one thread each.
        over: `data.pairs=4,8,16` trains every recipe at each of these values.
        overrides: `key.key=value` for every run.
        also: further measures of the task, each in its own column.
        progress: called with a line whenever a run is complete; `print`, for example.
        trust_recipe: lets the recipes run code of any package and write anywhere, see `linvit.train`.
        ledger: a file of finished runs, which are not repeated; each new one is added.
        write: a Markdown file; the text between its two marks with the name of `folder` is replaced by the table.
        first_seed: the lowest seed.

    Raises:
        ValueError: before anything is trained, for recipes of different tasks or with the same name, overrides of
            `seed` or `folder`, measures that the task does not have, a file without marks, and a ledger that has a run
            with other settings.
        Others: as `read_recipe` and `linvit.studies.pool.run_all`.
    """
    check(ARGUMENTS, {"recipes": recipes, "seeds": seeds, "workers": workers, "first_seed": first_seed})
    folder, write = user_path(folder), None if write is None else user_path(write)
    if write is not None:
        check_marks(write, *marks(folder.name))
    key, cells = _cells(recipes, over, overrides, trust_recipe)
    plans = [Plan.of(cell) for cell in cells]
    known = None if ledger is None else Ledger(ledger)
    baseline = cells[0].value if key and len(recipes) == 1 else cells[0].name
    every = range(first_seed, first_seed + seeds)
    comparison = train_plans(plans, folder, every, workers, [baseline], also, key, progress=progress, ledger=known)
    comparison.save(folder)
    if write is not None:
        replace_between_marks(write, comparison.to_markdown(), *marks(folder.name))
    return comparison


def remaining_runs(
    recipes: Sequence[str | Path],
    folder: str | Path,
    seeds: int = 3,
    over: str | None = None,
    overrides: Sequence[str] = (),
    ledger: str | Path | None = None,
    first_seed: int = 0,
) -> str:
    """What is left of a comparison, see `pool.remaining`; the arguments and errors are those of `compare`."""
    check(ARGUMENTS, {"recipes": recipes, "seeds": seeds, "workers": 1, "first_seed": first_seed})
    _, cells = _cells(recipes, over, overrides)
    every = range(first_seed, first_seed + seeds)
    trainings = [cell.training(seed, (), user_path(folder)) for seed in every for cell in cells]
    return remaining(trainings, None if ledger is None else Ledger(ledger))


def _cells(
    recipes: Sequence[str | Path], over: str | None, overrides: Sequence[str], trust_recipe: bool = False
) -> tuple[str | None, list[Cell]]:
    """The varied setting, if any, and each recipe at each of its values."""
    key, values = _varied(over)
    _check_names(recipes)
    check_shared([*overrides, *([key] if key else [])])
    paths = [find_recipe(recipe) for recipe in recipes]
    return key, [
        Cell(path, (*overrides, *([f"{key}={value}"] if key else [])), value, trusted=trust_recipe)
        for value in values
        for path in paths
    ]


def _varied(over: str | None) -> tuple[str | None, list[Any]]:
    if over is None:
        return None, [None]
    key, equals, text = over.partition("=")
    if not key or not equals or not text:
        raise SettingError(f"`over` is {over!r}, expected key=value,value,… such as data.pairs=4,8,16.")
    values = text.split(",")
    if "" in values or len({folder_name(value) for value in values}) < len(values):
        raise SettingError(f"`over` is {over!r}, expected different values: leave out empty and repeated ones.")
    return key, values


def _check_names(recipes: Sequence[str | Path]) -> None:
    """Raises ValueError if two runs would share a folder."""
    names = [Path(recipe).name.removesuffix(".yaml") for recipe in recipes]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"Two recipes are called {repeated[0]}, so their runs would share a folder: rename one of the files."
        )
