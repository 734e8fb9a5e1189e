"""Every mechanism and every component of RALA and MALA in one small network, over seeds, with the papers' claims."""

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from linvit.analysis.figures import write_figure
from linvit.analysis.markdown import check_marks, markdown_table, replace_between_marks
from linvit.runs.bundled import bundled_folder
from linvit.studies import inside
from linvit.studies.claims import ACCURACY, CLAIMS, MARGIN, Verdict, verdicts
from linvit.studies.figures import group_figure
from linvit.studies.inside import Inside
from linvit.studies.plan import Cell, Plan, Say, silent, train_plans
from linvit.studies.statistics import FAILS, HOLDS, UNCLEAR
from linvit.studies.table import Comparison, Row, about_line, write_texts

BASELINES = ("softmax", "linear")
PREFIX = "deit_tiny_"
TAKEN_APART = ("rala", "mala")
STEM = "study"
BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"

ABOUT = """A stand-in, not ImageNet: DeiT-shaped networks, {data} at {size[0]}×{size[1]} px, {train_images:,} images to
train on and {held_out_images:,} held out in each of {seeds} seeds; the seed chooses the split, the initial weights and
the order. {epochs} epochs, one recipe for all, accuracy after the last epoch; one thread per run."""
ABOUT_TABLE = """Mean over the seeds with its 95 % t-interval; Δ: paired difference in percentage points, with its own
95 % t-interval; p: paired t-test, corrected for the number of variants by Holm's procedure. MACs of one image:
convolutions and linear layers; the products inside the attention come on top."""
ABOUT_CLAIMS = """The rule was fixed before there were data. All comparisons below are one family. A claim that one
thing is better holds where the paired difference's interval, at the level that Holm's procedure gives it (5 % for the
family), lies above zero, and does not hold where it lies below. "Equal" holds where the interval (Bonferroni) lies
within ±{margin:g} point, and does not hold where it lies beyond. Everything else cannot be told at this size. A claim
of several comparisons holds with all of them and fails with one. Accuracies are in percentage points."""


@dataclass(frozen=True)
class Study:
    """The recipes of a study side by side, what its networks look like inside, and what became of every claim.

    numbers: quantity → network → one number per seed. first: measurements of the networks of seed 0.
    """

    comparison: Comparison
    verdicts: Sequence[Verdict]
    numbers: inside.Numbers
    first: Mapping[str, Inside]

    def to_markdown(self) -> str:
        """The whole section, headings of third level, with the figures that `save` writes."""
        comparison, about = self.comparison, self.comparison.about
        blocks = [ABOUT.format(**about), f"![Accuracy of every variant]({STEM}.svg)", ABOUT_TABLE]
        blocks = [" ".join(block.split()) for block in blocks]
        for group in dict.fromkeys(row.group for row in comparison.rows):
            blocks += [f"### {group}", comparison.table([row for row in comparison.rows if row.group == group])]
        if self.first:
            blocks += [inside.section(self.numbers, self.first), about_line(about)]
        counts = Counter(verdict.outcome for verdict in self.verdicts)
        total = ", ".join(f"{outcome} {counts[outcome]}" for outcome in (HOLDS, FAILS, UNCLEAR))
        claims = [[v.claim.statement, v.claim.source, "<br>".join(v.measured), v.outcome] for v in self.verdicts]
        blocks += ["### Claim by claim", " ".join(ABOUT_CLAIMS.format(margin=MARGIN).split())]
        blocks += [f"Of {len(claims)} claims: {total}."]
        blocks += [markdown_table(["claim", "source", "measured", "verdict"], claims, left=4), about_line(about)]
        return "\n\n".join(blocks) + "\n"

    def save(self, folder: str | Path) -> Path:
        """Writes study.md, .csv and .json and the figures as .svg and .png; returns the Markdown file."""
        folder, comparison = Path(folder), self.comparison
        words = comparison.measures[comparison.score].label
        write_figure(group_figure(comparison.rows, BASELINES, words), folder / STEM)
        for name, draw in inside.FIGURES.items() if self.first else ():
            write_figure(draw(self.first), folder / name)
        claims = {"claims": [asdict(verdict) for verdict in self.verdicts], "networks": self.numbers}
        return write_texts(folder / STEM, self.to_markdown(), comparison.to_csv(), comparison.to_dict() | claims)


