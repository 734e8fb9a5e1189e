"""`linvit study`: every mechanism and every part of RALA and MALA in one small network, over seeds, with verdicts."""

import csv
import io
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linvit import environment
from linvit.analysis.cost import Cost, count_cost
from linvit.analysis.figures import write_figure
from linvit.data import create_source
from linvit.files import check_writable, replacing, write_json
from linvit.models.by_name import create_classifier
from linvit.runs.recipe import RecipeCLI, read_recipe
from linvit.studies import page as study_page
from linvit.studies.claims import ACCURACY, CLAIMS, Judged, judge
from linvit.studies.figure import Dots, study_figure
from linvit.studies.inside import measure_networks, section, write_figures
from linvit.studies.pool import Run, run_all
from linvit.studies.statistics import Estimate, estimate, holm, paired

BASELINES = ("softmax", "linear")
PREFIX = "deit_tiny_"
PARTS_OF = ("rala", "mala")
FIGURE = "study"


@dataclass(frozen=True)
class Variant:
    """A recipe of the study: its name, the table it stands in, all its values, and what its network costs."""

    name: str
    group: str
    recipe: Path
    values: dict[str, Any]
    cost: Cost


@dataclass(frozen=True)
class Row:
    """A variant over all seeds: accuracies in percent (NaN where a run did not stay finite), its mean, and the paired
    differences to the baselines in percentage points with p-values corrected over the variants (Holm)."""

    variant: str
    group: str
    cost: Cost
    accuracies: tuple[float, ...]
    accuracy: Estimate
    differences: dict[str, Estimate]
    corrected: dict[str, float]
    diverged: int
    seconds: float


def study(recipes: Path, folder: Path, seeds: int = 5, workers: int = 2, write: Path | None = None) -> None:
    """Trains every recipe of a folder with every seed, what is complete not again, and writes tables, figure, verdicts.

    folder gets one folder a variant and seed, results.json, results.csv, study.md, and study, study_ranks and
    study_scores as .png and .svg. write is a Markdown file whose text between the two study marks is replaced; the SVG
    figures are put beside it.

    Raises ValueError for a folder without recipes, recipes that differ in more than the model, fewer than two seeds,
    no worker, a file without marks, and a folder that holds other runs.
    """
    if seeds < 2 or workers < 1:
        raise ValueError(f"A study of {seeds} seeds and {workers} workers is none: give 2 seeds and 1 worker or more.")
    if write is not None:
        study_page.check_marks(write)
    variants = read_variants(recipes)
    check_writable(folder)
    runs = [_run(variant, seed, folder) for seed in range(seeds) for variant in variants]
    results = run_all(runs, workers, lambda line: print(line, flush=True))
    by_variant = {v.name: results[index :: len(variants)] for index, v in enumerate(variants)}
    rows = compare(variants, by_variant)
    about = _about(variants[0], rows, seeds, results)
    numbers, first = measure_networks(folder, by_variant, lambda line: print(line, flush=True))
    judged = judge(CLAIMS, {ACCURACY: {row.variant: row.accuracies for row in rows}, **numbers})
    inside = section(numbers, first, write_figures(folder, first))
    write_all(folder, rows, judged, about, inside, numbers)
    print(f"{folder / 'study.md'} holds the tables and the verdicts, {folder / FIGURE}.png the figure.")
    if write is not None:
        study_page.replace_between_marks(write, (folder / "study.md").read_text())
        for figure in folder.glob(f"{FIGURE}*.svg"):
            shutil.copyfile(figure, write.parent / figure.name)
        print(f"{write} has them between its marks.")


def read_variants(recipes: Path) -> list[Variant]:
    """Every recipe of the folder but base.yaml, checked and counted, the baselines first.

    Raises ValueError where there are none, where a baseline is missing, and where two differ in more than the model.
    """
    found = sorted(path for path in recipes.glob("*.yaml") if path.stem != "base")
    missing = [name for name in BASELINES if name not in {path.stem for path in found}]
    if missing:
        raise ValueError(
            f"The folder {recipes} holds no recipe {missing[0]}.yaml, which every other is compared with: run the study"
            " from a checkout, or name the folder with --recipes."
        )
    variants = [_read(path) for path in found]
    first = _common(variants[0])
    for variant in variants:
        if _common(variant) != first:
            raise ValueError(
                f"The recipes {variants[0].recipe} and {variant.recipe} differ in more than the model: a study compares"
                " equal budgets, put what they share into base.yaml."
            )
    return sorted(variants, key=lambda variant: (variant.name not in BASELINES, variant.name))


