"""Shared by all figures: size, colours, fonts and grid, text of users, files, and the numbers of a figure."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, MaxNLocator, NullLocator

from linvit.analysis.markdown import printable
from linvit.files import replacing, write_text
from linvit.layers.mechanisms import MECHANISMS

WIDTH = 7.0  # inches: the text width of a two-column paper, so that fonts keep their size there
SMALL = 9  # points: the smallest font
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#555555", "#CC79A7", "#E69F00")
WORDS = (FixedFormatter, StrCategoryFormatter)  # ticks with words
OTHER = "black"  # the colour of a name without a mechanism


def colour_of(name: str) -> str:
    """The colour of the first mechanism in a name such as `stdlib_bytes_mala` or `rala_softmax`; black without one."""
    places = {mechanism: f"_{name}_".find(f"_{mechanism}_") for mechanism in MECHANISMS}
    held = [mechanism for mechanism, place in places.items() if place >= 0]
    first = min(held, key=lambda mechanism: (places[mechanism], -len(mechanism)), default=None)
    return OTHER if first is None else MECHANISMS[first].colour


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Different colours for different names: the first name with a mechanism has its colour, the rest have others."""
    colours: dict[str, str] = {}
    for name in names:
        if colour_of(name) not in (OTHER, *colours.values()):
            colours[name] = colour_of(name)
    free = cycle([colour for colour in COLOURS if colour not in colours.values()] or COLOURS)
    return {name: colours.get(name) or next(free) for name in dict.fromkeys(names)}


def literal(text: str) -> str:
    """Text of users (names of classes, recipes, settings) for a figure: no formulas, and no characters SVG forbids."""
    return printable(text).replace("$", r"\$")


def subplots(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of (width, height) inches and its panels, with the options and the result of `Figure.subplots`."""
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, **options)
    for axes in figure.axes:
        style(axes)
    return figure, panels


def panel_grid(count: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page of text and its panels, at most `columns` side by side, each row `height` inches."""
    rows = max(1, -(-count // columns))
    columns = max(1, -(-count // rows))
    figure, grid = subplots((WIDTH, rows * height), rows, columns, squeeze=False, **options)
    panels: list[Axes] = list(grid.flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def style(axes: Axes) -> None:
    """The pale grid and the fonts of every panel."""
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=SMALL)
    axes.xaxis.label.set_fontsize(SMALL)
    axes.yaxis.label.set_fontsize(SMALL)


def plain_ticks(axis: Axis) -> None:
    """0.25 and 1e-05 instead of powers, and no minor ticks, which takes a tenth of the time."""
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def integer_ticks(axis: Axis) -> None:
    """Ticks at whole numbers only, even for a single epoch or layer."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


@contextmanager
def _saving() -> Iterator[None]:
    """Keeps text as text, makes files reproducible, and hides warnings about characters that PNG's font lacks."""
    with (
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "linvit", "pdf.fonttype": 42}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG image."""
    buffer = io.StringIO()
    with _saving():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def write_figure(figure: Figure, stem: Path) -> None:
    """Writes stem.svg, stem.png and stem.pdf, each completely or not at all."""
    with _saving():
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not for every file
    write_text(stem.with_name(f"{stem.name}.svg"), svg(figure))
    for kind, facts in (("png", {}), ("pdf", {"CreationDate": None})):
        with replacing(stem.with_name(f"{stem.name}.{kind}")) as temporary, _saving():
            figure.savefig(temporary, format=kind, dpi=150, metadata=facts)


def figure_rows(figure: Figure) -> list[dict[str, object]]:
    """Every point and bar of a figure: panel, series, x and y, and the words at the nearest ticks if an axis has them.

    Pictures inside a figure are left out.
    """
    rows = []
    for axes in figure.axes:
        panel = axes.get_title() or axes.get_title("left") or axes.get_ylabel()
        artists: list[tuple[Any, Any]] = [(line, np.asarray(line.get_xydata()).tolist()) for line in axes.lines]
        artists += [(dots, np.asarray(dots.get_offsets()).tolist()) for dots in axes.collections]
        for bars in axes.containers:
            patches = getattr(bars, "patches", ())
            artists.append((bars, [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in patches]))
        for artist, points in artists:
            label = str(artist.get_label())
            series = "" if label.startswith("_") else label  # matplotlib invented it
            for x, y in points:
                if math.isfinite(x) and math.isfinite(y):
                    places = {**_place("x", x, axes.xaxis), **_place("y", y, axes.yaxis)}
                    rows.append({"panel": panel, "series": series, **places})
    return rows


def _place(name: str, value: float, axis: Axis) -> dict[str, object]:
    """The number, and the words of the nearest tick on an axis whose ticks have words."""
    formatter, ticks = axis.get_major_formatter(), axis.get_majorticklocs()
    words = formatter.format_ticks(list(ticks)) if isinstance(formatter, WORDS) else []
    if not any(words):
        return {name: value}
    distances = [abs(tick - value) for tick in ticks]
    return {name: value, f"{name} name": words[distances.index(min(distances))]}
