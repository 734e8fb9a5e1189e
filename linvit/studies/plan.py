"""The plan of a comparison: which recipe is trained with which seed, and the rows of the table that follow."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linvit import environment
from linvit.analysis.cost import count_cost
from linvit.data.source import Source
from linvit.errors import SettingError
from linvit.files import check_writable
from linvit.runs.recipe import Recipe, read_recipe
from linvit.studies.ledger import Ledger
from linvit.studies.pool import Training, run_all
from linvit.studies.statistics import Estimate, estimate, holm, paired
from linvit.studies.table import Comparison, Row
from linvit.tasks.measures import Measure
from linvit.tasks.task import Task

LOADED = "checkpoint_path"  # a file of weights, which cannot be loaded on the meta device
IRRELEVANT = ("name", "compile", "cpp", "ema_decay", "teacher")  # to a task's measures; not for the meta device

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Shows nothing: the default `progress`."""


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
class Plan:
    """A cell with all values of its recipe, its data, and its task on the meta device, that is, without weights."""

    cell: Cell
    values: Mapping[str, Any]
    source: Source
    task: Task

    @classmethod
    def of(cls, cell: Cell) -> "Plan":
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


def train_plans(
    plans: Sequence[Plan],
    folder: Path,
    seeds: range,
    workers: int,
    baselines: Sequence[str],
    also: Sequence[str] = (),
    key: str | None = None,
    each_seed: Callable[[int], Sequence[str]] = lambda seed: (),
    progress: Say = silent,
    ledger: Ledger | None = None,
) -> Comparison:
    """Trains every plan with every seed and returns a row per plan; the arguments and errors are those of `compare`.

    each_seed: seed → further overrides. ledger: finished runs, see Ledger.
    """
    names = sorted({plan.values["task"]["name"] for plan in plans})
    if len(names) > 1:
        raise ValueError(f"The recipes have different tasks ({', '.join(names)}): compare recipes of one task.")
    score, known = plans[0].task.score, plans[0].task.measures
    for name in also:
        if name not in known:
            raise SettingError(f"`also` is {name!r}, expected measures of the task {names[0]}: {', '.join(known)}.")
    check_writable(folder)
    rows = [plan.row() for plan in plans]
    trainings = [plan.cell.training(seed, each_seed(seed), folder) for seed in seeds for plan in plans]

    def outcome(measures: Mapping[str, float]) -> str:
        value = measures.get(score, math.nan)
        return f"nothing to measure the {known[score].heading} on" if math.isnan(value) else known[score].cell(value)

    results = run_all(trainings, workers, progress, outcome, ledger)
    measures = {name: known[name] for name in (score, *also)}
    about = _about(plans, [row["parameters"] for row in rows], results, seeds, key)
    if ledger is not None:
        about |= ledger.origins(training.label for training in trainings)
    return Comparison(
        compared(rows, [results[index :: len(plans)] for index in range(len(plans))], measures, baselines),
        score,
        measures,
        about,
        baselines,
        key,
    )


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


def _about(
    plans: Sequence[Plan],
    parameters: Sequence[int],
    results: Sequence[Mapping[str, Any]],
    seeds: range,
    key: str | None,
) -> dict[str, Any]:
    values, source = plans[0].values, plans[0].source
    data = Path(values["data"].get("root") or "").name or values["data"]["name"]  # the folder says more than its reader
    names = {plan.values["model"].get("name") for plan in plans}
    epochs = {plan.values["trainer"]["max_epochs"] for plan in plans}
    machine = environment.describe(1, 1)
    return {
        "parameters": [min(parameters), max(parameters)],
        "data": f"{data} over {key}" if key else getattr(source.preprocessing, "corpus", data),
        "model": names.pop() if len(names) == 1 else None,
        "epochs": epochs.pop() if len(epochs) == 1 else None,
        "seeds": len(seeds),
        "first_seed": seeds.start,
        "precision": values["trainer"]["precision"],
        "threads": 1,
        "machines": [", ".join(machine["devices"])],
        "commits": [machine["commit"] or "unknown"],
        "torch": [machine["packages"]["torch"]],
        "minutes": sum(result["seconds"] for result in results) / 60,
    }
