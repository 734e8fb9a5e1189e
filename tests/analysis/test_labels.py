"""Names beside points: none covers a marker, a line or another name, and the same names get the same places."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from linvit.analysis.figures import subplots
from linvit.analysis.labels import Label, add_labels

MARKER = 3.5  # points


def labelled(labels):
    figure, axes = subplots((6.4, 4.8))
    for label in labels:
        axes.plot(*zip(*label.points, strict=True), "o-", markersize=2 * MARKER)
    axes.margins(0.12)
    return figure, axes, add_labels(figure, axes, labels, 10)


def boxes(figure, texts):
    figure.draw_without_rendering()
    return [Bbox(Text.get_window_extent(text).get_points() * 72 / figure.dpi) for text in texts]


@pytest.mark.parametrize("seed", range(3))
def test_names_cover_nothing(seed):
    generator = np.random.default_rng(seed)
    labels = []
    for number in range(12):  # half of them within a name's height of each other
        height = float(generator.normal(80, 0.3 if number % 2 else 3))
        labels.append(Label(f"network_{number}", "black", [(x, height) for x in generator.uniform(10, 40, 2)]))
    figure, axes, texts = labelled(labels)
    assert [text.get_text() for text in texts] == [label.words for label in labels]
    drawn = boxes(figure, texts)
    points = axes.transData.transform([point for label in labels for point in label.points]) * 72 / figure.dpi
    for point, box in itertools.product(points, drawn):
        nearest = np.clip(point, box.min, box.max)
        assert np.hypot(*(nearest - point)) > MARKER
    assert not any(one.overlaps(other) for one, other in itertools.combinations(drawn, 2))
    inside = Bbox(axes.bbox.get_points() * 72 / figure.dpi)
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in drawn)


def test_a_lone_name_stands_beside_its_point_without_a_line():
    figure, axes, (text,) = labelled([Label("$x", "#0072B2", [(1.0, 2.0)])])
    assert text.get_text() == r"\$x"
    assert text.arrow_patch is None
    (box,) = boxes(figure, [text])
    point = axes.transData.transform((1.0, 2.0)) * 72 / figure.dpi
    assert box.x0 - point[0] == pytest.approx(7, abs=0.1)
    assert (box.y0 + box.y1) / 2 == pytest.approx(point[1], abs=0.1)


def test_a_crowded_name_has_a_line():
    points = [(1 + 0.02 * column, 1 + 0.02 * row) for column in range(9) for row in range(9)]
    corners = [Label("corner", "black", [corner]) for corner in ((0.0, 0.0), (2.0, 2.0))]
    _, _, texts = labelled([Label(f"n{number}", "black", [point]) for number, point in enumerate(points)] + corners)
    assert all(text.arrow_patch is not None for text in texts[36:45])  # those in the middle column
    assert all(text.arrow_patch is None for text in texts[-2:])


def test_equal_labels_get_equal_places():
    labels = [Label(f"n{number}", "black", [(number % 3, number / 9)]) for number in range(9)]
    first, second = ([text.xyann for text in labelled(labels)[2]] for _ in range(2))
    assert first == second
