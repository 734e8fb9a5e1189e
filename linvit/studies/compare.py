"""`linvit compare`: recipes over seeds, side by side, with intervals; optionally over the values of one setting."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from linvit import environment
from linvit.analysis.figures import COLOURS, write_figure
from linvit.data import create_source
from linvit.files import check_writable, replacing, write_json
from linvit.runs.build import TASKS
from linvit.runs.evaluate import HEADINGS, NUMBERS
from linvit.runs.recipe import RecipeCLI, read_recipe
from linvit.studies.page import markdown_table, plus_minus
from linvit.studies.pool import Run, last, run_all
from linvit.studies.statistics import Estimate, estimate, paired

STEM = "compared"
FLOAT32 = (None, 32, "32", "32-true")


@dataclass(frozen=True)
class Row:
    """A recipe at one value of the varied setting (None without): its measure a seed, NaN where a run was not finite,
    mean, and paired difference to the first recipe; also: other measures of the finite runs. Shares are in percent."""

    recipe: str
    value: Any
    parameters: int
    measures: tuple[float, ...]
    mean: Estimate
    difference: Estimate | None
    seconds: float
    also: dict[str, Estimate] = field(default_factory=dict)


def compare(
    recipes: Sequence[Path],
    folder: Path,
    seeds: int = 3,
    workers: int = 1,
    over: str | None = None,
    overrides: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Path:
    """Trains every recipe with every seed, what is complete not again; returns the page in folder, compared.md.

    Args:
        recipes: each with the measure by which its task compares checkpoints, the same for all.
        folder: gets one folder a run, compared.md, compared.json and, with `over`, compared.svg and compared.png.
        seeds: how many, 0 … seeds - 1.
        workers: how many runs at once, one thread each.
        over: `data.pairs=4,8,16` trains every recipe at each of these values.
        overrides: `key.key=value` for every run.
        also: other measures that the runs took, for columns of their own.

    Raises ValueError for recipes of different tasks or of one name, settings that are each run's own, and as `run_all`
    and `read_recipe`.
    """
    if seeds < 1 or workers < 1 or not recipes:
        raise ValueError(f"{len(recipes)} recipes, {seeds} seeds, {workers} workers: give one or more of each.")
    key, values = _varied(over)
    _check_own(recipes, [*overrides, *([key] if key else [])])
    cells = [(recipe, value) for value in values for recipe in recipes]
    settings = {cell: [*overrides, *([f"{key}={cell[1]}"] if key else [])] for cell in cells}
    resolved = {cell: RecipeCLI(read_recipe(cell[0], settings[cell]), builds=False).resolved() for cell in cells}
    task = _task([values["task"]["name"] for values in resolved.values()])
    check_writable(folder)
    runs = [_run(*cell, seed, settings[cell], folder, task.score) for seed in range(seeds) for cell in cells]
    results = run_all(runs, workers, lambda line: print(line, flush=True))
    rows = _rows(cells, resolved, [results[index :: len(cells)] for index in range(len(cells))], task.score)
    for index, row in enumerate(rows):
        row.also.update({measure: _over_seeds(runs[index :: len(cells)], measure) for measure in also})
    about = _about(resolved[cells[0]], seeds, results, key)
    write_json(folder / f"{STEM}.json", {"about": about, "rows": [asdict(row) for row in rows]}, indent=1)
    figure = ""
    if key:
        write_figure(over_figure(rows, key, heading(task.score)), folder / STEM)
        figure = f"![{heading(task.score)} over {key}]({STEM}.svg)\n\n"
    page = folder / f"{STEM}.md"
    with replacing(page) as temporary:
        temporary.write_text(f"{figure}{table(rows, key, task.score)}\n\n{_words(about)}\n", encoding="utf-8")
    return page


def heading(measure: str) -> str:
    """The measure in words, with its unit."""
    words = HEADINGS.get(measure, measure)
    return words if measure in NUMBERS else f"{words}, %"


def _factor(measure: str) -> int:
    """Shares are shown in percent."""
    return 1 if measure in NUMBERS else 100


def _digits(measure: str) -> int:
    return 3 if measure in NUMBERS else 2


def table(rows: Sequence[Row], key: str | None, measure: str) -> str:
    """The rows in Markdown."""
    digits = _digits(measure)
    first = rows[0].recipe
    others = [heading(other) for other in rows[0].also]
    head = [
        "recipe",
        *([f"`{key}`"] if key else []),
        "parameters",
        heading(measure),
        f"Δ {first}",
        "p",
        *others,
        "s a run",
    ]
    lines = []
    for row in rows:
        difference, p = "–", "–"
        if row.difference is not None and row.difference.count:
            difference = f"{row.difference.mean:+.{digits}f}"
            if math.isfinite(row.difference.low):
                difference += f" [{row.difference.low:+.{digits}f}, {row.difference.high:+.{digits}f}]"
                p = "< 0.001" if row.difference.p < 0.001 else f"{row.difference.p:.3f}"
        value = [str(row.value)] if key else []
        own = [plus_minus(row.mean, digits), difference, p]
        own += [plus_minus(mean, _digits(other)) for other, mean in row.also.items()]
        lines.append([f"`{row.recipe}`", *value, f"{row.parameters:,}", *own, f"{row.seconds:.0f}"])
    return markdown_table(head, lines, left=1)


def over_figure(rows: Sequence[Row], key: str, words: str) -> Figure:
    """The measure over the varied setting, a line a recipe: mean, 95 % interval where there is one, seeds as dots."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    values = list(dict.fromkeys(row.value for row in rows))
    names = list(dict.fromkeys(row.recipe for row in rows))
    for number, name in enumerate(names):
        own = [row for row in rows if row.recipe == name]
        colour = COLOURS[number % len(COLOURS)]
        places = [values.index(row.value) + 0.06 * (number - (len(names) - 1) / 2) for row in own]
        axes.plot(places, [row.mean.mean for row in own], color=colour, marker="o", markersize=4, label=name)
        for place, row in zip(places, own, strict=True):
            axes.plot([place] * len(row.measures), row.measures, ".", color=colour, alpha=0.4, markersize=4)
            if math.isfinite(row.mean.low):
                axes.plot([place] * 2, [row.mean.low, row.mean.high], color=colour, linewidth=1)
    axes.set_xticks(range(len(values)), [str(value) for value in values])
    axes.set(xlabel=key, ylabel=words)
    if words.endswith("%"):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _varied(over: str | None) -> tuple[str | None, list[Any]]:
    if over is None:
        return None, [None]
    key, equals, values = over.partition("=")
    if not key or not equals or not values:
        raise ValueError(f"--over is {over!r}: write key=value,value,…, data.pairs=4,8,16 for example.")
    found = values.split(",")
    if "" in found or len({_folder_name(value) for value in found}) < len(found):
        raise ValueError(f"--over is {over!r}, expected values that are there once each: leave out what is not.")
    return key, found


