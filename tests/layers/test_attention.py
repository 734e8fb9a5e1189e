import pytest
import torch
from timm.layers import set_fused_attn
from torch.testing import assert_close

from linvit.layers import Attention2d, Operator, rotary_table
from linvit.layers.attention import MODULATIONS, attention_options
from linvit.layers.mechanisms import at
from linvit.ops import rotary_2d

HEIGHT, WIDTH, HEADS, CHANNELS = 5, 7, 2, 16


def maps(seed=0, count=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, CHANNELS, HEIGHT, WIDTH, generator=generator, dtype=torch.float64).unbind()


def tokens(x):
    """Tokens in row-major order, head by head, one at a time."""
    rows = [
        [x[b, h * 8 : h * 8 + 8, i, j] for i in range(HEIGHT) for j in range(WIDTH)] for b in range(2) for h in range(2)
    ]
    return torch.stack([torch.stack(row) for row in rows]).unflatten(0, (2, 2))


MECHANISMS = list(at("maps"))


def mixed(mechanism, query, key, value, rotary, fused=True):
    """The operator on maps, as Attention2d hands them over."""
    operator = Operator(mechanism, HEADS, CHANNELS // HEADS)
    operator.fused = fused
    by_head = (x.reshape(len(x), HEADS, CHANNELS // HEADS, -1).mT for x in (query, key, value))
    return operator.as_map(operator(*by_head, rotary), value.shape[-2:])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_output_equals_scores_times_value(mechanism):
    rotary = rotary_2d((HEIGHT, WIDTH), 8, dtype=torch.float64)
    operator, inputs = Operator(mechanism, HEADS, 8), [tokens(x) for x in maps()]
    read, value = operator(*inputs, rotary), inputs[2]
    assert_close(operator.scores(*inputs, rotary) @ value, read)
    for fused in (False, True):
        on_map = mixed(mechanism, *maps(), rotary, fused)
        assert on_map.shape == maps()[0].shape
        assert_close(tokens(on_map), read)
    operator.shares = (0.3, 0.5)
    assert_close(operator.scores(*inputs, rotary) @ value, operator(*inputs, rotary))
    assert_close(operator(*inputs, rotary), 0.3 * read + 0.5 * value)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_operators_do_not_depend_on_memory_format(mechanism):
    expected = mixed(mechanism, *maps(), None)
    last = [x.contiguous(memory_format=torch.channels_last) for x in maps()]
    assert_close(mixed(mechanism, *last, None), expected)
    joined = torch.cat(last, dim=1).contiguous(memory_format=torch.channels_last).chunk(3, dim=1)
    assert_close(mixed(mechanism, *joined, None), expected)


def test_rotary_tables_follow_the_grid():
    cos, sin = rotary_table(torch.zeros(1, 3, 4, 6, dtype=torch.float64), 8)
    expected = rotary_2d((4, 6), 8, dtype=torch.float64)
    assert torch.equal(cos, expected.cos)
    assert torch.equal(sin, expected.sin)
    assert cos.shape == (24, 4)


FACTORS = {
    "linear": lambda x, projected: projected,
    "tanh": lambda x, projected: projected.tanh(),
    "silu": lambda x, projected: projected * projected.sigmoid(),
    "identity": lambda x, projected: x,
    "none": lambda x, projected: 1.0,
}


@pytest.mark.parametrize("lepe", [True, False])
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("modulation", sorted(MODULATIONS))
def test_attention_with_another_modulation_and_without_positions(modulation, rope, lepe):
    torch.manual_seed(0)
    layer = Attention2d(CHANNELS, HEADS, "rala", modulation=modulation, rope=rope, lepe=lepe, dtype=torch.float64)
    assert (layer.lepe is None) != lepe
    (x,) = maps(count=1)
    rotary = rotary_table(x, 8)
    query, key, value, *projected = layer.qkvo(x).split(CHANNELS, dim=1)
    assert len(projected) == (modulation in ("linear", "tanh", "silu"))
    expected = mixed("rala", query, key, value, rotary if rope else None)
    if lepe:
        expected = expected + layer.lepe(value)
    factor = FACTORS[modulation](x, projected[0] if projected else None)
    assert_close(layer(x, rotary), layer.proj(expected * factor))


def test_axes_go_to_linear_stages_alone():
    axes = {"feature_map": "relu", "weighting": "uniform", "normalizer": "divide"}
    given = {**axes, "blocks": (2, 2), "modulation": "none", "lepe": False}
    assert attention_options(given, "rala") == given
    assert attention_options(given, "softmax") == {"modulation": "none", "lepe": False}
    assert attention_options(None, "mala") == {}
    layer = Attention2d(CHANNELS, HEADS, "rala", **attention_options(given, "rala"))
    assert layer.operator.options == axes
    assert layer.operator.blocks == (2, 2)


@pytest.mark.parametrize("mechanism", ["rala", "softmax"])
def test_unknown_attention_key(mechanism):
    with pytest.raises(ValueError, match=r"the key 'kappa', expected some of feature_map, .*modulation, lepe, rope"):
        attention_options({"kappa": "relu"}, mechanism)


def test_attention_heeds_timms_switch():
    assert Attention2d(8, 1, "softmax").operator.fused
    set_fused_attn(False)
    try:
        assert not Attention2d(8, 1, "softmax").operator.fused
    finally:
        set_fused_attn(True)


def test_learned_axes_begin_uniform_and_without_offset():
    query, key, value = (tokens(x) for x in maps())
    learned = Operator("rala", HEADS, 8, weighting="learned", normalizer="learned", dtype=torch.float64)
    assert [tuple(p.shape) for p in learned.parameters()] == [(HEADS * 8,), (HEADS,), (HEADS,)]
    features = [torch.where(x > 0, x + 1, x.exp()) for x in (query, key)]
    expected = 8**-0.5 * (features[0] @ features[1].mT) @ value / value.shape[-2]
    assert_close(learned(query, key, value), expected)


def test_learned_axes_learn():
    learned = Operator("rala", HEADS, 8, weighting="learned", normalizer="learned", dtype=torch.float64)
    inputs = [tokens(x) for x in maps()]
    learned(*inputs).square().sum().backward()
    assert all(p.grad.abs().min() > 0 for p in learned.parameters())
    torch.nn.init.normal_(learned.mean_query)
    torch.nn.init.normal_(learned.gamma)
    assert_close(learned.scores(*inputs) @ inputs[2], learned(*inputs))


@pytest.mark.parametrize("axis", ["feature_map", "weighting", "normalizer"])
def test_unknown_axis_values_are_refused_at_once(axis):
    with pytest.raises(ValueError, match=rf"{axis}`? is 'other', expected .*one of"):
        Operator("rala", HEADS, 8, **{axis: "other"})


def test_unit_queries_do_not_see_magnitude():
    query, key, value = (tokens(x) for x in maps())
    operator = Operator("softmax_unit_query", HEADS, 8)
    assert_close(operator(3 * query, key, value), operator(query, key, value))
