"""Each fold against the two steps that it replaces, in float64."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linvit.fusion import folds

LAYERS = {
    "1x1": lambda: nn.Conv2d(6, 4, 1),
    "patches": lambda: nn.Conv2d(6, 4, 2, 2, bias=False),
    "groups": lambda: nn.Conv2d(6, 4, 1, groups=2),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_after_affine(kind):
    layer, x, scale, shift = LAYERS[kind]().double(), *_drawn((2, 6, 8, 10), (6,), (6,))
    expected = layer(x * scale[:, None, None] + shift[:, None, None])
    assert_close(folds.after_affine(layer, scale, shift)(x), expected)


def test_scaled_without_bias():
    layer, x, scale = nn.Linear(6, 4, bias=False).double(), *_drawn((2, 6), (4,))
    expected = layer(x) * scale
    assert_close(folds.scaled(layer, scale)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_after_a_convolution(dtype):
    layer, x = nn.Conv2d(3, 8, 3, 2, 1), _drawn((2, 3, 11, 14))[0].to(dtype)
    layer.to(dtype)
    expected = nn.functional.gelu(layer(x))
    fused = folds.with_gelu(layer)
    with torch.inference_mode():
        assert fused(x).is_contiguous(memory_format=torch.channels_last)
        assert_close(fused(x), expected)


def test_norm_with_a_weight_and_no_bias():
    norm, layer, x = nn.LayerNorm(6, bias=False).double(), nn.Linear(6, 4).double(), _drawn((2, 6))[0]
    nn.init.normal_(norm.weight)
    expected = layer(norm(x))
    rest = folds.after_layer_norm(norm, [layer])
    assert rest.weight is None
    assert_close(layer(rest(x)), expected)


@pytest.mark.parametrize("size", [(5, 7), (1, 3)])
def test_depthwise_convolutions_as_one(size):
    tall, flat, square = (
        nn.Conv2d(4, 4, kernel, padding=tuple(side // 2 for side in kernel), groups=4).double()
        for kernel in ((11, 1), (1, 11), (3, 3))
    )
    (x,) = _drawn((2, 8, *size))
    first, second = x.chunk(2, dim=1)
    assert_close(folds.summed([tall, flat])(first), tall(first) + flat(first))
    beside = torch.cat((flat(first), square(second)), dim=1)
    assert_close(folds.side_by_side([flat, square])(x), beside)
    expected = first + square(first)
    assert_close(folds.with_identity(square)(first), expected)


def test_weights_keep_their_dtype():
    layer = folds.with_identity(nn.Conv2d(4, 4, 3, padding=1, groups=4).bfloat16())
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16


def _drawn(*shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]
