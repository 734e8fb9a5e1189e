"""Names beside points: none covers a marker, a line or another name, and the same names get the same places."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from linvit.analysis.figures import subplots
from linvit.bench.page import add_names

MARKER = 3.5  # points


def labelled(labels):
    figure, axes = subplots((6.4, 4.8))
    for _, _, points in labels:
        axes.plot(*zip(*points, strict=True), "o-", markersize=2 * MARKER)
    axes.margins(0.12)
    return figure, axes, add_names(figure, axes, labels)


def boxes(figure, texts):
    figure.draw_without_rendering()
    return [Bbox(Text.get_window_extent(text).get_points() * 72 / figure.dpi) for text in texts]


@pytest.mark.parametrize("seed", range(3))
def test_names_cover_nothing(seed):
    generator = np.random.default_rng(seed)
    labels = []
    for number in range(12):  # half of them within a name's height of each other
        height = float(generator.normal(80, 0.3 if number % 2 else 3))
        labels.append((f"network_{number}", "black", [(x, height) for x in generator.uniform(10, 40, 2)]))
    figure, axes, texts = labelled(labels)
    assert [text.get_text() for text in texts] == [words for words, _, _ in labels]
    drawn = boxes(figure, texts)
    points = axes.transData.transform([point for _, _, points in labels for point in points]) * 72 / figure.dpi
    for point, box in itertools.product(points, drawn):
        nearest = np.clip(point, box.min, box.max)
        assert np.hypot(*(nearest - point)) > MARKER
    assert not any(one.overlaps(other) for one, other in itertools.combinations(drawn, 2))
    inside = Bbox(axes.bbox.get_points() * 72 / figure.dpi)
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in drawn)


def test_a_lone_name_stands_beside_its_point_without_a_line():
    figure, axes, (text,) = labelled([("$x", "#0072B2", [(1.0, 2.0)])])
    assert text.get_text() == r"\$x"
    assert text.arrow_patch is None
    (box,) = boxes(figure, [text])
    point = axes.transData.transform((1.0, 2.0)) * 72 / figure.dpi
    assert box.x0 - point[0] == pytest.approx(7, abs=0.1)
    assert (box.y0 + box.y1) / 2 == pytest.approx(point[1], abs=0.1)
