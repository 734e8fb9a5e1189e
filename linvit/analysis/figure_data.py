"""The numbers that a figure shows, as rows, so that a reader can draw it again."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter

WORDS = (FixedFormatter, StrCategoryFormatter)  # ticks with words


def figure_rows(figure: Figure) -> list[dict[str, object]]:
    """Every point and bar of a figure: panel, series, x and y, and the words at the nearest ticks if an axis has them.

    Pictures inside a figure are left out.
    """
    rows = []
    for axes in figure.axes:
        panel = axes.get_title() or axes.get_title("left") or axes.get_ylabel()
        for series, points in _series(axes):
            for x, y in points:
                if math.isfinite(x) and math.isfinite(y):
                    rows.append(
                        {"panel": panel, "series": series, **_place("x", x, axes.xaxis), **_place("y", y, axes.yaxis)}
                    )
    return rows


def _series(axes: Axes) -> Iterator[tuple[str, Sequence[tuple[float, float]]]]:
    """Label and points of every line, scatter plot and group of bars; labels that matplotlib invented are empty."""
    for line in axes.lines:
        yield _label(line), _pairs(line.get_xydata())
    for dots in axes.collections:
        yield _label(dots), _pairs(dots.get_offsets())
    for bars in axes.containers:
        patches = getattr(bars, "patches", ())
        yield _label(bars), [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in patches]


def _pairs(points: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]


def _label(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def _place(name: str, value: float, axis: Axis) -> dict[str, object]:
    """The number, and the words of the nearest tick on an axis whose ticks have words."""
    formatter, ticks = axis.get_major_formatter(), axis.get_majorticklocs()
    words = formatter.format_ticks(list(ticks)) if isinstance(formatter, WORDS) else []
    if not any(words):
        return {name: value}
    distances = [abs(tick - value) for tick in ticks]
    return {name: value, f"{name} name": words[distances.index(min(distances))]}
