import pytest
import torch
from torch.testing import assert_close

from linvit.layers import Interaction, TokenMixer


def reach(layer, channels, side=15):
    """How far the middle output of the first image sees: for every input channel the sides of the seen rectangle."""
    x = torch.randn(2, channels, side, side, dtype=torch.float64, requires_grad=True)
    layer(x)[0, :, side // 2, side // 2].sum().backward()
    seen = x.grad[0].ne(0)
    return [(int(channel.any(1).sum()), int(channel.any(0).sum()), int(channel.sum())) for channel in seen]


ALL, STRIPS, LOCAL3, LOCAL7 = (15, 15, 225), (11, 11, 21), (3, 3, 9), (7, 7, 49)


@pytest.mark.parametrize(
    ("mechanism", "split", "local_sizes", "expected"),
    [
        ("strips", "asymmetric", (3, 7), [STRIPS] * 4 + [LOCAL3] * 4 + [LOCAL7] * 4),
        ("linear", "asymmetric", (3, 7), [ALL] * 4 + [LOCAL3] * 4 + [LOCAL7] * 4),
        ("linear", "symmetric", (3, 7), [ALL] * 6 + [LOCAL3] * 3 + [LOCAL7] * 3),
        ("linear", "attended", (3, 7), [ALL] * 12),
        ("strips", "attended", (3, 7), [STRIPS] * 12),
        ("linear", "asymmetric", (3,), [ALL] * 4 + [LOCAL3] * 8),
        ("linear", "asymmetric", (7,), [ALL] * 4 + [LOCAL7] * 8),
        ("linear", "symmetric", [7], [ALL] * 6 + [LOCAL7] * 6),
        ("linear", "stacked", (3, 7), [ALL] * 12),
    ],
)
def test_parts_see_as_far_as_they_should(mechanism, split, local_sizes, expected):
    torch.manual_seed(0)
    assert reach(TokenMixer(12, 2, mechanism, split, local_sizes, dtype=torch.float64), 12) == expected


def test_stacked_sends_all_channels_through_everything():
    torch.manual_seed(0)
    layer = TokenMixer(4, 2, "linear", "stacked")
    x = torch.randn(2, 4, 5, 6)
    assert_close(layer(x), layer.attended(layer.local7(layer.local3(x))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 2, "linear", "halves"), "`split` is 'halves', expected one of asymmetric, symmetric, stacked, attended"),
        ((12, 2, "linear", "asymmetric", (5,)), r"`local_sizes` is \(5,\), expected \(3, 7\), \(3,\) or \(7,\)"),
        ((8, 2, "strips"), "8 feature channels cannot be divided by `split` 'asymmetric'"),
        ((6, 1, "strips", "symmetric"), "6 feature channels cannot be divided by `split` 'symmetric'"),
    ],
)
def test_impossible_splits(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenMixer(*arguments)


def test_attended_part_is_linear_attention_with_the_input_as_value():
    torch.manual_seed(0)
    layer = TokenMixer(24, 4, "linear", dtype=torch.float64).attended
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    query, key = (part.flatten(2).mT for part in layer.qk(x).split(8, dim=1))
    value = x.flatten(2).mT
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        q, k = (torch.nn.functional.elu(part[..., head]) + 1 for part in (query, key))
        scores = q @ k.mT
        heads.append(scores @ value[..., head] / (scores.sum(-1, keepdim=True) + 15e-6))
    assert_close(layer(x), torch.cat(heads, dim=-1).mT.unflatten(2, (3, 5)))


def test_head_width_that_does_not_divide():
    with pytest.raises(ValueError, match="width 8 of the attended channels is not a multiple of `head_width` 3"):
        TokenMixer(24, 3, "linear")
    TokenMixer(24, 3, "strips")


@pytest.mark.parametrize("training", [False, True])
def test_interaction_adds_its_input_only_with_the_projection(training):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 5)
    layer = Interaction(6, 2).train(training)
    assert layer(x).shape == x.shape
    torch.nn.init.zeros_(layer.fc2.weight)
    torch.nn.init.zeros_(layer.fc2.bias)
    assert_close(layer(x), x)
    assert Interaction(6, 2, project=False).train(training)(x).shape == (2, 12, 4, 5)


@pytest.mark.parametrize("mechanism", ["linear", "strips"])
def test_autocast_reaches_forward_and_backward(mechanism):
    torch.manual_seed(0)
    layer = TokenMixer(12, 2, mechanism)
    x = torch.randn(2, 12, 9, 7, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert_close(out.float(), layer(x), atol=0.05, rtol=0.05)
