"""Linear layers and convolutions with what surrounds them: in one launch on a GPU, or in plain torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.ops.backend import product_kernels_for

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "gelu": F.gelu, "silu": F.silu}


def surrounded(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, **around: Any) -> Tensor:
    """`composed`, in one launch of linvit's kernel where it can be used."""
    kernels = None if torch.is_autocast_enabled(inputs[0].device.type) else product_kernels_for(inputs[0])
    if kernels is None or kernels.product_obstacle(inputs, weight, **around) is not None:
        return composed(inputs, weight, bias, **around)
    out: Tensor = kernels.surrounded_product(inputs, weight, bias, **around)
    return out


def composed(
    inputs: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float | None = None,
    activation: str = "none",
    residual: Sequence[Tensor] = (),
    scale: Tensor | None = None,
    added: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
) -> Tensor:
    """activation(norm(x) · weight + bias) + residual · scale + added, in plain torch.

    Args:
        inputs: x (batch, height, width, channels), or maps whose channels side by side are those of x.
        weight: (channels out, channels) of a linear layer, or (channels out, channels, height, width) of a convolution.
        bias, scale: (channels out,).
        eps: of a layer norm without weights over the channels of x; None for no norm.
        activation: a key of ACTIVATIONS.
        residual: maps that have the channels of the output, side by side.
        added: another map of the output's shape.
        stride, padding: of a convolution.

    Returns:
        (batch, height, width, channels out).
    """
    x = beside(inputs)
    if eps is not None:
        x = F.layer_norm(x, x.shape[-1:], eps=eps)
    if weight.dim() == 2:
        y = F.linear(x, weight, bias)
    else:
        y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding).permute(0, 2, 3, 1)
    y = ACTIVATIONS[activation](y)
    if residual:
        y = y + (beside(residual) if scale is None else beside(residual) * scale)
    return y if added is None else y + added


def beside(maps: Sequence[Tensor]) -> Tensor:
    """Maps whose channels come last, side by side."""
    return maps[0] if len(maps) == 1 else torch.cat(tuple(maps), dim=-1)
