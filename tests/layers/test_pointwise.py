import pytest
import torch
from torch.nn.functional import conv2d

from linvit.layers.pointwise import PointwiseConv


@pytest.mark.parametrize("size", [(2, 6, 5, 7), (1, 6, 1, 1), (3, 6, 1, 4)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_output_gradients_and_memory_format_are_those_of_a_convolution(size, memory_format):
    layer = PointwiseConv(6, 10, dtype=torch.float64)
    x = torch.randn(size, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    found, expected = layer(x), conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.stride() == expected.stride() or 1 in size[2:]
    grad = torch.randn_like(expected)
    leaves = (x, layer.weight, layer.bias)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_it_is_a_product_where_channels_lie_innermost():
    layer, x = PointwiseConv(6, 10), torch.randn(2, 6, 5, 7)
    for memory_format, convolutions in ((torch.contiguous_format, 1), (torch.channels_last, 0)):
        with torch.profiler.profile() as profile:
            layer(x.to(memory_format=memory_format))
        assert sum(event.name == "aten::convolution" for event in profile.events()) == convolutions


def test_exports():
    layer, x = PointwiseConv(6, 10), torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_a_layer_of_its_class_can_be_built_as_a_convolution():
    """As libraries do that put an adapter of the same class next to it."""
    layer = PointwiseConv(6, 4, (1, 1), (1, 1), (0, 0), bias=False, dtype=torch.float64)
    assert layer.bias is None
    assert layer(torch.randn(1, 6, 5, 7, dtype=torch.float64)).shape == (1, 4, 5, 7)


@pytest.mark.parametrize("other", [{"kernel_size": 3}, {"stride": 2}, {"padding": (0, 1)}, {"groups": 2}], ids=str)
def test_other_convolutions_are_refused(other):
    with pytest.raises(ValueError, match=r"expected a 1×1 convolution: use nn\.Conv2d"):
        PointwiseConv(6, 4, **other)
