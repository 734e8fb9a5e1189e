"""Accuracy over time. Names beside points cover no marker, line or other name, and have the same places every time."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from evidence.bench.accuracy import add_names, figures
from linvit.analysis.figures import subplots
from linvit.bench.page import cells
from linvit.bench.rows import Report, Row

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


def test_accuracy_over_latency_at_the_smallest_size():
    rows = [
        Row(name, variant, "float32", 1, 1, clock="cpu", median_ms=1.0, size=(side, side), pattern=pattern)
        for name, pattern in (("ravlt_tiny", "LLSS"), ("convnext_tiny", None))
        for variant in ("plain", "fused")
        for side in (224, 448)
    ]
    drawn = dict(figures(Report("model", rows=rows)))
    assert drawn.keys() == {"accuracy_batch1"}
    (axes,) = drawn["accuracy_batch1"].axes
    assert axes.get_xlabel() == "ms per batch (CPU time, 224 × 224 px, batch 1, 1 thread)"
    assert {text.get_text() for text in axes.texts} == {"ravlt_tiny (LLSS)", "convnext_tiny"}


@pytest.mark.parametrize(
    ("size", "variant", "shown"),
    [
        ((224, 224), "plain", "82.8"),
        ((224, 224), "fused+bf16", "82.8"),
        ((512, 512), "plain", "–"),
        ((224, 224), "openvino+int8", "–"),
    ],
)
def test_a_published_accuracy_is_that_of_its_own_size_and_kind_of_number(size, variant, shown):
    row = Row("ravlt_tiny", variant, "float32", 1, 1, size=size, median_ms=1.0)
    other = Row("ravlt_tiny", "plain", "float32", 1, 1, size=(224, 224), median_ms=1.0)
    assert cells(Report("model", rows=[row, other]))[0]["published top-1, %"] == shown
