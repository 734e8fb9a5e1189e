"""Published accuracy over measured time: a column and figures that only our pages have."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator
from matplotlib.transforms import Bbox

from evidence.published import PUBLISHED
from linvit.analysis.figures import colour_of, literal, plain_ticks, subplots
from linvit.bench.page import CLOCKS, FONT, MARKERS, MISSING
from linvit.bench.rows import Report, Row, measured

MECHANISM_OF = {"ravlt": "rala", "mavit": "mala", "care": "linear"}
OF_PEERS = ("#7F3C8D", "#555555", "#B8860B", "#8C564B", "#3A9BD9", "#6B7300", "#CC79A7", "#A50F15", "#1F2E8C")
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (7, 14, 22, 32, 44, 58, 74)  # points, from a name to its point; all but the first have a line between
MARKER = 5  # points: half of its side

Name = tuple[str, str, Sequence[tuple[float, float]]]
"""A network's words, its colour and its points, all at one height, in the units of the axes."""


def has_published_accuracy(row: Row) -> bool:
    """Whether the network has a published accuracy, and the row is of that: floating-point numbers, at 224 px."""
    return row.name in PUBLISHED and row.size == (224, 224) and "int8" not in row.variant


def top1(row: Row) -> str:
    return f"{PUBLISHED[row.name].top1:g}" if has_published_accuracy(row) else MISSING


def figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Name and figure for each batch with networks of published accuracy."""
    rows = [row for row in measured(report.rows) if report.kind == "model" and has_published_accuracy(row)]
    for batch in sorted({row.batch for row in rows}):
        yield f"accuracy_batch{batch}", accuracy([row for row in rows if row.batch == batch])


def accuracy(rows: Sequence[Row]) -> Figure:
    """Published accuracy over measured time, one colour per family, one marker per variant, lines between variants."""
    figure, axes = subplots((6.4, 4.8))  # narrow, so that its words can still be read on a phone
    names = list(dict.fromkeys(row.name for row in rows))
    variants = list(dict.fromkeys((row.variant, row.dtype) for row in rows))
    colours = family_colours(names)
    labels: list[Name] = []
    for name in names:
        points = [row for row in rows if row.name == name]
        places = [(row.median_ms or 0.0, PUBLISHED[name].top1) for row in points]
        axes.plot(*zip(*places, strict=True), color=colours[name], alpha=0.5, linewidth=1)
        for row, place in zip(points, places, strict=True):
            marker = MARKERS[variants.index((row.variant, row.dtype))]
            face = "white" if row.pattern is None else colours[name]
            axes.plot(*place, marker, markerfacecolor=face, color=colours[name], markersize=7)
        words = f"{name} ({points[0].pattern})" if points[0].pattern else name
        labels.append((words, colours[name], places))
    for marker, (variant, dtype) in zip(MARKERS, variants, strict=False):
        axes.plot([], [], marker, color="#555555", markerfacecolor="white", label=f"{variant} {dtype}")
    size, batch, threads = rows[0].size or (0, 0), rows[0].batch, rows[0].threads
    clock = rows[0].clock or "cpu"
    heading = f"{CLOCKS[clock]}, {size[0]} × {size[1]} px, batch {batch}"
    if clock != "gpu":
        heading += f", {threads} thread{'s' * (threads > 1)}"
    axes.set(xlabel=f"ms per batch ({heading})", ylabel="published ImageNet-1k top-1, %", xscale="log")
    axes.margins(0.12, 0.1)  # room for the names
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    plain_ticks(axes.xaxis)
    columns = 2 if len(variants) == 4 else min(3, len(variants))
    figure.legend(frameon=False, fontsize=FONT, loc="outside lower center", ncols=columns, title="filled: ours")
    add_names(figure, axes, labels)
    return figure


def add_names(figure: Figure, axes: Axes, names: Sequence[Name]) -> list[Annotation]:
    """Writes each name at the nearest place beside one of its points where it covers nothing.

    Limits, legend and words of the axes must be final. Where no place is free, a name covers as few things as possible.
    """
    figure.draw_without_rendering()
    unit, texts = figure.dpi / 72, []
    in_pixels = [axes.transData.transform(points) for _, _, points in names]
    taken = [Bbox([point, point]).padded(MARKER * unit) for points in in_pixels for point in points]
    taken += [Bbox([points.min(0), points.max(0)]).padded(unit) for points in in_pixels]
    for (words, colour, points), pixels in zip(names, in_pixels, strict=True):
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": FONT, "color": colour, "va": "bottom"}
        text = axes.annotate(literal(words), points[0], (0, 0), **style)
        size = np.array(text.get_window_extent().size)
        text.remove()
        least, nearest = math.inf, (0, 0, Bbox.null())
        for distance, number, side in itertools.product(DISTANCES, range(len(points)), SIDES):
            low = pixels[number] + np.array(side) * distance * unit - size * (1 - np.array(side)) / 2
            box = Bbox([low, low + size])
            outside = not all(axes.bbox.contains(*corner) for corner in box.corners())
            covered = box.count_overlaps(taken) + outside
            if covered < least:
                least, nearest = covered, (distance, number, box)
        distance, number, box = nearest
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 4} if distance > DISTANCES[0] else None
        shift = (box.min - pixels[number]) / unit
        text = axes.annotate(literal(words), points[number], tuple(shift), arrowprops=line, **style)
        text.set_in_layout(False)  # it takes no space from the axes
        taken.append(box.padded(unit))
        texts.append(text)
    return texts


def family_colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per family, the first word of a name; ours have that of their mechanism."""
    families = [name.partition("_")[0] for name in names]
    ours = {family: colour_of(MECHANISM_OF[family]) for family in families if family in MECHANISM_OF}
    others = [family for family in dict.fromkeys(families) if family not in ours]
    colours = ours | dict(zip(others, itertools.cycle(OF_PEERS), strict=False))
    return {name: colours[family] for name, family in zip(names, families, strict=True)}
