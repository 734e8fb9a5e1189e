"""Layers on channels-last maps, each in as few passes over memory as torch allows."""

import torch
from torch import Tensor, nn

from linvit.layers.convolutions import product, runs_on_onednn


def last(x: Tensor) -> Tensor:
    """(batch, channels, height, width) as (batch, height, width, channels): a view."""
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    """(batch, height, width, channels) as (batch, channels, height, width): a view."""
    return x.permute(0, 3, 1, 2)


def plus(fresh: Tensor, x: Tensor) -> Tensor:
    """x + fresh, written into `fresh`, which only this code may read."""
    return fresh.add_(x) if fresh.dtype == x.dtype else x + fresh


class Product(nn.Linear):
    """A linear layer followed by "gelu" or "none", in one pass of oneDNN where possible.

    F.linear writes the bias first and then adds to it, and GELU would be another pass.
    """

    def __init__(
        self, width: int, out_width: int, bias: bool = True, activation: str = "none", device: str | None = None
    ):
        super().__init__(width, out_width, bias, device=device)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if runs_on_onednn(x):
            return product(x, self.weight, self.bias, self.activation)
        out: Tensor = super().forward(x)
        return out if self.activation == "none" else _gelu(out)


class MapProduct(Product):
    """The same on a channels-last map (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return first(super().forward(last(x)))


class OnLast(nn.Module):
    """A layer that reads maps, applied to (batch, height, width, channels)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return last(self.layer(first(x)))


class GeluConv(nn.Conv2d):
    """A convolution followed by GELU, in one pass of oneDNN where possible."""

    def forward(self, x: Tensor) -> Tensor:
        if runs_on_onednn(x):
            window = (self.padding, self.stride, self.dilation)
            fused: Tensor = torch.ops.mkldnn._convolution_pointwise(
                x, self.weight, self.bias, *window, self.groups, "gelu", [], "none"
            )
            return fused
        return _gelu(super().forward(x))


def _gelu(fresh: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.gelu_(fresh)
    return out
