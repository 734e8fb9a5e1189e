"""The training curves of a run: losses, measures and learning rate over its epochs."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from matplotlib.figure import Figure

from linvit.analysis.figures import COLOURS, SMALL, integer_ticks, panel_grid
from linvit.tasks.measures import AVERAGED, Measured

LOSSES = {"train_loss": "training", "val_loss": "validation", "ema_loss": "validation, moving average"}

GROUPS = 1_000  # of neighbouring epochs, in a longer training


def training_curve(rows: Sequence[Mapping[str, float]], measures: Measured) -> Figure:
    """Panels for the losses, the measures and the learning rate over the epochs.

    rows: one for each epoch, as in `Run.history`. measures: their `panel` names the panel of each. Panels without a
    finite value are left out.
    """
    panels = [(label, lines) for label, factor, names in _panels(measures) if (lines := _lines(rows, factor, names))]
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
            step = -(-len(points) // GROUPS)  # of neighbours only the lowest and the highest: an SVG has every point
            groups = [points[start : start + step] for start in range(0, len(points), step)]
            extremes = {extreme(group, key=itemgetter(1)) for group in groups for extreme in (min, max)}
            lines.append((words, colour, sorted({points[0], points[-1], *extremes})))
    return lines


def _panels(measures: Measured) -> list[tuple[str, int, dict[str, str]]]:
    """(axis label, factor, column → words) of every panel."""
    panels: dict[str, tuple[str, int, dict[str, str]]] = {"loss": ("loss", 1, dict(LOSSES))}
    for name, measure in measures.items():
        if measure.panel in (None, "loss"):
            continue
        label = f"{measure.panel}, %" if measure.unit == "share" else str(measure.panel)
        columns = panels.setdefault(str(measure.panel), (label, measure.factor, {}))[2]
        columns |= {name: measure.heading, AVERAGED + name: f"{measure.heading}, moving average"}
    return [*panels.values(), ("learning rate", 1, {"lr": "learning rate"})]


def write_training_curve(rows: Sequence[Mapping[str, float]], measures: Measured, path: Path) -> None:
    """Writes the figure of `training_curve` as PNG, whatever the suffix of path."""
    training_curve(rows, measures).savefig(path, format="png", dpi=150)
