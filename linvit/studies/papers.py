"""The study: every mechanism and every part of RALA and MALA in one small network, and the papers' claims tested."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

from matplotlib.figure import Figure

from linvit.analysis.figures import write_figure
from linvit.analysis.markdown import check_marks, copy_figures, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import PAGE, figure_image, paragraph, subheading, table, write_page
from linvit.files import LAST, user_path, write_text
from linvit.layers.mechanisms import MECHANISMS
from linvit.ranges import Count, Range, Seed, check
from linvit.runs.bundled import bundled_folder
from linvit.runs.recipe import read_recipe
from linvit.studies import inside
from linvit.studies.claims import ACCURACY, ALPHA, CLAIMS, MARGIN, RELEVANT, Verdict, verdicts
from linvit.studies.figures import group_figure
from linvit.studies.inside import Inside, Shown
from linvit.studies.ledger import Ledger
from linvit.studies.plan import Cell, Plan, Say, check_shared, silent, train_plans
from linvit.studies.pool import remaining
from linvit.studies.statistics import FAILS, HOLDS, UNCLEAR, found_with, power_within
from linvit.studies.table import Comparison, Row, about_line, write_texts

BASELINES = ("softmax", "linear")
TAKEN_APART = ("rala", "mala")
CLAIM_COLUMNS = (
    "study", "claim", "source", "differs", "data", "first", "second", "effect", "low", "high", "met in", "of runs",
    "p", "verdict",
)  # fmt: skip
ALL_VARIANTS = "Accuracy of every variant"
COUNTED = {
    HOLDS: ("holds here", "hold here"),
    FAILS: ("is not reproduced", "are not reproduced"),
    UNCLEAR: ("is undecided", "are undecided"),
}

ABOUT = """This does not repeat a paper's experiment: small networks on {data} at {size[0]}×{size[1]} px, with
{train_images:,} training and {held_out_images:,} held-out images for each of {seeds} seeds. The seed sets {seeded}the
initial weights and the order of the images. All variants train for {epochs} epochs with the same recipe{rates}; the
accuracy is that after the last epoch, so it compares how much is learned in {epochs} epochs."""
ABOUT_TABLE = """Mean over the seeds ± half of the 95 % t-interval, which covers the randomness of training, not that of
the held-out images. Δ is the paired difference in percentage points with its 95 % t-interval; p is that of the paired
t-test, corrected by Holm's procedure for the number of variants. MACs are those of convolutions and linear layers for
one image; "+ attention" are the products inside the attention."""
ABOUT_CLAIMS = """Intervals are 95 % t-intervals of differences paired by seed, accuracies in percentage points; p is
corrected by Holm's procedure for the number of claims, and a claim with p > 5 % is undecided, which says nothing about
its truth. "A is better than B" holds if the mean difference is above zero (two-sided t-test) and is not reproduced if
it is below +{relevant:g} points, so that there is no relevant advantage (ranks and entropies: below zero); "A is as
good as B" holds if it is within ±{margin:g} point (two one-sided tests) and is not reproduced if it is outside; the
smaller p decides. A claim with several comparisons holds if all of them hold and is not reproduced if one fails
(Bonferroni)."""
ABOUT_POWER = """The differences between two variants have a standard deviation of {deviation:.2f} points over the seeds
(median of the comparisons above). With {seeds} seeds and the strictest level of Holm's procedure, a difference of
{effect:.1f} points is found with a probability of 80 %, and a difference of 0 is found to be within ±{margin:g} point
with a probability of {within:.0f} %."""

ARGUMENTS = {"seeds": Annotated[int, Range(2, because="intervals need two")], "workers": Count, "first_seed": Seed}


@dataclass(frozen=True)
class Study:
    """The result of a study: the comparison of its recipes, the verdicts, and measurements inside the networks.

    name: of its files and of its marks in a page.
    numbers: quantity → network → one number per seed. first, shown: network → measurements with the first seed, and
    what further figures show of it; without them, kept: the figures of the inside that are next to the page already.
    """

    name: str
    comparison: Comparison
    verdicts: Sequence[Verdict]
    numbers: inside.Numbers
    first: Mapping[str, Inside]
    shown: Mapping[str, Shown]
    kept: Sequence[str] = ()

    def to_markdown(self) -> str:
        """The complete section, claims first, with third-level headings and the figures that `save` writes."""
        trained = f"*{about_line(self.comparison.about)}*"
        blocks = [*self._facts(), "### Claims", markdown_rows(self._claims("<br>"), left=6), *self._rules(), trained]
        blocks += ["### Accuracy", f"![{ALL_VARIANTS}]({self.name}.svg)", _joined(ABOUT_TABLE)]
        for group, rows in self._groups().items():
            blocks += [f"#### {group}", self.comparison.table(rows)]
        if cells := inside.cells(self.numbers):
            drawn = [f"![{inside.DESCRIPTIONS[name]}]({self.name}_{name}.svg)" for name in self._inner()]
            marked = [row | {"network": f"`{row['network']}`"} for row in cells]
            blocks += ["### Inside the trained networks", *inside.about(self.numbers, self._inner())]
            blocks += [markdown_rows(marked, left=1), *(["\n".join(drawn)] if drawn else []), trained]
        return "\n\n".join(blocks) + "\n"

    def _write_page(self, path: Path, figures: Mapping[str, Figure]) -> None:
        """Writes the same as an HTML page, with the figures of `figures`."""
        trained = paragraph(about_line(self.comparison.about))
        accuracy = [figure_image(figures[self.name], ALL_VARIANTS), paragraph(_joined(ABOUT_TABLE))]
        for group, rows in self._groups().items():
            accuracy += [subheading(group), table([self.comparison.cells(row) for row in rows])]
        sections = [
            ("Claims", [*map(paragraph, self._facts()), table(self._claims("\n")), *map(paragraph, self._rules())]),
            ("Accuracy", [*accuracy, trained]),
        ]
        if cells := inside.cells(self.numbers):
            drawn = {each: figures[file] for each in inside.DESCRIPTIONS if (file := f"{self.name}_{each}") in figures}
            images = [figure_image(figure, inside.DESCRIPTIONS[name]) for name, figure in drawn.items()]
            about = map(paragraph, inside.about(self.numbers, drawn))
            sections.append(("Inside the trained networks", [*about, table(cells), *images]))
        write_page(path, f"Study {self.name}", sections)

    def figures(self) -> dict[str, Figure]:
        """File name, without its ending → figure: accuracy, and the inside of the networks with the first seed."""
        words = self.comparison.measures[self.comparison.score].label
        drawn = {self.name: group_figure(self.comparison.rows, self.comparison.baselines, words)}
        if self.first:
            drawn |= {f"{self.name}_{name}": draw(self.first) for name, draw in inside.FIGURES.items()}
        if self.shown:
            drawn |= {f"{self.name}_{name}": draw(self.shown) for name, draw in inside.SHOWN_FIGURES.items()}
        return drawn

    def _inner(self) -> Sequence[str]:
        """The figures of the inside that the Markdown shows."""
        drawn = [*(inside.FIGURES if self.first else ()), *(inside.SHOWN_FIGURES if self.shown else ())]
        return drawn or self.kept

    def _facts(self) -> list[str]:
        """How many claims hold, and what was trained."""
        counts = Counter(verdict.outcome for verdict in self.verdicts)
        total = ", ".join(f"{counts[outcome]} {words[counts[outcome] != 1]}" for outcome, words in COUNTED.items())
        rates = "" if len({row.lr for row in self.comparison.rows}) == 1 else " and the learning rate in the table"
        return [f"Of {len(self.verdicts)} claims {total}.", _joined(ABOUT.format(**self.comparison.about, rates=rates))]

    def _claims(self, between: str) -> list[dict[str, str]]:
        """A row for each claim; `between` stands between its comparisons."""
        return [
            {
                "claim": verdict.claim.statement,
                "source": verdict.claim.source,
                "what differs": verdict.claim.differs or "–",
                "measured": between.join(effect.words for effect in verdict.effects),
                "p": _p(verdict.p),
                "verdict": verdict.outcome,
            }
            for verdict in self.verdicts
        ]

    def _rules(self) -> list[str]:
        """How claims are decided, and what could be found."""
        return [_joined(ABOUT_CLAIMS.format(margin=MARGIN, relevant=RELEVANT)), *self._power()]

    def _groups(self) -> dict[str, list[Row]]:
        rows = self.comparison.rows
        return {
            group: [row for row in rows if row.group == group] for group in dict.fromkeys(row.group for row in rows)
        }

    def _power(self) -> list[str]:
        """What the study could find, if it compares accuracies."""
        tested = [verdict for verdict in self.verdicts if verdict.claim.quantity == ACCURACY]
        spreads = [effect.deviation for verdict in tested for effect in verdict.effects if effect.deviation]
        if not spreads:
            return []
        deviation, seeds = median(spreads), self.comparison.about["seeds"]
        alpha = ALPHA / sum(verdict.p is not None for verdict in self.verdicts)
        effect, within = found_with(0.8, deviation, seeds, alpha), power_within(MARGIN, deviation, seeds, alpha)
        text = ABOUT_POWER.format(deviation=deviation, seeds=seeds, effect=effect, margin=MARGIN, within=100 * within)
        return [_joined(text)]

    def claims_csv(self) -> str:
        """CSV with a line for each comparison of each claim, see `claim_lines`."""
        text = io.StringIO()
        lines = claim_lines(self.name, self.comparison.about["data"], self.verdicts)
        csv.writer(text, lineterminator="\n").writerows([CLAIM_COLUMNS, *lines])
        return text.getvalue()

    def save(self, folder: str | Path) -> Path:
        """Writes report.html, NAME.md, .csv, .json, NAME_claims.csv and the figures; returns the Markdown file."""
        folder, comparison, figures = user_path(folder), self.comparison, self.figures()
        self._write_page(folder / PAGE, figures)
        for name, figure in figures.items():
            write_figure(figure, folder / name)
        write_text(folder / f"{self.name}_claims.csv", self.claims_csv())
        claims = {"claims": [asdict(verdict) for verdict in self.verdicts], "networks": self.numbers}
        return write_texts(folder / self.name, self.to_markdown(), comparison.to_csv(), comparison.to_dict() | claims)


def claim_lines(study: str, data: str, verdicts: Sequence[Verdict]) -> list[list[str]]:
    """A line for each comparison of each claim, in the columns CLAIM_COLUMNS: p is a number, "" for runs counted."""
    lines = []
    for verdict in verdicts:
        claim, p = verdict.claim, "" if verdict.p is None else f"{verdict.p:.3g}"
        for effect in verdict.effects:
            estimate, counted = effect.difference, effect.counted or ("", "")
            numbers = [f"{x:.3f}" for x in (estimate.mean, estimate.low, estimate.high)] if estimate else [""] * 3
            about = [study, claim.statement, claim.source, claim.differs, data, *effect.pair]
            lines.append([*about, *numbers, *map(str, counted), p, verdict.outcome])
    return lines


def study(
    recipes: str | Path | None,
    folder: str | Path,
    seeds: int = 5,
    workers: int = 2,
    write: str | Path | None = None,
    progress: Say = silent,
    ledger: str | Path | None = None,
    first_seed: int = 0,
    overrides: Sequence[str] = (),
) -> Study:
    """Trains every recipe of a folder with every seed and decides the papers' claims on them. Complete runs are kept.

    Args:
        recipes: the folder of recipes; None for the bundled study.
        folder: gets a folder for each variant and seed, and the files of `Study.save`.
        seeds: how many seeds, 2 or more.
        workers: how many runs are trained at once, one thread each.
        write: a Markdown file; the text between its two marks with the name of the study, that of the folder of
            recipes, is replaced, and the SVG figures go next to it.
        progress: called with a line whenever a run is complete; `print`, for example.
        ledger: a file of finished runs, which are not repeated; each new one is added. Figures of the inside are drawn
            only if the runs with the first seed are in `folder`; else those next to the page stay in it.
        first_seed: the lowest seed. If it is not 0, it is part of the name of the study: vit_from_6, for example.
        overrides: `key.key=value` for every run.

    Raises:
        ValueError: for a folder without recipes, recipes that differ in more than model and learning rate, fewer
            than two seeds, no worker, a file without marks, overrides of `seed` or `folder`, or a folder that holds
            other runs.
    """
    check(ARGUMENTS, {"seeds": seeds, "workers": workers, "first_seed": first_seed})
    check_shared(overrides)
    recipes = bundled_folder() / "study" if recipes is None else user_path(recipes)
    name = f"{recipes.name}_from_{first_seed}" if first_seed else recipes.name
    write = None if write is None else user_path(write)
    if write is not None:
        check_marks(write, *marks(name))
    folder, plans = user_path(folder), read_variants(recipes, overrides)
    each_seed = _each_seed(plans[0].values)
    known = None if ledger is None else Ledger(ledger)
    comparison = train_plans(
        plans,
        folder,
        range(first_seed, first_seed + seeds),
        workers,
        baselines_of(recipes),
        each_seed=each_seed,
        progress=progress,
        ledger=known,
    )
    comparison = replace(comparison, rows=best_first(comparison.rows), about=_about(plans[0], comparison.about))
    numbers = inside.by_quantity({row.name: row.inside for row in comparison.rows if row.name in inside.MEASURED})
    runs = _measured_runs(comparison.rows, folder, first_seed)
    first = {name: inside.of_run(run) for name, run in runs.items()}
    shown = {name: inside.shown_of_run(runs[name]) for name in inside.SHOWN if name in runs}
    accuracies = {row.name: row.measures for row in comparison.rows}
    claims = [claim for claim in CLAIMS if claim.concerns(accuracies)]
    kept = [each for each in inside.DESCRIPTIONS if write and write.with_name(f"{name}_{each}.svg").is_file()]
    result = Study(name, comparison, verdicts(claims, {ACCURACY: accuracies, **numbers}), numbers, first, shown, kept)
    page = result.save(folder)
    if write is not None:
        copy_figures(folder, f"{name}*.svg", write)
        replace_between_marks(write, page.read_text(encoding="utf-8"), *marks(name))
    return result


def remaining_runs(
    recipes: str | Path | None,
    folder: str | Path,
    seeds: int = 5,
    ledger: str | Path | None = None,
    first_seed: int = 0,
    overrides: Sequence[str] = (),
) -> str:
    """What is left of a study, see `pool.remaining`; the arguments are those of `study`."""
    check(ARGUMENTS, {"seeds": seeds, "workers": 1, "first_seed": first_seed})
    check_shared(overrides)
    paths = variants_of(bundled_folder() / "study" if recipes is None else user_path(recipes))
    each_seed, folder = _each_seed(read_recipe(paths[0], overrides)), user_path(folder)
    every = range(first_seed, first_seed + seeds)
    trainings = [
        Cell(path, tuple(overrides)).training(seed, each_seed(seed), folder) for seed in every for path in paths
    ]
    return remaining(trainings, None if ledger is None else Ledger(ledger))


def _each_seed(values: Mapping[str, Any]) -> Callable[[int], tuple[str, ...]]:
    """Seed → the settings of its runs; order, augmentation and initialization follow the seed already."""
    every = f"trainer.check_val_every_n_epoch={values['trainer']['max_epochs']}"
    return lambda seed: (f"data.split={seed}", every)


def _p(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _joined(text: str) -> str:
    """One line."""
    return " ".join(text.split())


def baselines_of(recipes: Path) -> tuple[str, ...]:
    """The recipes that all others are compared with: the one named after its folder, or softmax and linear."""
    return (recipes.name,) if (recipes / f"{recipes.name}.yaml").is_file() else BASELINES


def variants_of(recipes: Path) -> list[Path]:
    """Every recipe of the folder except base.yaml; raises ValueError if a baseline is missing."""
    paths = sorted(path for path in recipes.glob("*.yaml") if path.stem != "base")
    missing = [name for name in baselines_of(recipes) if name not in {path.stem for path in paths}]
    if missing:
        raise ValueError(
            f"The folder {recipes} has no recipe {missing[0]}.yaml, a baseline of the study: give another folder as"
            " `recipes`."
        )
    return paths


def read_variants(recipes: Path, overrides: Sequence[str] = ()) -> list[Plan]:
    """Every recipe of the folder except base.yaml, with these `key.key=value`, the baselines first.

    Raises ValueError as variants_of, and if two recipes differ in more than model and learning rate.
    """
    paths, baselines = variants_of(recipes), baselines_of(recipes)
    plans = [Plan.of(Cell(path, tuple(overrides))) for path in paths]
    common = [_common(plan.values) for plan in plans]
    for path, values in zip(paths, common, strict=True):
        if values != common[0]:
            raise ValueError(
                f"The recipes {paths[0]} and {path} differ in more than model and learning rate, but a study"
                " trains all alike: move the other settings to base.yaml."
            )
    plans = [replace(plan, cell=replace(plan.cell, group=_group(plan.cell.name), look=_look(plan))) for plan in plans]
    return sorted(plans, key=lambda plan: (plan.cell.name not in baselines, plan.cell.name))


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    """What all recipes of a study must have in common: everything but the model and the learning rate."""
    optimizer = {key: value for key, value in values["optimizer"].items() if key != "lr"}
    return {key: value for key, value in values.items() if key not in ("model", "folder")} | {"optimizer": optimizer}


def _group(name: str) -> str:
    parent = name.partition("_")[0]
    return f"Parts of {parent.upper()}" if parent in TAKEN_APART and name not in MECHANISMS else "Mechanisms"


def _look(plan: Plan) -> Callable[[Path], Mapping[str, float]] | None:
    return inside.numbers_of if plan.cell.name in inside.MEASURED else None


def best_first(rows: Sequence[Row]) -> list[Row]:
    """The rows by group, each group from best to worst; rows whose runs all diverged come last."""
    return sorted(rows, key=lambda row: (row.group, -row.mean.mean if row.mean.count else float("inf")))


def _about(plan: Plan, about: Mapping[str, Any]) -> dict[str, Any]:
    source = plan.source
    images = {"train_images": source.train_set(), "held_out_images": source.val_set()}
    counts = {name: len(cast(Sized, data)) for name, data in images.items()}
    drawn = plan.values["data"].get("held_out") and not getattr(source, "divided", False)
    seeded = "the split, " if drawn else ""
    return {**about, "size": list(source.preprocessing.size), "seeded": seeded, **counts}


def _measured_runs(rows: Sequence[Row], folder: Path, seed: int) -> dict[str, Path]:
    """The runs with this seed that are measured; none if one is not in the folder, because it was trained elsewhere."""
    runs = {row.name: folder / row.name / f"seed{seed}" for row in rows if row.inside and row.inside[0]}
    return runs if all((run / "checkpoints" / LAST).is_file() for run in runs.values()) else {}
