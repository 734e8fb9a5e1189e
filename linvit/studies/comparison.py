"""Recipes trained over seeds and compared, with intervals; on request at several values of one setting."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch

from linvit import environment
from linvit.analysis.cost import count_cost
from linvit.analysis.markdown import check_marks, marks, replace_between_marks
from linvit.bundled import find_recipe
from linvit.data.source import Source
from linvit.errors import SettingError, refuse
from linvit.files import check_writable, user_path
from linvit.ranges import Count, Seed, Some, check
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.studies.pool import Ledger, Training, remaining, run_all
from linvit.studies.table import Comparison, Estimate, Row, estimate, holm, paired
from linvit.tasks.measures import Measure
from linvit.tasks.task import Task

ARGUMENTS = {"recipes": Annotated[Sequence[str | Path], Some()], "seeds": Count, "workers": Count, "first_seed": Seed}
LOADED = "checkpoint_path"  # a file of weights, which cannot be loaded on the meta device
IRRELEVANT = ("name", "compile", "cpp", "ema_decay", "teacher")  # to a task's measures; not for the meta device

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Shows nothing: the default `progress`."""


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

    Raises ValueError, before anything is trained, for recipes of different tasks or with the same name, overrides of
    `seed` or `folder`, measures that the task does not have, a file without marks, and a ledger that has a run with
    other settings; otherwise as `read_recipe` and `run_all`.
    """
    check(ARGUMENTS, {"workers": workers})
    folder, page = user_path(folder), None if write is None else user_path(write)
    if page is not None:
        check_marks(page, *marks(folder.name))
    plan = plan_comparison(recipes, folder, seeds, over, overrides, ledger, first_seed, trust_recipe)
    comparison = plan.train(workers, also, progress)
    comparison.save(folder)
    if page is not None:
        replace_between_marks(page, comparison.to_markdown(), *marks(folder.name))
    return comparison


def plan_comparison(
    recipes: Sequence[str | Path],
    folder: str | Path,
    seeds: int = 3,
    over: str | None = None,
    overrides: Sequence[str] = (),
    ledger: str | Path | None = None,
    first_seed: int = 0,
    trust_recipe: bool = False,
) -> "Plan":
    """What `compare` trains; the arguments and errors are its own."""
    check(ARGUMENTS, {"recipes": recipes, "seeds": seeds, "first_seed": first_seed})
    key: str | None = None
    values: list[str | None] = [None]
    if over is not None:
        key, _, text = over.partition("=")
        values = [*text.split(",")]
        if not key or "" in values or len(set(map(folder_name, text.split(",")))) < len(values):
            raise SettingError(
                f"`over` is {over!r}, expected key=value,value,… with different values, such as data.pairs=4,8,16."
            )
    names = [Path(recipe).name.removesuffix(".yaml") for recipe in recipes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Two recipes are called {name}, so their runs would share a folder: rename one of the files."
            )
    check_shared([*overrides, *([key] if key else [])])
    cells = [
        Cell(path, (*overrides, *([f"{key}={value}"] if key else [])), value, trusted=trust_recipe)
        for value in values
        for path in map(find_recipe, recipes)
    ]
    baseline = cells[0].value if key and len(recipes) == 1 else cells[0].name
    known = None if ledger is None else Ledger(ledger)
    return Plan(cells, user_path(folder), range(first_seed, first_seed + seeds), [baseline], key, known)


def check_shared(settings: Sequence[str]) -> None:
    """Raises ValueError for a setting of all runs that is their own."""
    for setting in settings:
        if setting.partition("=")[0] in ("seed", "folder"):
            raise SettingError(
                f"{setting!r} cannot be the same for all runs: leave it out; `seeds` and `folder` set it."
            )


def folder_name(value: str) -> str:
    """The value as the name of a folder: no slashes, no leading dots."""
    return re.sub(r"^\.+|[/\\]", "_", value)


@dataclass(frozen=True)
class Cell:
    """A recipe with overrides, at one value of the varied setting (None if no setting is varied).

    trusted: whether the recipe may run code of any package, see `linvit.train`. look: see Training.
    """

    recipe: Path
    overrides: tuple[str, ...] = ()
    value: Any = None
    group: str = ""
    trusted: bool = False
    look: Callable[[Path], Mapping[str, float]] | None = None

    @property
    def name(self) -> str:
        return self.recipe.stem

    def training(self, seed: int, overrides: Sequence[str], folder: Path) -> Training:
        """The run with one seed, in its own folder below that of the comparison."""
        settings = (f"seed={seed}", *self.overrides, *overrides)
        at = "" if self.value is None else f"at {self.value} "
        folder = folder / self.name / ("" if self.value is None else folder_name(self.value)) / f"seed{seed}"
        values = read_recipe(self.recipe, settings) | {"folder": ""}
        return Training(f"{self.name} {at}seed {seed}", self.recipe, settings, folder, values, self.trusted, self.look)


@dataclass(frozen=True)
class Candidate:
    """A cell with all values of its recipe, its data, and its task on the meta device, that is, without weights."""

    cell: Cell
    values: Mapping[str, Any]
    source: Source
    task: Task

    @classmethod
    def of(cls, cell: Cell) -> "Candidate":
        recipe = Recipe(read_recipe(cell.recipe, cell.overrides), trust=cell.trusted)
        values, source = recipe.resolved(), recipe.source()
        settings = {key: value for key, value in values["task"].items() if key not in IRRELEVANT}
        model = {key: value for key, value in values["model"].items() if key != LOADED}
        facts = source.num_classes, getattr(source.preprocessing, "channels", 3)  # reads data: not on the meta device
        with torch.device("meta"):
            network = recipe.run_class.create_network(model, *facts)
            task = recipe.run_class.create_task(network, *facts, **settings)
        return cls(cell, values, source, task)

    def row(self) -> dict[str, Any]:
        """The network's columns of a row: parameters and, for image classification, pattern and MACs."""
        network, cell = self.task.network, self.cell
        facts = {"name": cell.name, "value": cell.value, "group": cell.group}
        facts |= {"lr": self.values["optimizer"]["lr"], "epochs": self.values["trainer"]["max_epochs"]}
        if self.values["task"]["name"] != "classification":
            return facts | {"parameters": sum(parameter.numel() for parameter in network.parameters())}
        cost = count_cost(network, (self.source.channels, *self.source.preprocessing.size))
        return facts | vars(cost) | {"pattern": getattr(network, "pattern", None)}


