"""Steps on maps whose channels come last in memory, each in as few passes as torch has."""

import torch
from torch import Tensor, nn


def last(x: Tensor) -> Tensor:
    """(batch, channels, height, width) as (batch, height, width, channels): a view."""
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    """(batch, height, width, channels) as (batch, channels, height, width): a view."""
    return x.permute(0, 3, 1, 2)


class Product(nn.Linear):
    """A linear layer that takes oneDNN's product where it can: F.linear writes the bias first and adds to it."""

    def forward(self, x: Tensor) -> Tensor:
        if _runs_on_onednn(x):
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return super().forward(x)


class Gelu(nn.Module):
    """GELU that writes over its input, which nobody else may read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_(x)


def _runs_on_onednn(x: Tensor) -> bool:
    """Whether this is plain inference on a CPU: no compiler, no gradient, no autocast."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled("cpu")
    )
