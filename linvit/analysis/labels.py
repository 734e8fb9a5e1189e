"""Names next to what they belong to: each at a place where it covers nothing, with a line to it if it is not near."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from linvit.analysis.figures import literal

SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (7, 14, 22, 32, 44, 58, 74)  # points
NEAR = 14  # points: without a line up to here
MARKER, LINE, GAP = 5.0, 1.0, 1.0  # points: half of a marker's side, half of a line's width, and around every name
STEPS = np.linspace(0.1, 0.9, 17)[:, None]  # along the line from a name to its point
CROSSING = 60.0  # square points: what it counts if that line crosses something
ASTRAY = 30.0  # square points: what it counts if a name with a line is nearer to a point of another
NOTHING = 1e-6  # square points: the rounding of a sum

Numbers = np.ndarray[Any, Any]  # points (x, y), or boxes (left, low, right, high), in points of the figure


@dataclass(frozen=True)
class Label:
    """A name, its colour, and the points at one height that it belongs to, in the units of the axes."""

    words: str
    colour: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Place:
    """A place of a name: its box, the number of its point and the point, and the distance between them."""

    box: Numbers
    number: int
    point: Numbers
    distance: float


def add_labels(figure: Figure, axes: Axes, labels: Sequence[Label], fontsize: float) -> list[Annotation]:
    """Adds the names, those with the most neighbours first, each at the nearest place that is free.

    Limits, legend and words of the axes must be final. Equal labels get equal places. Where no place is free, the name
    stands where it covers least. Markers may be 10 points wide; a straight line may join the points of a label.
    """
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    unit = 72 / figure.dpi
    points = [unit * axes.transData.transform(label.points) for label in labels]
    inside = unit * axes.bbox.get_points().reshape(4)
    taken = [_box(point, point, MARKER) for each in points for point in each]
    taken += [_box(each.min(0), each.max(0), LINE) for each in points]
    every = np.concatenate(points)
    away = [np.abs(each[:, None] - every) for each in points]
    # points of all labels within a name's length
    neighbours = [int(((gaps[..., 0] < 80) & (gaps[..., 1] < 20)).sum()) for gaps in away]
    order = sorted(range(len(labels)), key=lambda number: -neighbours[number])
    added: dict[int, Annotation] = {}
    for number in order:
        size = unit * _size(axes, labels[number].words, fontsize)
        others = np.concatenate([np.empty((0, 2)), *points[:number], *points[number + 1 :]])
        place = _best(_places(points[number], size), np.array(taken), inside, others)
        added[number] = _text(axes, labels[number], place, _with_line(place, others), fontsize)
        taken.append(_padded(place.box))
    return [added[number] for number in range(len(labels))]


def _size(axes: Axes, words: str, fontsize: float) -> Numbers:
    """Width and height in pixels."""
    text = axes.text(0, 0, literal(words), fontsize=fontsize)
    size = np.array(text.get_window_extent().size)
    text.remove()
    return size


def _text(axes: Axes, label: Label, place: _Place, with_line: bool, fontsize: float) -> Annotation:
    """The name at its place, which takes no space from the axes; the line starts where it is nearest to its point."""
    low, high = place.box[:2], place.box[2:]
    start = (np.clip(place.point, low, high) - low) / (high - low)
    line = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4, "relpos": start}
    text = axes.annotate(
        literal(label.words),
        label.points[place.number],
        tuple(low - place.point),
        textcoords="offset points",
        fontsize=fontsize,
        color=label.colour,
        va="bottom",
        arrowprops=line if with_line else None,
    )
    text.set_in_layout(False)
    return text


def _box(start: Numbers, end: Numbers, margin: float) -> Numbers:
    return np.concatenate([start - margin, end + margin])


def _padded(box: Numbers) -> Numbers:
    return _box(box[:2], box[2:], GAP)


def _places(points: Numbers, size: Numbers) -> Iterator[_Place]:
    """All places of a name of this size, nearest first."""
    for distance, (number, point), side in itertools.product(DISTANCES, enumerate(points), SIDES):
        right, up = side
        away = distance * (1.0 if 0 in side else 0.8)
        left = point[0] + right * away - size[0] * (1 - right) / 2
        low = point[1] + up * (away + size[1] / 2 * (right == 0)) - size[1] / 2
        yield _Place(np.array([left, low, left + size[0], low + size[1]]), number, point, distance)


def _best(places: Iterator[_Place], taken: Numbers, inside: Numbers, others: Numbers) -> _Place:
    """The first place that costs nothing, or the first of those that cost least."""
    best, least = next(places), np.inf
    for place in itertools.chain([best], places):
        # square points that the name would cover, or that would lie outside
        box = _padded(place.box)
        area = float(np.prod(box[2:] - box[:2]))
        cost = float(_common(box, taken).sum()) + area - float(_common(box, inside[None]).sum())
        if _with_line(place, others):
            cost += _cost_of_line(place, taken) + ASTRAY * _astray(place, others)
        if cost < least:
            best, least = place, cost
        if cost < NOTHING:
            break
    return best


def _cost_of_line(place: _Place, taken: Numbers) -> float:
    """What the line from a name to its point would cross; markers around the point do not count."""
    near = np.clip(place.point, place.box[:2], place.box[2:])
    steps = near + STEPS * (place.point - near)
    others = taken[~_contain(taken, place.point[None])[:, 0]]
    return CROSSING * int(_contain(others, steps).any(1).sum())


def _with_line(place: _Place, others: Numbers) -> bool:
    return place.distance > NEAR or _astray(place, others)


def _astray(place: _Place, others: Numbers) -> bool:
    """Whether a point of another name is as near to this one as its own."""
    points = np.concatenate([place.point[None], others])
    away = np.hypot(*(np.clip(points, place.box[:2], place.box[2:]) - points).T)
    return bool((away[1:] <= away[0]).any())


def _common(box: Numbers, others: Numbers) -> Numbers:
    """The areas that a box has in common with others."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    return np.asarray(np.clip(sides, 0, None).prod(1))


def _contain(boxes: Numbers, points: Numbers) -> Numbers:
    """(boxes, points): which of the boxes contain which of the points."""
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    return np.asarray(((low <= points) & (points <= high)).all(-1))
