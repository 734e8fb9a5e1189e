"""The figures of the pages of designs: accuracy by epoch, gains beside the margin, curves of published sizes.

They are as narrow as a phone, so that their text keeps its size there.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from evidence.design import Design, read
from evidence.design_page import gains_of, numbers
from evidence.designs import DESIGNS, REFEREE
from evidence.gpu import rows
from evidence.gpu.jobs import ROWS
from evidence.rows import EVIDENCE
from linvit.analysis.figures import COLOURS, SMALL, colour_of, style, svg
from linvit.files import write_text
from linvit.studies.table import estimate

NARROW = 4.4  # inches
LATER = "Not run yet; the figure is drawn when the first runs are there."
OF_CLAIMS = "; below, the gains of the claims beside the margin of equality"
OF_CURVES = "Held-out accuracy over epochs and over minutes of training"
DASHES = ("-", "--", "-.", ":")


def design_figure(design: Design) -> Figure:
    """A panel for each epoch that is noted and for the last one, with a line for each network; below, the claims."""
    epochs, claims = [*map(str, design.shown), "last"], len(design.claims)
    heights = [len(design.variants) + 2.0, 2.1 * claims + 2.0][: 1 + bool(claims)]
    apart = ConstrainedLayoutEngine(w_pad=0.08)  # labels at the ends of two panels
    figure = Figure((NARROW, 0.21 * sum(heights)), layout=apart)
    places: list[Any] = [epochs, ["gains"] * len(epochs)][: len(heights)]
    panels: dict[str, Axes] = figure.subplot_mosaic(places, height_ratios=heights)
    colours = [colour_of(name) for name in design.variants]
    for epoch in epochs:
        by_seed = [[x for x in values if x == x] for values in numbers(design, epoch).values()]
        draw_intervals(panels[epoch], by_seed, design.variants if epoch == epochs[0] else None, colours)
        panels[epoch].set_title("last epoch" if epoch == "last" else f"epoch {epoch}", fontsize=SMALL)
        panels[epoch].xaxis.set_major_locator(MaxNLocator(2))
    panels[epochs[1]].set_xlabel("accuracy, %")
    if claims:
        draw_gains(panels["gains"], design)
    return figure


def draw_intervals(
    axes: Axes,
    values: Sequence[Sequence[float]],
    labels: Sequence[str] | None,
    colours: Sequence[str],
    hollow: Collection[int] = (),
) -> None:
    """A line for each list of values, from the top: their mean and its 95 % interval. hollow: places of such dots."""
    style(axes)
    for place, (listed, colour) in enumerate(zip(values, colours, strict=True)):
        if listed:
            mean = estimate(listed)
            ends = [mean.low, mean.high] if mean.count > 1 else [mean.mean] * 2
            axes.plot(ends, [place] * 2, color=colour, linewidth=1.6)
            inside = "white" if place in hollow else colour
            axes.plot(mean.mean, place, "o", color=colour, markerfacecolor=inside, markersize=4.5)
    axes.set_yticks(range(len(values)), labels or [""] * len(values))
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def draw_gains(axes: Axes, design: Design) -> None:
    """The claims as intervals beside zero, the margin of equality in grey, and the bounds of claims that have one."""
    gains = gains_of(design)
    axes.axvspan(-design.within, design.within, color="#BBBBBB", alpha=0.45, linewidth=0)
    axes.axvline(0, color="#555555", linewidth=1)
    names, colours = zip(*(("\n− ".join(claim.pair), colour_of(claim.pair[0])) for claim in gains), strict=True)
    hollow = [place for place, gain in enumerate(gains.values()) if gain.ended < gain.seeds]
    draw_intervals(axes, [gain.points for gain in gains.values()], names, colours, hollow)
    for place, claim in enumerate(gains):
        if claim.more:
            axes.plot([-claim.more, claim.more], [place] * 2, "|", color="#555555", markersize=12)
    axes.set_xlabel(f"gain, points (grey: equal, within ±{design.within:g})")


def published_figure(measured: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy of the networks of the job `published` over epochs and over time; see `evidence.gpu.published.row`."""
    figure = Figure((NARROW, 4.6), layout="constrained")
    panels = figure.subplots(2)
    for axes, across in zip(panels, ("epochs", "minutes of training and evaluation"), strict=True):
        style(axes)
        axes.set(xlabel=across, ylabel="top-1, %")
    for row, colour, dash in zip(measured, COLOURS, DASHES, strict=False):
        minutes = accumulate(epoch["seconds"] / 60 for epoch in row["curve"])
        ways = zip(count(1), minutes, row["curve"], strict=False)
        epochs, times, top1 = zip(*((n, time, 100 * x["top1"]) for n, time, x in ways if "top1" in x), strict=True)
        for axes, places in zip(panels, (epochs, times), strict=True):
            axes.plot(places, top1, dash, marker="o", markersize=3, color=colour, label=row["cells"][0]["network"])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=SMALL)
    return figure


def of_design(design: Design) -> Figure | None:
    """None as long as its ledger is empty."""
    return design_figure(design) if read(design.ledger) else None


def of_published() -> Figure | None:
    """Of the card with the most networks; None as long as there is none."""
    cards: dict[str, dict[str, Any]] = {}
    for row in rows.newest(rows.read(ROWS, "published")).values():
        if "curve" in row:
            cards.setdefault(row["card"], {})[row["case"]] = row
    measured = max(cards.values(), key=len, default={})
    return published_figure([*measured.values()]) if measured else None


def alt_of(design: Design) -> str:
    epochs = " and ".join(map(str, design.shown))
    return f"Accuracy of each network after {epochs} epochs and after the last one{OF_CLAIMS * bool(design.claims)}"


FIGURES: dict[str, tuple[str, str, Callable[[], Figure | None]]] = {
    f"{design.name}_accuracy": (
        "referee" if design is REFEREE else "trainings",
        alt_of(design),
        partial(of_design, design),
    )
    for design in DESIGNS.values()
} | {"published_accuracy": ("trainings", OF_CURVES, of_published)}
"""The names of files and marks → page, words and figure."""


def image(name: str) -> str:
    """What stands on the page."""
    _, words, draw = FIGURES[name]
    return f"![{words}]({name}.svg)" if draw() else LATER


def write() -> None:
    for name, (_, _, draw) in FIGURES.items():
        if figure := draw():
            write_text(EVIDENCE / f"{name}.svg", svg(figure))


TABLES = {name: (page, partial(image, name)) for name, (page, _, _) in FIGURES.items()}
"""As `evidence.design_page.TABLES`."""
