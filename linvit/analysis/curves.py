"""The training curves of a run: losses, measures and learning rate over its epochs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from linvit.analysis.figures import COLOURS, subplots
from linvit.tasks.measures import AVERAGED, Measured

LOSSES = {"train_loss": "training", "val_loss": "validation", "ema_loss": "validation, moving average"}


def training_curve(rows: Sequence[Mapping[str, float]], measures: Measured) -> Figure:
    """A panel for the losses, one for each panel that the measures name, and one for the learning rate.

    rows: those of a run's metrics.csv, as `Run.metrics` gives them. A panel without values is left out.
    """
    panels = [panel for panel in _panels(measures) if any(column in row for row in rows for column in panel[2])]
    figure, grid = subplots((4 * len(panels), 3.4), 1, len(panels), squeeze=False)
    for axes, (label, factor, columns) in zip(grid[0], panels, strict=True):
        for column, colour in zip(columns, COLOURS, strict=False):
            # some epochs do not validate
            points = [(row["epoch"], factor * row[column]) for row in rows if column in row]
            if points:
                marker = "." if len(points) < 40 else ""
                axes.plot(*zip(*points, strict=True), color=colour, label=columns[column], marker=marker)
        axes.set(xlabel="epoch", ylabel=label)
        first, last = rows[0]["epoch"], rows[-1]["epoch"]
        axes.set_xlim(first - 0.5, last + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    return figure


def _panels(measures: Measured) -> list[tuple[str, int, dict[str, str]]]:
    """(label of the axis, factor, column → words) of every panel."""
    panels: dict[str, tuple[str, int, dict[str, str]]] = {"loss": ("loss", 1, dict(LOSSES))}
    for name, measure in measures.items():
        if measure.panel in (None, "loss"):
            continue
        label = f"{measure.panel}, %" if measure.unit == "share" else str(measure.panel)
        columns = panels.setdefault(str(measure.panel), (label, measure.factor, {}))[2]
        columns |= {name: measure.heading, AVERAGED + name: f"{measure.heading}, moving average"}
    return [*panels.values(), ("learning rate", 1, {"lr": "learning rate"})]


def write_training_curve(rows: Sequence[Mapping[str, float]], measures: Measured, path: Path) -> None:
    """Writes training_curve as a PNG file, whatever the file is called."""
    training_curve(rows, measures).savefig(path, format="png", dpi=110)