def study(
    recipes: str | Path | None,
    folder: str | Path,
    seeds: int = 5,
    workers: int = 2,
    write: str | Path | None = None,
    progress: Say | None = None,
) -> Study:
    """Trains every recipe of a folder with every seed, what is complete not again, and decides the papers' claims.

    recipes is the folder; None stands for that of linvit. folder gets a folder for each variant and seed, and what
    `Study.save` writes. write is a Markdown file whose text between the two study marks is replaced; the SVG figures
    are put beside it. progress gets a line when a run is complete; `print`, for example.

    Raises ValueError for a folder without recipes, recipes that differ in more than the model, fewer than two seeds,
    no worker, a file without marks, and a folder that holds other runs.
    """
    if seeds < 2 or workers < 1:
        raise ValueError(f"`seeds` is {seeds} and `workers` is {workers}: a study needs 2 seeds and 1 worker or more.")
    if write is not None:
        check_marks(Path(write), BEGIN, END)
    recipes = bundled_folder() / "study" if recipes is None else recipes
    folder, plans = Path(folder), read_variants(Path(recipes))
    every = f"trainer.check_val_every_n_epoch={plans[0].values['trainer']['max_epochs']}"

    def each_seed(seed: int) -> tuple[str, ...]:
        return f"data.split={seed}", every  # order, augmentation and initialization follow the seed already

    comparison = train_plans(plans, folder, seeds, workers, BASELINES, each_seed=each_seed, progress=progress)
    comparison = replace(comparison, rows=best_first(comparison.rows), about=_about(plans[0], comparison.about))
    networks = _look_inside(comparison.rows, folder, progress or silent)
    numbers = inside.by_quantity(networks)
    first = {name: looks[0] for name, looks in networks.items() if looks[0] is not None}
    accuracies = {row.name: row.measures for row in comparison.rows}
    result = Study(comparison, verdicts(CLAIMS, {ACCURACY: accuracies, **numbers}), numbers, first)
    page = result.save(folder)
    if write is not None:
        replace_between_marks(Path(write), page.read_text(encoding="utf-8"), BEGIN, END)
        for figure in folder.glob(f"{STEM}*.svg"):
            shutil.copyfile(figure, Path(write).parent / figure.name)
    return result


def read_variants(recipes: Path) -> list[Plan]:
    """Every recipe of the folder but base.yaml, the baselines first.

    Raises ValueError where there are none, where a baseline is missing, and where two differ in more than the model.
    """
    paths = sorted(path for path in recipes.glob("*.yaml") if path.stem != "base")
    missing = [name for name in BASELINES if name not in {path.stem for path in paths}]
    if missing:
        raise ValueError(
            f"The folder {recipes} holds no recipe {missing[0]}.yaml, with which every other is compared: give another"
            " folder as `recipes`."
        )
    plans = [Plan.of(Cell(path)) for path in paths]
    shared = [{key: value for key, value in plan.values.items() if key not in ("model", "folder")} for plan in plans]
    for path, values in zip(paths, shared, strict=True):
        if values != shared[0]:
            raise ValueError(
                f"The recipes {paths[0]} and {path} differ in more than the model: a study compares equal budgets, put"
                " what they share into base.yaml."
            )
    plans = [replace(plan, cell=replace(plan.cell, group=_group(plan))) for plan in plans]
    return sorted(plans, key=lambda plan: (plan.cell.name not in BASELINES, plan.cell.name))


def _group(plan: Plan) -> str:
    mechanism = plan.values["model"]["name"].removeprefix(PREFIX)
    return f"Parts of {mechanism.upper()}" if mechanism in TAKEN_APART and plan.cell.name != mechanism else "Mechanisms"


def best_first(rows: Sequence[Row]) -> list[Row]:
    """The rows by group, the best first in each; those without any finite run last."""
    return sorted(rows, key=lambda row: (row.group, -row.mean.mean if row.mean.count else float("inf")))


def _about(plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    source = plan.source
    counts = {"train_images": len(source.train_set()), "held_out_images": len(source.val_set())}
    return {**about, "size": list(source.preprocessing.size), **counts}


def _look_inside(rows: Sequence[Row], folder: Path, say: Say) -> dict[str, list[Inside | None]]:
    """The measurements of every run of the networks in MEASURED; None for one that did not stay finite."""
    counts = {row.name: row.measures for row in rows}
    networks: dict[str, list[Inside | None]] = {}
    for name in (name for name in inside.MEASURED if name in counts):
        say(f"Measuring inside the {len(counts[name])} networks of {name}")
        networks[name] = [
            inside.of_run(folder / name / f"seed{seed}") if math.isfinite(value) else None
            for seed, value in enumerate(counts[name])
        ]
    return networks
