"""What figures have in common: colours, panels with a pale grid, and how they are written."""

import io
from pathlib import Path
from typing import Any

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from linvit.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#555555", "#CC79A7", "#E69F00")
SUFFIXES = (".svg", ".png")


def subplots(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of (width, height) inches and its panels, with the options and the result of `Figure.subplots`."""
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, **options)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    return figure, panels


def plain_ticks(axis: Axis) -> None:
    """0.25 and 1e-05 instead of powers, and no small ticks: a tenth of the time to draw."""
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG image."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def write_figure(figure: Figure, stem: Path) -> None:
    """Writes stem.png and stem.svg, each whole or not at all."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not for every file
    for suffix in SUFFIXES:
        with replacing(stem.with_name(f"{stem.name}{suffix}")) as temporary:
            figure.savefig(temporary, format=suffix[1:], dpi=130)