def _check_own(recipes: Sequence[Path], settings: Sequence[str]) -> None:
    """Raises ValueError where two runs would have one folder, or all of them one seed."""
    names = [recipe.stem for recipe in recipes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"Two recipes are called {twice[0]}, which names their runs: rename a file, or leave one out.")
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("seed", "folder"):
            raise ValueError(f"{key!r} is each run's own: leave it out, --seeds N and --folder FOLDER set it for all.")


def _folder_name(value: str) -> str:
    """The value without what would lead to another folder."""
    return re.sub(r"^\.+|[/\\]", "_", value)


def _task(names: Sequence[str]) -> Any:
    if len(set(names)) > 1:
        raise ValueError(f"The recipes are of the tasks {', '.join(sorted(set(names)))}: compare those of one task.")
    return TASKS[names[0]]


def _run(recipe: Path, value: Any, seed: int, settings: Sequence[str], folder: Path, measure: str) -> Run:
    overrides = (f"seed={seed}", *settings)
    at = "" if value is None else f"at {value} "
    own = folder / recipe.stem / ("" if value is None else _folder_name(value)) / f"seed{seed}"
    values = read_recipe(recipe, overrides) | {"folder": ""}
    return Run(f"{recipe.stem} {at}seed {seed}", recipe, overrides, own, values, measure)


def _rows(
    cells: Sequence[tuple[Path, Any]],
    resolved: dict[Any, dict[str, Any]],
    results: Sequence[Sequence[dict[str, Any]]],
    measure: str,
) -> list[Row]:
    factor = _factor(measure)
    found = {
        cell: tuple(math.nan if one[measure] is None else factor * one[measure] for one in own)
        for cell, own in zip(cells, results, strict=True)
    }
    rows = []
    for cell, own in zip(cells, results, strict=True):
        recipe, value = cell
        first = (cells[0][0], value)
        rows.append(
            Row(
                recipe.stem,
                value,
                _parameters(resolved[cell]),
                found[cell],
                estimate([one for one in found[cell] if math.isfinite(one)]),
                None if cell == first else paired(found[cell], found[first]),
                sum(one["seconds"] for one in own) / len(own),
            )
        )
    return rows


def _over_seeds(runs: Sequence[Run], measure: str) -> Estimate:
    """A measure of the runs that stayed finite."""
    factor = _factor(measure)
    finite = [run for run in runs if (run.result() or {}).get("reason") is None]
    return estimate([factor * last(run.folder, measure) for run in finite])


def _parameters(values: dict[str, Any]) -> int:
    source = create_source(**values["data"])
    channels = {"channels": source.channels} if values["task"]["name"] == "classification" else {}
    with torch.device("meta"):
        task = TASKS[values["task"]["name"]](values["model"], source.num_classes, **channels)
    return sum(parameter.numel() for parameter in task.network.parameters())


def _about(values: dict[str, Any], seeds: int, results: Sequence[dict[str, Any]], key: str | None) -> dict[str, Any]:
    where = environment.describe(1, 1)
    words = getattr(create_source(**values["data"]).preprocessing, "corpus", values["data"]["name"])
    return {
        "data": f"{values['data']['name']} over {key}" if key else words,
        "model": values["model"],
        "epochs": values["trainer"]["max_epochs"],
        "seeds": seeds,
        "precision": values["trainer"]["precision"],
        "threads": 1,
        "processor": where["devices"],
        "commit": where["commit"],
        "packages": where["packages"],
        "minutes": sum(result["seconds"] for result in results) / 60,
    }


def _words(about: dict[str, Any]) -> str:
    commit = about["commit"] or "unknown"
    precision = "float32" if about["precision"] in FLOAT32 else f"precision {about['precision']}"
    return (
        f"*Stand-in: {about['model'].get('name', 'network')}; {about['data']}; seeds 0 to {about['seeds'] - 1}, mean"
        f" ± half of the 95 % t-interval, Δ and p paired by seed; {about['epochs']} epochs, {precision}, one thread"
        f" a run, torch {about['packages']['torch']}, commit"
        f" {commit[:7]}{'-dirty' if commit.endswith('-dirty') else ''}.*"
    )
