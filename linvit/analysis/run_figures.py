"""Figures of a run: its curves of training, and how sensitive its layers are to 8 bits."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linvit.analysis.figures import COLOURS, SMALL, WIDTH, integer_ticks, literal, panel_grid, plain_ticks, subplots
from linvit.tasks.measures import AVERAGED, Measured

LOSSES = {"train_loss": "training", "val_loss": "validation", "ema_loss": "validation, moving average"}
LAYERS, DECADES, TOTALS = 24, 1e3, 2  # of a sensitivity: most layers, the largest error over the smallest, last rows


def training_curve(rows: Sequence[Mapping[str, float]], measures: Measured) -> Figure:
    """Panels for the losses, the measures and the learning rate over the epochs.

    rows: one for each epoch, as in `Run.history`. measures: their `panel` names the panel of each. Panels without a
    finite value are left out.
    """
    columns: dict[str, tuple[str, int, dict[str, str]]] = {"loss": ("loss", 1, dict(LOSSES))}  # by panel, with words
    for name, measure in measures.items():
        if measure.panel in (None, "loss"):
            continue
        label = f"{measure.panel}, %" if measure.unit == "share" else str(measure.panel)
        of_panel = columns.setdefault(str(measure.panel), (label, measure.factor, {}))[2]
        of_panel |= {name: measure.heading, AVERAGED + name: f"{measure.heading}, moving average"}
    columns["lr"] = ("learning rate", 1, {"lr": "learning rate"})
    panels = [(label, lines) for label, factor, names in columns.values() if (lines := _lines(rows, factor, names))]
    figure, grid = panel_grid(len(panels), 3, 2.4)
    for axes, (label, lines) in zip(grid, panels, strict=True):
        for words, colour, points in lines:
            axes.plot(*zip(*points, strict=True), color=colour, label=words, marker="." if len(points) < 40 else "")
        axes.set(xlabel="epoch", ylabel=label, xlim=(rows[0]["epoch"] - 0.5, rows[-1]["epoch"] + 0.5))
        integer_ticks(axes.xaxis)
        if len(axes.lines) > 1:
            axes.legend(frameon=False, fontsize=SMALL)
    return figure


def _lines(
    rows: Sequence[Mapping[str, float]], factor: int, names: Mapping[str, str]
) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """(words, colour, points) of every column that has finite values; some epochs are not validated."""
    lines = []
    for (column, words), colour in zip(names.items(), COLOURS, strict=False):
        points = [(row["epoch"], factor * row[column]) for row in rows if math.isfinite(row.get(column, math.nan))]
        if points:
            lines.append((words, colour, points))
    return lines


def write_training_curve(rows: Sequence[Mapping[str, float]], measures: Measured, path: Path) -> None:
    """Writes the figure of `training_curve` as PNG, whatever the suffix of path."""
    training_curve(rows, measures).savefig(path, format="png", dpi=150)


def sensitivity_figure(rows: Sequence[tuple[str, bool, float]]) -> Figure:
    """The relative error of the outputs, as points: the 24 most sensitive layers, the steps in float32, and totals.

    rows: name, whether the file has this part in 8 bits, and the error; the last two rows are the totals.
    """
    parts = sorted(rows[:-TOTALS], key=lambda row: -row[2])
    layers = [row for row in parts if row[1]]
    shown = [*layers[:LAYERS], *(row for row in parts if not row[1]), *rows[-TOTALS:]]
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
    for place in (len(shown) - TOTALS - 0.5, len(layers[:LAYERS]) - 0.5):
        axes.axhline(place, color="#555555", linewidth=0.8)
    labels = ("in 8 bits in the file", "kept in float32")
    legend = [Line2D([], [], marker="o", linestyle="", color=COLOURS[i], label=label) for i, label in enumerate(labels)]
    figure.legend(handles=legend, loc="outside upper left", ncols=2, frameon=False, fontsize=SMALL)
    if len(layers) > LAYERS:
        axes.set_title(f"the {LAYERS} most sensitive of {len(layers)} layers", fontsize=SMALL, loc="right")
    return figure
