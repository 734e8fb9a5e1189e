import torch
from torch.nn.functional import gelu
from torch.testing import assert_close

from linvit.layers import ConvFeedForward


def test_feed_forward_is_two_pointwise_layers_around_a_depthwise_residual():
    torch.manual_seed(0)
    layer = ConvFeedForward(6, 3.5, dtype=torch.float64)
    x = torch.randn(2, 6, 5, 3, dtype=torch.float64)
    hidden = gelu(torch.einsum("oc,bchw->bohw", layer.fc1.weight[..., 0, 0], x) + layer.fc1.bias[:, None, None])
    assert hidden.shape[1] == 21
    hidden = hidden + layer.dwconv(hidden)
    expected = torch.einsum("oc,bchw->bohw", layer.fc2.weight[..., 0, 0], hidden) + layer.fc2.bias[:, None, None]
    assert_close(layer(x), expected)


def test_depthwise_convolution_keeps_channels_apart():
    layer = ConvFeedForward(4, 2.0)
    assert layer.dwconv.weight.shape == (8, 1, 3, 3)
