import pytest
import timm
import torch

import linvit  # noqa: F401
from linvit.analysis import attention_figures as draw
from linvit.analysis.figures import svg
from linvit.analysis.magnitude import compare_readouts, measure_magnitude
from linvit.analysis.measured import select
from linvit.analysis.probe import probe
from linvit.analysis.rank import measure_ranks
from linvit.analysis.scores import measure_scores, score_maps


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return timm.create_model("mavit_nano", pattern="LLSS")


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return torch.randn(2, 3, 64, 64)


@pytest.fixture(scope="module")
def ranks(network, images):
    return measure_ranks(network, [images])


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_rank_figure_has_a_panel_a_measure_and_a_line_a_matrix(ranks):
    figure = draw.rank_figure(ranks)
    assert len(figure.axes) == 5
    first = next(line for line in figure.axes[0].lines if line.get_color() == draw.MATRIX_COLOURS["mixed"])
    expected = [one.mean("rank").item() for one in ranks if one.condition["matrix"] == "mixed"]
    assert list(first.get_ydata()) == expected
    state = next(line for line in figure.axes[0].lines if line.get_color() == draw.MATRIX_COLOURS["state"])
    assert list(state.get_xdata()) == [1, 2]
    assert labels(figure)[-3:] == ["largest possible rank", "mala", "softmax"]


def test_spectra_start_at_one(ranks):
    figure = draw.spectrum_figure(ranks)
    curves = [line for axes in figure.axes for line in axes.lines if len(line.get_ydata()) > 2]
    assert len(curves) == len(ranks)
    assert all(line.get_ydata()[0] == pytest.approx(1) for line in curves)


def test_score_maps_stand_beside_their_image(network, images):
    shown = list(images.sigmoid().movedim(1, -1))
    figure = draw.score_map_figure(shown, score_maps(network, images, (0.25, 0.75)), (0.25, 0.75))
    assert len(figure.axes) == 2 * (1 + draw.MOST_MAPS)
    marker = figure.axes[0].lines[0]
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (47.5, 15.5)
    assert figure.axes[1].images[1].get_array().shape == (16, 16)
    assert figure.axes[0].get_title() == "query"
    names = ["MA$ViT", "other"]
    named = draw.score_map_figure(shown, score_maps(network, images, (0.25, 0.75)), (0.25, 0.75), names)
    assert [row.get_title() for row in named.axes[:: 1 + draw.MOST_MAPS]] == [r"MA\$ViT", "other"]
    assert named.axes[1].get_title() == figure.axes[1].get_title() == "stages.0.blocks.0\nmala, 16×16"


def test_maps_of_a_network_with_one_mechanism_do_not_repeat_it(images):
    torch.manual_seed(0)
    maps = score_maps(timm.create_model("mavit_nano", pattern="LLLL"), images[:1], (0.5, 0.5))
    figure = draw.score_map_figure([images[0].sigmoid().movedim(0, -1)], maps, (0.5, 0.5), ["MALA everywhere"])
    assert figure.axes[1].get_title() == "stages.0.blocks.0\n16×16"


def test_score_measures_show_both_rotations(network, images):
    figure = draw.score_measure_figure(measure_scores(network, [images]))
    assert len(figure.axes) == 4
    assert len(figure.axes[0].containers) == 2 * 5  # every layer of the pyramid rotates
    assert labels(figure) == ["mala", "softmax", "without rotation"]


def test_magnitude_figures_share_their_colours(network, images):
    layer = probe(network, images)[0]
    readouts = draw.readout_figure(compare_readouts(layer))
    assert len(readouts.axes) == 8
    assert readouts.axes[0].get_title() == "softmax"
    layers = draw.magnitude_figure(measure_magnitude(network, [images], factors=(0.5, 1.0, 2.0)))
    assert {line.get_color() for line in layers.axes[0].lines} == {draw.colour_of("mala"), draw.colour_of("softmax")}
    assert labels(layers) == ["mala", "softmax"]
    opacities = [line.get_alpha() for line in layers.axes[0].lines]
    assert opacities == sorted(opacities)
    assert opacities[-1] == 1


def test_networks_of_a_comparison_of_magnitudes_have_colours_of_their_own(network, images):
    measured = measure_magnitude(network, [images], factors=(0.5, 1.0, 2.0))
    figure = draw.magnitude_comparison({"mala": measured, "other": measured})
    assert labels(figure) == ["mala", "other"]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours[: len(colours) // 2] == len(colours) // 2 * [draw.colour_of("mala")]
    assert draw.colour_of("mala") not in colours[len(colours) // 2 :]


def test_a_comparison_has_a_row_for_each_network_and_a_dot_for_each_layer(ranks, images):
    torch.manual_seed(0)
    other = measure_ranks(timm.create_model("ravlt_nano"), [images])
    panels = [("rank", {"matrix": "mixed"}, "output"), ("effective", {"matrix": "state"}, "state")]
    figure = draw.comparison_figure({"mala_$": ranks, "rala": other}, panels)
    output, state = figure.axes
    first, second = (line for line in output.lines if line.get_marker() == "o")
    assert list(first.get_xdata()) == [entry.mean("rank").item() for entry in select(ranks, matrix="mixed")]
    assert -0.5 < min(first.get_ydata()) < max(first.get_ydata()) < 0.5 < min(second.get_ydata())
    assert [first.get_color(), second.get_color()] == [draw.colour_of("mala"), draw.colour_of("rala")]
    assert len(state.lines[0].get_xdata()) == 2, "softmax attention has no state"
    assert "mala_$</text>" in svg(figure)


def test_a_panel_without_any_number_is_drawn_empty(network, images):
    entries = measure_magnitude(network, [images], factors=(0.5, 1.0, 2.0))
    for entry in entries:
        for name in entry.values:
            entry.values[name].fill_(float("nan"))
    assert "<svg" in svg(draw.magnitude_figure(entries))