def _read(path: Path) -> Variant:
    values = RecipeCLI(read_recipe(path), builds=False).resolved()
    source = create_source(**values["data"])
    with torch.device("meta"):
        network = create_classifier(values["model"], source.num_classes, source.channels)
    cost = count_cost(network, (source.channels, *source.preprocessing.size))
    return Variant(path.stem, _group(path.stem, values["model"]["name"]), path, values, cost)


def _group(name: str, model: str) -> str:
    mechanism = model.removeprefix(PREFIX)
    return f"Parts of {mechanism.upper()}" if mechanism in PARTS_OF and name != mechanism else "Mechanisms"


def _common(variant: Variant) -> dict[str, Any]:
    return {key: value for key, value in variant.values.items() if key not in ("model", "folder")}


def _run(variant: Variant, seed: int, folder: Path) -> Run:
    """Order, augmentation and initialization come from the seed, and so does the choice of the held-out images."""
    every = variant.values["trainer"]["max_epochs"]
    overrides = (f"seed={seed}", f"data.split={seed}", f"trainer.check_val_every_n_epoch={every}")
    own = folder / variant.name / f"seed{seed}"
    values = read_recipe(variant.recipe, overrides) | {"folder": ""}
    return Run(f"{variant.name} seed {seed}", variant.recipe, overrides, own, values)


def compare(variants: Sequence[Variant], results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """One row a variant, best first in each group."""
    percent = {
        name: tuple(math.nan if result["top1"] is None else 100 * result["top1"] for result in own)
        for name, own in results.items()
    }
    rows = []
    for variant in variants:
        own = percent[variant.name]
        others = [name for name in BASELINES if name != variant.name]
        rows.append(
            Row(
                variant.name,
                variant.group,
                variant.cost,
                own,
                estimate([value for value in own if math.isfinite(value)]),
                {name: paired(own, percent[name]) for name in others},
                {},
                sum(not math.isfinite(value) for value in own),
                sum(result["seconds"] for result in results[variant.name]) / len(own),
            )
        )
    corrected: dict[str, dict[str, float]] = {row.variant: {} for row in rows}
    for name in BASELINES:
        against = [row for row in rows if name in row.differences]
        for row, p in zip(against, holm([row.differences[name].p for row in against]), strict=True):
            corrected[row.variant][name] = p
    rows = [replace(row, corrected=corrected[row.variant]) for row in rows]
    return sorted(rows, key=lambda row: (row.group, -row.accuracy.mean if row.accuracy.count else math.inf))


def _about(variant: Variant, rows: Sequence[Row], seeds: int, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    source = create_source(**variant.values["data"])
    train, held_out = len(source.train_set()), len(source.val_set())
    sizes = [row.cost.parameters for row in rows]
    where = environment.describe(1, 1)
    return {
        "parameters": [min(sizes), max(sizes)],
        "data": variant.values["data"]["name"],
        "size": list(source.preprocessing.size),
        "train_images": train,
        "held_out_images": held_out,
        "seeds": seeds,
        "epochs": variant.values["trainer"]["max_epochs"],
        "threads": 1,
        "processor": where["devices"],
        "commit": where["commit"],
        "packages": where["packages"],
        "cpu_minutes": sum(result["seconds"] for result in results) / 60,
    }


def write_all(
    folder: Path,
    rows: Sequence[Row],
    judged: Sequence[Judged],
    about: dict[str, Any],
    inside: str,
    numbers: Mapping[str, Any],
) -> None:
    """results.json, results.csv, the figure and study.md, with the Markdown `inside` before the claims, each whole."""
    content = {
        "about": about,
        "variants": [asdict(row) for row in rows],
        "claims": [asdict(one) for one in judged],
        "networks": numbers,
    }
    write_json(folder / "results.json", content, indent=1)
    with replacing(folder / "results.csv") as temporary:
        temporary.write_text(_as_csv(rows))
    dots = [Dots(row.variant, row.group, row.accuracies, row.accuracy) for row in rows]
    write_figure(study_figure(dots, BASELINES), folder / FIGURE)
    with replacing(folder / "study.md") as temporary:
        temporary.write_text(study_page.page(rows, judged, about, BASELINES, f"{FIGURE}.svg", inside))


def _as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "variant", "parameters", "macs", "macs_attention", "seed", "top1_percent", "seconds"])
    for row in rows:
        cost = (row.cost.parameters, row.cost.macs, row.cost.macs_attention)
        for seed, accuracy in enumerate(row.accuracies):
            writer.writerow([row.group, row.variant, *cost, seed, accuracy, round(row.seconds, 1)])
    return text.getvalue()
