"""The page of a study: its claims and tables, with figures, as Markdown, HTML and CSV."""

import csv
import html
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence import inside
from evidence.claims import ACCURACY, ALPHA, FAILS, HOLDS, MARGIN, RELEVANT, UNCLEAR, Verdict, found_with, power_within
from evidence.inside import Shown
from linvit.analysis.figures import SMALL, WIDTH, colour_of, literal, subplots, write_figure
from linvit.analysis.markdown import markdown_rows
from linvit.analysis.report import PAGE, figure_image, paragraph, table, write_page
from linvit.files import user_path, write_text
from linvit.studies.inside import FIGURES, Inside
from linvit.studies.table import Comparison, Row, about_line, write_texts

LINES = ("--", ":")
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
            accuracy += [f"<h3>{html.escape(group)}</h3>", table([self.comparison.cells(row) for row in rows])]
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
            drawn |= {f"{self.name}_{name}": draw(self.first) for name, draw in FIGURES.items()}
        if self.shown:
            drawn |= {f"{self.name}_{name}": draw(self.shown) for name, draw in inside.SHOWN_FIGURES.items()}
        return drawn

    def _inner(self) -> Sequence[str]:
        """The figures of the inside that the Markdown shows."""
        drawn = [*(FIGURES if self.first else ()), *(inside.SHOWN_FIGURES if self.shown else ())]
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
                "p": p_text(verdict.p),
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


def p_text(p: float | None) -> str:
    """As on the pages."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _joined(text: str) -> str:
    """One line."""
    return " ".join(text.split())


def group_figure(rows: Sequence[Row], baselines: Sequence[str], words: str) -> Figure:
    """One panel per group over a common axis: mean with 95 % interval, seeds as pale dots, baselines as lines."""
    groups = {group: [row for row in rows if row.group == group] for group in dict.fromkeys(row.group for row in rows)}
    heights = [len(members) for members in groups.values()]
    size = WIDTH, 0.9 + 0.27 * sum(height + 1.5 for height in heights)
    ratios = [height + 0.5 for height in heights]
    figure, grid = subplots(size, len(groups), sharex=True, squeeze=False, height_ratios=ratios)
    panels = grid[:, 0]
    for panel, (group, members) in zip(panels, groups.items(), strict=True):
        _draw_group(panel, members)
        panel.set_title(group, loc="left", fontsize=SMALL)
        for name, style in zip(baselines, LINES, strict=False):
            place = next((row.mean.mean for row in rows if row.name == name), math.nan)
            panel.axvline(
                place, color=colour_of(name), linestyle=style, linewidth=1, label=literal(f"mean of {name}"), zorder=0
            )
    panels[-1].set_xlabel(words)
    ends = [end for row in rows for end in (*row.measures, row.mean.low, row.mean.high) if math.isfinite(end)]
    # around every interval, but never beyond the range of a share
    panels[-1].set_xlim(max(0.0, min([*ends, 100.0]) - 1), min(100.0, max([*ends, 0.0]) + 1))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=SMALL)
    return figure


def _draw_group(panel: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        colour = colour_of(row.name)
        finite = [value for value in row.measures if math.isfinite(value)]
        if not finite:
            across = panel.get_yaxis_transform()
            panel.text(0.01, place, "no run has a result", transform=across, fontsize=SMALL, va="center")
            continue
        panel.plot(finite, [place + 0.24] * len(finite), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
        ends = [row.mean.low, row.mean.high] if math.isfinite(row.mean.low) else [row.mean.mean] * 2
        panel.plot(ends, [place] * 2, color=colour, linewidth=1.6)
        panel.plot(row.mean.mean, place, "o", color=colour, markersize=6)
    lost = [f" ({row.diverged} of {len(row.measures)} diverged)" if row.diverged else "" for row in rows]
    panel.set_yticks(range(len(rows)), [literal(row.name + words) for row, words in zip(rows, lost, strict=True)])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
