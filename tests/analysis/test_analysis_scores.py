import math
from dataclasses import replace

import pytest
import timm
import torch

import linvit  # noqa: F401
from linvit.analysis.measured import select
from linvit.analysis.probe import probe
from linvit.analysis.scores import entropy, evenly, measure_scores, one_image, score_maps, score_measures, score_rows

SMALL = {"img_size": (48, 80), "patch_size": 16, "embed_dim": 48, "depth": 2}


def test_entropy_between_none_and_all():
    rows = torch.tensor([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, -0.5, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(entropy(rows), torch.tensor([0, math.log(4), math.log(2), 0]))


def test_measures_of_a_matrix_by_hand():
    found = score_measures(torch.tensor([[[[0.5, 0.5], [1.5, -0.5]]]]))
    second = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = {
        "entropy": (math.log(2) + second) / 2,
        "entropy_share": (1 + second / math.log(2)) / 2,
        "negative_share": 0.25,
        "negative_mass": 0.125,
        "row_sum": 1.0,
        "largest": 0.625,
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)


DEITS = ("softmax", "rala", "mlla", "hydra", "focused", "linear_angular", "agent", "efficient", "mhla")


@pytest.mark.parametrize("name", ["ravlt_nano", "mavit_nano", "care_nano", *(f"deit_tiny_{name}" for name in DEITS)])
def test_rows_are_those_of_the_whole_matrix(name, monkeypatch):
    small = SMALL if name.startswith("deit") else {}
    network = timm.create_model(name, **small).double()
    one = probe(network, torch.randn(2, 3, 48, 80, dtype=torch.float64))[0]
    operands = one_image(one.operands, 1)
    places = evenly(operands.query.shape[-2], 5)
    whole = one.scores()[1:, :, places]
    torch.testing.assert_close(score_rows(operands, places), whole, rtol=1e-9, atol=1e-13)
    monkeypatch.setattr("linvit.analysis.scores.LARGEST", 1)  # one head at a time
    torch.testing.assert_close(score_rows(operands, places), whole, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    "attention", [{"weighting": "learned"}, {"normalizer": "learned"}, {"feature_map": "relu", "rope": False}]
)
def test_rows_of_changed_axes(attention):
    network = timm.create_model("deit_tiny_rala", attention=attention, **SMALL).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    one = probe(network, torch.randn(2, 3, 48, 80, dtype=torch.float64))[1]
    operands = one_image(one.operands, 1)
    torch.testing.assert_close(score_rows(operands, torch.tensor([0, 7])), one.scores()[1:, :, [0, 7]])


def test_scores_with_and_without_rotation():
    network = timm.create_model("mavit_nano", pattern="LLSS")
    images = torch.randn(2, 3, 64, 64)
    found = measure_scores(network, [images])
    first = probe(network, images)[0]
    on, off = (select(found, rotation=kind)[0].values for kind in ("on", "off"))
    torch.testing.assert_close(on["row_sum"], first.scores().sum(-1).mean(-1))
    bare = replace(first.operands, rotary=None).scores()
    torch.testing.assert_close(off["negative_share"], (bare < 0).float().mean((-2, -1)))
    torch.testing.assert_close(off["row_sum"], torch.ones(2, 2))


def test_networks_without_rotation_and_softmax_have_one_condition():
    found = measure_scores(timm.create_model("deit_tiny_softmax", **SMALL), [torch.randn(1, 3, 48, 80)])
    assert [one.condition for one in found] == [{"rotation": "none"}] * 2
    assert all(one.values["negative_share"].max() == 0 for one in found)
    assert found[0].layer.num_prefix == 1
    assert found[0].layer.grid == (3, 5)


@pytest.mark.parametrize("name", ["deit_tiny_softmax", "deit_tiny_rala"])
def test_map_is_the_row_of_the_token_under_the_point_without_the_class_token(name):
    network = timm.create_model(name, **SMALL)
    images = torch.randn(2, 3, 48, 80)
    maps = score_maps(network, images, (0.9, 0.3))
    assert [len(row) for row in maps] == [2, 2]
    token = 1 + 2 * 5 + 1
    expected = probe(network, images)[1].scores()[1, :, token, 1:].mean(0).reshape(3, 5)
    torch.testing.assert_close(maps[1][1].scores, expected)
    assert maps[1][1].token == (2, 1)
    assert score_maps(network, images[:1], (1.0, 1.0))[0][0].token == (2, 4)
