"""Steps on maps whose channels come last in memory, each in as few passes as torch has."""

import torch
from torch import Tensor, nn


def last(x: Tensor) -> Tensor:
    """(batch, channels, height, width) as (batch, height, width, channels): a view."""
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    """(batch, height, width, channels) as (batch, channels, height, width): a view."""
    return x.permute(0, 3, 1, 2)


def plus(fresh: Tensor, x: Tensor) -> Tensor:
    """x + fresh, written over `fresh`, which nobody else may read."""
    return fresh.add_(x) if fresh.dtype == x.dtype else x + fresh


class Product(nn.Linear):
    """A linear layer, with GELU behind it or "none", in one pass of oneDNN where that can run.

    F.linear writes the bias first and adds to it; GELU is another pass.
    """

    def __init__(self, width: int, out_width: int, bias: bool = True, activation: str = "none", device=None):
        super().__init__(width, out_width, bias, device=device)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if _runs_on_onednn(x):
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.activation, [], "none")
        out = super().forward(x)
        return out if self.activation == "none" else torch.ops.aten.gelu_(out)


class MapProduct(Product):
    """The same on a map (batch, channels, height, width) whose channels come last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return first(super().forward(last(x)))


class OnLast(nn.Module):
    """A layer of maps, on (batch, height, width, channels)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return last(self.layer(first(x)))


class GeluConv(nn.Conv2d):
    """A convolution with GELU behind it, in one pass of oneDNN where that can run."""

    def forward(self, x: Tensor) -> Tensor:
        if _runs_on_onednn(x):
            window = (self.padding, self.stride, self.dilation)
            return torch.ops.mkldnn._convolution_pointwise(
                x, self.weight, self.bias, *window, self.groups, "gelu", [], "none"
            )
        return torch.ops.aten.gelu_(super().forward(x))


def _runs_on_onednn(x: Tensor) -> bool:
    """Whether this is plain inference on a CPU: no compiler, no gradient, no autocast."""
    return (
        not torch.compiler.is_compiling()  # first: the rest breaks the compiler's graph
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # like the convolution, not part of torch's public face
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled("cpu")
    )
