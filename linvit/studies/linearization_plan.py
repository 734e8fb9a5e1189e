"""The plan of a linearization: what each letter of the pattern costs and saves, and the patterns that follow."""

from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from linvit.analysis.figures import COLOURS, SMALL, WIDTH, integer_ticks, subplots, write_figure
from linvit.analysis.markdown import copy_figures, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import PAGE, figure_image, paragraph, table, write_page
from linvit.files import user_path, write_json, write_text


@dataclass(frozen=True)
class Letter:
    """What one letter of the pattern decides: error if only its attention is linear, and times of its attention."""

    index: int
    layers: tuple[str, ...]
    error: float
    softmax_ms: float
    linear_ms: float

    @property
    def saved_ms(self) -> float:
        return self.softmax_ms - self.linear_ms

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        return {
            "letter": str(self.index + 1),
            "attention": ", ".join(self.layers),
            "error": f"{self.error:.4f}",
            "softmax, ms": f"{self.softmax_ms:.2f}",
            "linear, ms": f"{self.linear_ms:.2f}",
            "saved, ms": f"{self.saved_ms:.2f}",
        }


@dataclass(frozen=True)
class Proposal:
    """A pattern, with the error and the time predicted as sums over its letters, and as measured."""

    pattern: str
    predicted_error: float
    error: float
    predicted_ms: float
    ms: float

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        return {
            "pattern": self.pattern,
            "error, predicted": f"{self.predicted_error:.4f}",
            "error, measured": f"{self.error:.4f}",
            "ms, predicted": f"{self.predicted_ms:.2f}",
            "ms, measured": f"{self.ms:.2f}",
        }


@dataclass(frozen=True)
class LinearizationPlan:
    """The letters, and the proposals from no linear attention to all that saves time, fastest last.

    chosen: the proposal of least error within the budget, None without a budget. about: how it was measured.
    """

    letters: tuple[Letter, ...]
    proposals: tuple[Proposal, ...]
    chosen: Proposal | None
    about: str

    @property
    def advice(self) -> str:
        """The chosen pattern, or that none is faster, as a sentence; empty if all proposals are left to choose from."""
        if len(self.proposals) == 1:
            return "No linear attention saves time at this size: keep softmax attention, or plan for larger images."
        return "" if self.chosen is None else f"Chosen: {self.chosen.pattern}."

    def markdown(self) -> str:
        """Both tables, as Markdown."""
        letters, proposals = ([row.cells() for row in rows] for rows in (self.letters, self.proposals))
        between = "Patterns, from all softmax to as much linear as saves time:"
        parts = [self.about, markdown_rows(letters, 2), between, markdown_rows(proposals, 1), self.advice]
        return "\n\n".join(filter(None, parts)) + "\n"

    def figure(self) -> Figure:
        """The error of each letter, and error against time of the proposals."""
        figure, (left, right) = subplots((WIDTH, 2.8), 1, 2)
        left.bar([x.index + 1 for x in self.letters], [x.error for x in self.letters], color=COLOURS[0])
        left.set(xlabel="letter of the pattern", ylabel="relative error, alone", ylim=(0, None))
        integer_ticks(left.xaxis)
        predicted = [x.predicted_ms for x in self.proposals], [x.predicted_error for x in self.proposals]
        right.plot(*predicted, color=COLOURS[3], linestyle="--", label="predicted")
        right.plot(
            [x.ms for x in self.proposals], [x.error for x in self.proposals], "o", color=COLOURS[0], label="measured"
        )
        ends = ((self.proposals[0], "right", (10, -13)), (self.proposals[-1], "left", (6, 6)))
        for x, side, shift in ends[: len(self.proposals)]:
            where = {"xytext": shift, "textcoords": "offset points", "ha": side, "fontsize": SMALL}
            right.annotate(f"{x.pattern.count('S')} softmax", (x.ms, x.error), **where)
        if self.chosen is not None:
            right.plot(self.chosen.ms, self.chosen.error, "s", color=COLOURS[1], label=self.chosen.pattern)
        highest = max(x.error for x in self.proposals) or 1.0
        right.set(xlabel="time, ms", ylabel="relative error", ylim=(-0.14 * highest, 1.15 * highest))
        right.margins(x=0.1)
        right.legend(fontsize=SMALL)
        return figure

    def save(self, folder: str | Path) -> Path:
        """Writes report.html, plan.md, plan.json and the figure plan; returns the page."""
        folder, figure = user_path(folder), self.figure()
        write_json(folder / "plan.json", asdict(self))
        shown = figure_image(figure, "error and time")
        letters, proposals = (table([row.cells() for row in rows]) for rows in (self.letters, self.proposals))
        advice = [paragraph(self.advice)] if self.advice else []
        sections = [("Letters", [paragraph(self.about), shown, letters]), ("Patterns", [proposals, *advice])]
        write_page(folder / PAGE, "Plan of a linearization", sections)
        write_figure(figure, folder / "plan")
        write_text(folder / "plan.md", f"# Plan\n\n![error and time](plan.svg)\n\n{self.markdown()}")
        return folder / PAGE

    def publish(self, folder: Path, page: Path) -> None:
        """Puts tables and figure of the folder, see `save`, between the marks of a Markdown file that have its name."""
        copy_figures(folder, "plan.svg", page, f"{folder.name}_")
        text = f"![error and time]({folder.name}_plan.svg)\n\n{self.markdown()}"
        replace_between_marks(page, text, *marks(folder.name))
