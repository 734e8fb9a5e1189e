"""Linear layers and convolutions with what surrounds them: in one launch on a GPU, or in plain torch."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.ops.backend import product_kernels_for

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "gelu": F.gelu, "silu": F.silu}


def surrounded(
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
    """As `linvit.kernels.surrounded_product`, by it where possible, of any number of maps and with gradients."""
    kernels = product_kernels_for(inputs[0])
    if kernels is not None and not torch.is_autocast_enabled(inputs[0].device.type):
        others = (*residual, added)
        if kernels.product_obstacle(inputs, weight, others, stride, padding) is None:
            around = {"residual": residual, "scale": scale, "added": added, "stride": stride, "padding": padding}
            out: Tensor = kernels.surrounded_product(inputs, weight, bias, eps=eps, activation=activation, **around)
            return out
    x = beside(inputs)
    if eps is not None:
        x = F.layer_norm(x, x.shape[-1:], eps=eps)
    if weight.dim() == 2:
        y = F.linear(x, weight, bias)
    else:
        y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding).permute(0, 2, 3, 1)
    y = ACTIVATIONS[activation](y)
    if residual:
        y = y + beside(residual) if scale is None else y + beside(residual) * scale
    return y if added is None else y + added


def beside(maps: Sequence[Tensor]) -> Tensor:
    """Maps whose channels come last, side by side."""
    return maps[0] if len(maps) == 1 else torch.cat(tuple(maps), dim=-1)
