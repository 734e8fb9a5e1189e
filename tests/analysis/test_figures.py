import itertools

import pytest
import timm
import torch

import linvit  # noqa: F401
from linvit.analysis import figures
from linvit.analysis.figures import Trained

CLASSES = ["a", "b", "c"]
TARGETS = torch.tensor([0, 1, 2, 2, 1, 0])


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    predictions = {"ravlt_nano": [0, 1, 2, 2, 1, 0], "care_nano": [0, 2, 2, 1, 1, 0]}
    return [
        Trained(name, timm.create_model(name).eval(), [1, 2, 3], [2.0, 1.0, 0.5], [40.0, 90.0, 100.0], torch.tensor(p))
        for name, p in predictions.items()
    ]


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return torch.randn(6, 3, 64, 64)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_learning_curves_draw_every_network(trained):
    left, right = figures.learning_curves(trained).axes
    assert [len(axes.lines) for axes in (left, right)] == [2, 2]
    assert list(right.lines[0].get_ydata()) == [60.0, 10.0, 0.0]


def test_confusion_counts_true_against_predicted(trained):
    right, wrong = figures.confusion_matrices(trained, TARGETS, CLASSES).axes
    assert texts(right) == ["2", "2", "2"]
    cells = {(int(t.get_position()[1]), int(t.get_position()[0])): t.get_text() for t in wrong.texts}
    assert cells == {(0, 0): "2", (1, 1): "1", (1, 2): "1", (2, 1): "1", (2, 2): "1"}


def test_wrongly_read_names_both_classes(trained, images):
    figure = figures.wrongly_read(trained, images, TARGETS, CLASSES)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["b read as c", "c read as b"]
    assert [text for axes in figure.axes for text in texts(axes)] == ["ravlt_nano\n0 of 6", "care_nano\n2 of 6"]


def test_score_maps_show_one_map_a_network_and_image(trained, images):
    figure = figures.score_maps(trained, images[:2])
    maps = [axes.images[0].get_array().shape for axes in figure.axes]
    assert maps == [(64, 64), (16, 16), (4, 4)] * 2


def test_outline_lies_where_the_image_is_bright(trained):
    image = torch.zeros(1, 3, 64, 64)
    image[..., 40:56, 8:16] = 1  # low and left
    outlined = figures.score_maps(trained[:1], image).axes[1]
    points = torch.cat([torch.as_tensor(path.vertices) for c in outlined.collections for path in c.get_paths()])
    x, y = points.mean(0).tolist()
    assert (x, y) == (pytest.approx(12 / 4, abs=0.2), pytest.approx(48 / 4, abs=0.2))
    assert outlined.yaxis_inverted()


def test_singular_values_are_relative_and_fall(trained, images):
    for axes in figures.singular_values(trained, images).axes:
        for line in axes.lines:
            values = line.get_ydata()
            assert values[0] == pytest.approx(1)
            assert all(a >= b for a, b in itertools.pairwise(values))


def test_svg_is_a_picture(trained):
    assert figures.svg(figures.learning_curves(trained)).rstrip().endswith("</svg>")
