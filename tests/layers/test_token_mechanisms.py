from functools import partial

import pytest
import torch
from golden_networks import assert_recorded, filled, golden, released_input
from torch.testing import assert_close

from linvit.layers.token_mechanisms import TOKEN_LAYERS, AgentAttention, FocusedAttention

RECORDS = golden("mechanisms")
GRID = (14, 14)
pytestmark = pytest.mark.usefixtures("float64")


def mlla(weights):
    """The released module has v = x and no projection; its rotation table in float64 is ours."""
    eye, zero = torch.eye(64), torch.zeros(64)
    ours = {
        "qkv.weight": torch.cat((weights["qk.weight"], eye)),
        "qkv.bias": torch.cat((weights["qk.bias"], zero)),
        "proj.weight": eye,
        "proj.bias": zero,
        "lepe.weight": weights["lepe.weight"],
        "lepe.bias": weights["lepe.bias"],
    }
    return loaded("mlla", ours, heads=2)


def efficient(weights):
    """The released module is made of 1×1 convolutions over a map and adds its input."""
    names = ("queries", "keys", "values")
    layer = loaded(
        "efficient",
        {
            "qkv.weight": torch.cat([weights[f"{name}.weight"].flatten(1) for name in names]),
            "qkv.bias": torch.cat([weights[f"{name}.bias"] for name in names]),
            "proj.weight": weights["reprojection.weight"].flatten(1),
            "proj.bias": weights["reprojection.bias"],
        },
        heads=3,
    )
    return lambda x: x + layer(x.flatten(2).mT).mT.unflatten(-1, GRID)


def loaded(mechanism, weights, **options):
    layer = TOKEN_LAYERS[mechanism](weights["proj.weight"].shape[0], mechanism=mechanism, grid=GRID, **options)
    layer.load_state_dict(weights)
    return layer


RELEASED = {
    **{name: partial(loaded, name, heads=6) for name in ("focused", "inline", "agent")},
    "inline_class_token": partial(loaded, "inline", heads=6, num_prefix=1),
    "linear_angular": partial(loaded, "linear_angular", heads=3, num_prefix=1),
    "mlla": mlla,
    "efficient": efficient,
}


def test_every_record_is_compared():
    assert set(RELEASED) == set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_equals_the_released_module(name):
    record = RECORDS[name]
    y = RELEASED[name](filled(record["parameters"]))(released_input(record)).detach()
    assert_recorded(y, record["output"], 1e-8)


def test_focused_positions_follow_the_grid():
    layer = FocusedAttention(8, 2, "focused", (6, 6))
    with torch.no_grad():
        layer.positional_encoding.copy_(torch.arange(36.0)[None, :, None].expand(1, 36, 8) // 6)  # the row's number
    x = torch.zeros(1, 3 * 12, 8)
    key = layer.query_key_value(x, (3, 12))[1] - layer.qkv.bias[8:16].view(1, 2, 1, 4)
    rows = key[0, 0, :, 0].unflatten(0, (3, 12))
    assert_close(rows, rows[:, :1].expand(3, 12))
    assert rows[0, 0] < rows[1, 0] < rows[2, 0]
    assert_close(rows[1, 0].item(), 2.5)


def test_focused_temperature_is_for_its_own_feature_map():
    layer = FocusedAttention(8, 2, "focused", (2, 3), feature_map="relu")
    assert layer.feature_map() is None
    assert layer.operator.options["feature_map"] == "relu"


def test_agents_of_a_row_of_biases_are_stretched():
    layer = AgentAttention(8, 2, "agent", (4, 6), agents=(2, 2))
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            parameter.zero_()
        layer.aw_bias.copy_(torch.arange(6.0).expand_as(layer.aw_bias))
        layer.ha_bias.copy_(torch.arange(4.0)[:, None, None].expand_as(layer.ha_bias))
    to_tokens = layer._agent_bias((2, 3)).unflatten(-1, (2, 3))
    assert_close(to_tokens, torch.tensor([0.5, 2.5, 4.5]).expand_as(to_tokens))
    to_agents = layer._token_bias((2, 3)).unflatten(2, (2, 3))
    assert_close(to_agents, torch.tensor([0.5, 2.5]).view(2, 1, 1).expand_as(to_agents))


def test_agents_have_biases_for_the_prefix_only_where_there_is_one():
    names = {name for name, _ in AgentAttention(8, 2, "agent", (4, 6)).named_parameters(recurse=False)}
    with_prefix = {name for name, _ in AgentAttention(8, 2, "agent", (4, 6), 1).named_parameters(recurse=False)}
    assert with_prefix - names == {"ac_bias", "ca_bias"}
    assert AgentAttention(8, 2, "agent", (4, 6), 2).ca_bias.shape == (1, 2, 2, 49)


@pytest.mark.parametrize("mechanism", ["focused", "agent"])
def test_tables_begin_small_and_differ(mechanism):
    layer = TOKEN_LAYERS[mechanism](8, 2, mechanism, GRID)
    tables = [p for p in layer.parameters(recurse=False) if p.count_nonzero()]
    assert tables
    for table in tables:
        assert 0.015 < table.std() < 0.025


def test_polarity_needs_two_halves_of_a_head():
    TOKEN_LAYERS["polaformer"](8, 2, "polaformer", GRID)
    with pytest.raises(ValueError, match="the head width is 3, expected an even number: change `heads`"):
        TOKEN_LAYERS["polaformer"](6, 2, "polaformer", GRID)


def test_polarity_sees_what_relu_loses():
    """A key that is the negative of the query is read, by the half of the opposite signs alone."""
    layer = TOKEN_LAYERS["polaformer"](4, 1, "polaformer", (1, 2))
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.copy_(torch.tensor([1.0, 2, 1, 1, -1, -2, -1, -1, 1, 1, 1, 1]))
    scores = layer.scores(torch.zeros(1, 2, 4), (1, 2))
    assert not scores[:, 0].any()
    assert torch.allclose(scores[:, 1].sum(-1), torch.ones(1, 2))
