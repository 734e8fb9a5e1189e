"""Estimates over seeds and paired differences, and their table as Markdown, CSV, JSON and a figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from linvit.analysis.figures import SMALL, WIDTH, colours_of, literal, subplots, write_figure
from linvit.analysis.markdown import markdown_rows
from linvit.analysis.report import PAGE, figure_image, paragraph, short_commit, table, write_page
from linvit.files import csv_text, user_path, write_json, write_text
from linvit.tasks.measures import Measure

FLOAT32 = (None, 32, "32", "32-true")
STEM = "compared"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, the two-sided t-interval around it, the p-value of mean = 0, and the number of seeds."""

    mean: float
    low: float
    high: float
    p: float
    count: int


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean, t-interval and one-sample t-test of the values, one per seed.

    A single value has an unbounded interval and p = 1. Equal values have an interval of width 0, and p = 1 if they are
    zero, else 0. Without values the mean is NaN.
    """
    if len(values) < 2:
        mean = float(values[0]) if values else math.nan
        return Estimate(mean, -math.inf, math.inf, 1.0, len(values))
    mean = float(np.mean(values))
    if np.ptp(values) == 0:
        return Estimate(mean, mean, mean, float(mean == 0), len(values))
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(level)
    return Estimate(mean, float(low), float(high), float(test.pvalue), len(values))


def paired(ours: Sequence[float], others: Sequence[float], level: float = 0.95) -> Estimate:
    """Estimate of the mean of `differences`; p is that of the paired t-test."""
    return estimate(differences(ours, others), level)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple tests (Holm, Scand. J. Statist. 6, 1979): reject if the result is ≤ α."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def differences(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """ours − others, seed by seed; seeds with a value that is not finite are left out."""
    return [our - other for our, other in zip(ours, others, strict=True) if math.isfinite(our - other)]


@dataclass(frozen=True)
class Row:
    """A recipe over all seeds, at one value of the varied setting (None if no setting is varied). Shares are in %.

    measures: the score of each seed, NaN if the run diverged or had nothing to measure it on. mean: over the other
    seeds. diverged: how many runs did. differences: baseline → difference, paired by seed. corrected: baseline →
    p-value, corrected by Holm's procedure over all rows. also: further measures. macs, macs_attention: for one
    image, in image classification. seconds: mean per run. inside: of each seed, what was measured inside the
    network, if anything.
    """

    name: str
    value: Any
    parameters: int
    measures: tuple[float, ...]
    mean: Estimate
    seconds: float
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    corrected: Mapping[str, float] = field(default_factory=dict)
    also: Mapping[str, Estimate] = field(default_factory=dict)
    group: str = ""
    pattern: str | None = None
    macs: int | None = None
    macs_attention: int | None = None
    lr: float | None = None
    epochs: int | None = None
    inside: tuple[Mapping[str, float], ...] = ()
    diverged: int = 0

    @property
    def unmeasured(self) -> int:
        """How many runs ended without a score, although they did not diverge."""
        return sum(not math.isfinite(value) for value in self.measures) - self.diverged


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: a row for each recipe and value.

    score: name of the compared measure. measures: name → heading and unit, of the score and of further columns. about:
    facts about networks, data, training and machine. baselines: names, or values, of the rows that others are compared
    with. key: the varied setting.
    """

    rows: Sequence[Row]
    score: str
    measures: Mapping[str, Measure]
    about: Mapping[str, Any]
    baselines: Sequence[str]
    key: str | None = None

    def cells(self, row: Row) -> dict[str, str]:
        """heading → cell of a row, without columns that are empty in all rows."""
        digits = self.measures[self.score].digits
        cells = {"recipe": row.name}
        if self.key:
            cells[self.key] = str(row.value)
        if any(other.pattern for other in self.rows):
            cells["pattern"] = row.pattern or "–"
        cells["parameters"] = f"{row.parameters:,}"
        if any(other.macs is not None for other in self.rows):
            cells["MACs"], cells["+ attention"] = _millions(row.macs), _millions(row.macs_attention)
        if self.key != "optimizer.lr" and len({other.lr for other in self.rows}) > 1:
            cells["learning rate"] = f"{row.lr:g}"
        if self.key != "trainer.max_epochs" and len({other.epochs for other in self.rows}) > 1:
            cells["epochs"] = str(row.epochs)
        cells[self.measures[self.score].label] = plus_minus(row.mean, digits)
        for name in self.baselines:
            p = "p" if len(self.baselines) == 1 else f"p {name}"
            cells[f"Δ {name}"], cells[p] = _difference(row, name, digits)
        for name, mean in row.also.items():
            cells[self.measures[name].label] = plus_minus(mean, self.measures[name].digits)
        for why in ("diverged", "unmeasured"):
            if any(getattr(other, why) for other in self.rows):
                cells[why] = f"{getattr(row, why)} of {len(row.measures)}"
        return cells | {"s per run": f"{row.seconds:.0f}"}

    def table(self, rows: Sequence[Row]) -> str:
        """Rows as a Markdown table with a line below it about networks, data and training."""
        cells = [{**self.cells(row), "recipe": f"`{row.name}`"} for row in rows]
        marked = [{f"`{name}`" if name == self.key else name: cell for name, cell in row.items()} for row in cells]
        text = markdown_rows(marked, left=1)
        return f"{text}\n\n*{about_line(self.about)}*"

    def to_markdown(self) -> str:
        """All rows as a Markdown table with the line below it."""
        return f"{self.table(self.rows)}\n"

    def to_csv(self) -> str:
        """CSV with a line for each run."""
        runs = []
        for row in self.rows:
            facts = {"group": row.group, "recipe": row.name, "value": row.value}
            facts |= {"parameters": row.parameters, "macs": row.macs, "macs_attention": row.macs_attention}
            for seed, measure in enumerate(row.measures):
                runs.append(facts | {"seed": seed, self.score: measure, "seconds": round(row.seconds, 1)})
        return csv_text(runs)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; NaN is not replaced."""
        return {"about": dict(self.about), "rows": [asdict(row) for row in self.rows]}

    def save(self, folder: str | Path) -> Path:
        """Writes report.html, compared.md, .csv, .json, and the figure of a varied setting; returns compared.md."""
        folder = user_path(folder)
        text = self.to_markdown()
        parts = [table([self.cells(row) for row in self.rows]), paragraph(about_line(self.about))]
        if self.key:
            words = self.measures[self.score].label
            title, figure = f"{words} over {self.key}", over_figure(self.rows, self.key, words)
            parts.insert(0, figure_image(figure, title))
            write_figure(figure, folder / STEM)
            text = f"![{title}]({STEM}.svg)\n\n{text}"
        write_page(folder / PAGE, f"Recipes compared: {folder.resolve().name}", [("Results", parts)])
        return write_texts(folder / STEM, text, self.to_csv(), self.to_dict())


def over_figure(rows: Sequence[Row], key: str, words: str) -> Figure:
    """The measure over the varied setting, one line per recipe: mean with its 95 % interval, seeds as pale dots."""
    figure, axes = subplots((WIDTH, 4))
    values = list(dict.fromkeys(row.value for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    for number, (name, colour) in enumerate(colours_of(names).items()):
        line = [row for row in rows if row.name == name]
        places = [values.index(row.value) + 0.06 * (number - (len(names) - 1) / 2) for row in line]
        axes.plot(places, [row.mean.mean for row in line], color=colour, marker="o", markersize=4, label=literal(name))
        for place, row in zip(places, line, strict=True):
            axes.plot([place] * len(row.measures), row.measures, ".", color=colour, alpha=0.4, markersize=4)
            if math.isfinite(row.mean.low):
                axes.plot([place] * 2, [row.mean.low, row.mean.high], color=colour, linewidth=1)
    axes.set_xticks(range(len(values)), [literal(str(value)) for value in values])
    axes.set(xlabel=literal(key), ylabel=words)
    if words.endswith("%"):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    axes.legend(frameon=False, fontsize=SMALL)
    return figure


def write_texts(stem: Path, markdown: str, lines: str, content: Mapping[str, Any]) -> Path:
    """Writes stem.md, stem.csv and stem.json, each whole or not at all, and returns the first."""
    write_json(stem.with_suffix(".json"), content, indent=1)
    for path, text in ((stem.with_suffix(".csv"), lines), (stem.with_suffix(".md"), markdown)):
        write_text(path, text)
    return path


def plus_minus(mean: Estimate, digits: int) -> str:
    """`91.24 ± 0.35`, mean and half of the interval; the mean alone if the interval is unbounded."""
    if not mean.count:
        return "–"
    half = (mean.high - mean.low) / 2
    return f"{mean.mean:.{digits}f} ± {half:.{digits}f}" if math.isfinite(half) else f"{mean.mean:.{digits}f}"


def about_line(about: Mapping[str, Any]) -> str:
    """The sentence below every table: networks, data, seeds, training, software."""
    parameters = " to ".join(f"{number:,}" for number in dict.fromkeys(about["parameters"]))
    precision = "float32" if about["precision"] in FLOAT32 else f"precision {about['precision']}"
    epochs = about["epochs"] and f"{about['epochs']} epoch{'s' * (about['epochs'] != 1)}"
    first, last = about["first_seed"], about["first_seed"] + about["seeds"] - 1
    intervals = (
        f"seeds {first} to {last}, mean ± half of the 95 % t-interval, Δ paired by seed with its own 95 %"
        " t-interval, p corrected by Holm's procedure"
    )
    commits = [short_commit(commit) for commit in about["commits"]]
    facts = [
        ", ".join(filter(None, [f"Small networks of {parameters} parameters", about["model"]])),
        about["data"],
        f"seed {first} only, no intervals" if about["seeds"] == 1 else intervals,
        ", ".join(filter(None, [epochs, precision, "one thread per run"])),
        " and ".join(about["machines"]),
        f"torch {' and '.join(about['torch'])}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}",
    ]
    return f"{'; '.join(facts)}."


def _difference(row: Row, baseline: str, digits: int) -> tuple[str, str]:
    """Δ with its interval, and p; dashes if there is no difference."""
    difference = row.differences.get(baseline)
    if difference is None or not difference.count:
        return "–", "–"
    mean, low, high = (f"{value:+.{digits}f}" for value in (difference.mean, difference.low, difference.high))
    if not math.isfinite(difference.low):
        return mean, "–"
    p = row.corrected[baseline]
    return f"{mean} [{low}, {high}]", "< 0.001" if p < 0.001 else f"{p:.3f}"


def _millions(macs: int | None) -> str:
    return "–" if macs is None else f"{macs / 1e6:.2f} M"
