import pytest
import torch
from torch.nn.functional import conv2d

from linvit.layers.convolutions import PointwiseConv


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


def operators(layer, x):
    """The names of the operators that compute the layer."""
    with torch.profiler.profile() as profile:
        layer(x)
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_float32_product_runs_on_onednn(threads):
    """In training, torch convolves with oneDNN from 16 images on, and smaller batches only with several threads."""
    layer = PointwiseConv(6, 10)
    small, large = (torch.randn(batch, 6, 5, 7).to(memory_format=torch.channels_last) for batch in (2, 16))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            assert "mkldnn::_linear_pointwise" in operators(layer, small)
            assert "aten::convolution" in operators(layer, small.contiguous())
            with torch.autocast("cpu", torch.bfloat16):
                assert "mkldnn::_linear_pointwise" not in operators(layer, small)
        assert "aten::mkldnn_convolution" in operators(layer, large)
        assert ("aten::mkldnn_convolution" in operators(layer, small)) == (threads > 1)
        assert "aten::_slow_conv2d_forward" not in operators(layer, small)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [2, 16])
def test_float32_maps_have_the_outputs_and_gradients_of_float64(batch):
    layer, x = PointwiseConv(24, 40), torch.randn(batch, 24, 5, 7).to(memory_format=torch.channels_last)
    wide = PointwiseConv(24, 40, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wide(x.double()).float())
    grads = []
    for each in (layer, wide):
        inputs = x.to(each.weight.dtype).requires_grad_()
        out = each(inputs)
        assert out.is_contiguous(memory_format=torch.channels_last)
        grads.append(torch.autograd.grad(out.square().sum(), (inputs, each.weight, each.bias)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)


def test_exports():
    layer, x = PointwiseConv(6, 10), torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_a_layer_of_its_class_can_be_built_as_a_convolution():
    """As libraries do that put an adapter of the same class next to it."""
    layer = PointwiseConv(6, 4, (1, 1), (1, 1), (0, 0), bias=False, dtype=torch.float64)
    assert layer.bias is None
    assert layer(torch.randn(1, 6, 5, 7, dtype=torch.float64)).shape == (1, 4, 5, 7)