@dataclass(frozen=True)
class Plan:
    """What a comparison trains: every cell with every seed, each in its own folder below `folder`.

    baselines: names of the cells that others are compared with; or values, at which each is compared with itself. key:
    the varied setting. ledger: finished runs. each_seed: seed → further overrides.
    """

    cells: Sequence[Cell]
    folder: Path
    seeds: range
    baselines: Sequence[Any]
    key: str | None = None
    ledger: Ledger | None = None
    each_seed: Callable[[int], Sequence[str]] = lambda seed: ()

    @cached_property
    def candidates(self) -> list[Candidate]:
        return [Candidate.of(cell) for cell in self.cells]

    @property
    def trainings(self) -> list[Training]:
        return [cell.training(seed, self.each_seed(seed), self.folder) for seed in self.seeds for cell in self.cells]

    def left(self) -> str:
        """How many runs are complete, and what the others cost, see `pool.remaining`."""
        return remaining(self.trainings, self.ledger)

    def train(self, workers: int, also: Sequence[str] = (), progress: Say = silent) -> Comparison:
        """Trains what is left and returns a row for each cell; the arguments and errors are those of `compare`."""
        candidates = self.candidates
        names = sorted({candidate.values["task"]["name"] for candidate in candidates})
        score, known = candidates[0].task.score, candidates[0].task.measures
        refuse(
            len(names) > 1 and f"The recipes have different tasks ({', '.join(names)}): compare recipes of one task.",
            *(
                name not in known
                and f"`also` is {name!r}, expected measures of the task {names[0]}: {', '.join(known)}."
                for name in also
            ),
        )
        check_writable(self.folder)
        rows, trainings = [candidate.row() for candidate in candidates], self.trainings

        def outcome(measures: Mapping[str, float]) -> str:
            value = measures.get(score, math.nan)
            return (
                f"nothing to measure the {known[score].heading} on" if math.isnan(value) else known[score].cell(value)
            )

        results = run_all(trainings, workers, progress, outcome, self.ledger)
        measures = {name: known[name] for name in (score, *also)}
        about = self._about([row["parameters"] for row in rows], results)
        if self.ledger is not None:
            about |= self.ledger.origins(training.label for training in trainings)
        of_cells = [results[index :: len(rows)] for index in range(len(rows))]
        table = compared(rows, of_cells, measures, self.baselines)
        return Comparison(table, score, measures, about, self.baselines, self.key)

    def _about(self, parameters: Sequence[int], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        values, source = self.candidates[0].values, self.candidates[0].source
        data = Path(values["data"].get("root") or "").name or values["data"]["name"]  # the folder says more
        names = {candidate.values["model"].get("name") for candidate in self.candidates}
        epochs = {candidate.values["trainer"]["max_epochs"] for candidate in self.candidates}
        machine = environment.describe(1, 1)
        return {
            "parameters": [min(parameters), max(parameters)],
            "data": f"{data} over {self.key}" if self.key else getattr(source.preprocessing, "corpus", data),
            "model": names.pop() if len(names) == 1 else None,
            "epochs": epochs.pop() if len(epochs) == 1 else None,
            "seeds": len(self.seeds),
            "first_seed": self.seeds.start,
            "precision": values["trainer"]["precision"],
            "threads": 1,
            "machines": [", ".join(machine["devices"])],
            "commits": [machine["commit"] or "unknown"],
            "torch": [machine["packages"]["torch"]],
            "minutes": sum(result["seconds"] for result in results) / 60,
        }


def compared(
    facts: Sequence[Mapping[str, Any]],
    results: Sequence[Sequence[Mapping[str, Any]]],
    measures: Mapping[str, Measure],
    baselines: Sequence[str],
) -> list[Row]:
    """A row for each network, with paired differences from the baselines.

    Args:
        facts: for each network, its name, value and the other arguments of its row.
        results: for each network, the results of its runs, one per seed, see `pool.complete`.
        measures: the score first, then the measures that get their own columns.
        baselines: names of the networks to compare with, at the same value; or values, at which each network is
            compared with itself.
    """
    (score, *also) = measures
    numbers = [_over_seeds(runs, score, measures[score]) for runs in results]
    at = {(row["name"], row["value"]): values for row, values in zip(facts, numbers, strict=True)}
    names = {name for name, _ in at}
    rows = []
    for row, runs, values in zip(facts, results, numbers, strict=True):
        name, value = row["name"], row["value"]
        partners = {base: (base, value) if base in names else (name, base) for base in baselines}
        finite = [run for run in runs if run["reason"] is None]
        rows.append(
            Row(
                **row,
                measures=values,
                mean=_estimate(values),
                seconds=sum(run["seconds"] for run in runs) / len(runs),
                differences={base: paired(values, at[to]) for base, to in partners.items() if to != (name, value)},
                also={measure: _estimate(_over_seeds(finite, measure, measures[measure])) for measure in also},
                inside=tuple(run.get("inside", {}) for run in runs),
                diverged=len(runs) - len(finite),
            )
        )
    corrected: list[dict[str, float]] = [{} for _ in rows]
    for name in baselines:
        places = [place for place, row in enumerate(rows) if name in row.differences]
        for place, p in zip(places, holm([rows[place].differences[name].p for place in places]), strict=True):
            corrected[place][name] = p
    return [replace(row, corrected=values) for row, values in zip(rows, corrected, strict=True)]


def _over_seeds(runs: Sequence[Mapping[str, Any]], name: str, measure: Measure) -> tuple[float, ...]:
    """The measure of every run, NaN for one that diverged; raises ValueError if a complete run lacks it."""
    for run in runs:
        if run["reason"] is None and name not in run["measures"]:
            known = ", ".join(run["measures"])
            raise ValueError(
                f"The run has no measure {name!r} after its last epoch, only {known}: choose one of these."
            )
    return tuple(measure.factor * run["measures"].get(name, math.nan) for run in runs)


def _estimate(values: Sequence[float]) -> Estimate:
    return estimate([value for value in values if math.isfinite(value)])
