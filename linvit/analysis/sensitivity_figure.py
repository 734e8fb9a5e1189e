"""The figure of a network's sensitivity to 8 bits."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linvit.analysis.figures import COLOURS, SMALL, WIDTH, literal, plain_ticks, subplots

SHOWN = 24  # layers
DECADES = 1e3  # between the smallest and the largest error that are shown
TOTALS = 2  # rows at the end, for all together


def sensitivity_figure(rows: Sequence[tuple[str, bool, float]]) -> Figure:
    """The relative error of the outputs, as points: the 24 most sensitive layers, the steps in float32, and totals.

    rows: name, whether the file has this part in 8 bits, and the error; the last two rows are the totals.
    """
    parts = sorted(rows[:-TOTALS], key=lambda row: -row[2])
    layers = [row for row in parts if row[1]]
    shown = [*layers[:SHOWN], *(row for row in parts if not row[1]), *rows[-TOTALS:]]
    figure, axes = subplots((WIDTH, 1.2 + 0.22 * len(shown)))
    lowest = max((error for _, _, error in shown), default=1.0) / DECADES
    for row, (_, rounded, error) in enumerate(shown):
        marker = "<" if error < lowest else "o"
        axes.plot(max(error, lowest), row, marker, color=COLOURS[0 if rounded else 1], clip_on=False)
    axes.set_yticks(range(len(shown)), [literal(name) for name, _, _ in shown])
    axes.set(xscale="log", ylim=(len(shown) - 0.4, -0.6), xlim=(lowest, None))
    axes.set_xlabel("relative error of the outputs, this part in 8 bits (◂: smaller)")
    plain_ticks(axes.xaxis)
    axes.grid(visible=True, axis="y", color="#DDDDDD")
    for place in (len(shown) - TOTALS - 0.5, len(layers[:SHOWN]) - 0.5):
        axes.axhline(place, color="#555555", linewidth=0.8)
    labels = ("in 8 bits in the file", "kept in float32")
    legend = [Line2D([], [], marker="o", linestyle="", color=COLOURS[i], label=label) for i, label in enumerate(labels)]
    figure.legend(handles=legend, loc="outside upper left", ncols=2, frameon=False, fontsize=SMALL)
    if len(layers) > SHOWN:
        axes.set_title(f"the {SHOWN} most sensitive of {len(layers)} layers", fontsize=SMALL, loc="right")
    return figure
