"""Linear layers and convolutions of our networks with what surrounds them: how far the kernel is from float64."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from linvit.bench.depthwise import OF_GELU
from linvit.bench.exactness import Deviation, error_in, relative_error
from linvit.kernels import surrounded_product
from linvit.layers.product import composed


class Layer(NamedTuple):
    """A layer and what surrounds it.

    Attributes:
        inputs, residual: channels of maps that lie side by side.
        out: channels of the output.
        kernel, stride, padding: of a convolution; a linear layer has a kernel of 1.
        norm: whether a norm comes before.
        activation: as of `linvit.kernels.surrounded_product`.
        scaled, added: whether a layer scale multiplies the residual, and whether another map is added.
    """

    inputs: tuple[int, ...]
    out: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    norm: bool = False
    activation: str = "none"
    residual: tuple[int, ...] = ()
    scaled: bool = False
    added: bool = False


LAYERS = {
    "norm and projections": Layer((64,), 256, norm=True),
    "norm and GELU": Layer((48,), 168, norm=True, activation="gelu"),
    "sum": Layer((224,), 64, residual=(64,)),
    "groups and GELU": Layer((16, 32), 96, activation="gelu"),
    "groups and sum": Layer((96,), 48, residual=(16, 32)),
    "groups, layer scale and sum": Layer((256,), 64, residual=(16, 48), scaled=True, added=True),
    "first convolution and GELU": Layer((3,), 32, 3, 2, 1, activation="gelu"),
    "patches": Layer((3,), 32, 4, 4),
    "convolution": Layer((32,), 64, 3, 2, 1),
    "last layer and SiLU": Layer((72,), 130, activation="silu"),
}
EPS = 1e-6


def operands(layer: Layer, shape: tuple[int, int, int], device: torch.device | str) -> dict[str, Any]:
    """Random arguments of `composed` in float32; shape: images, height and width. Maps are parts of wider ones."""
    batch, height, width = shape
    out_size = [(side + 2 * layer.padding - layer.kernel) // layer.stride + 1 for side in (height, width)]

    def draw(channels: int, size: Sequence[int], parts: int = 1) -> Tensor:
        return torch.randn(batch, *size, parts * channels, device=device)[..., :channels]

    parts, channels = (1 if layer.kernel > 1 else 2), sum(layer.inputs)
    weight = torch.randn(layer.out, channels, layer.kernel, layer.kernel, device=device)
    weight *= (channels * layer.kernel**2) ** -0.5
    return {
        "inputs": [draw(count, (height, width), parts) for count in layer.inputs],
        "weight": weight.to(memory_format=torch.channels_last) if layer.kernel > 1 else weight.flatten(1),
        "bias": torch.randn(layer.out, device=device),
        "eps": EPS if layer.norm else None,
        "activation": layer.activation,
        "residual": [draw(count, out_size, 2) for count in layer.residual],
        "scale": torch.randn(layer.out, device=device) if layer.scaled else None,
        "added": draw(layer.out, out_size) if layer.added else None,
        "stride": layer.stride,
        "padding": layer.padding,
    }


def cast_to(dtype: torch.dtype, given: dict[str, Any]) -> dict[str, Any]:
    """The same in another dtype."""
    return tree_map_only(Tensor, lambda x: x.to(dtype), given)


def kernel(given: dict[str, Any]) -> Tensor:
    """By the kernel, in one launch."""
    return surrounded_product(**given)


def deviation_of(layer: Layer, given: dict[str, Any], dtype: torch.dtype) -> Deviation:
    """The error of the kernel in a dtype, and twice that of plain torch.

    Plain torch rounds more often in half precision, and sums in another order; nothing is better than one rounding of
    the result. The kernel's GELU adds the error of its approximation.
    """
    rounded = cast_to(dtype, given)
    exact, ours, torchs = composed(**cast_to(torch.float64, rounded)), kernel(rounded), composed(**rounded)
    allowed = 2 * max(relative_error(torchs, exact), torch.finfo(dtype).eps / 2)
    allowed += OF_GELU if layer.activation == "gelu" else 0.0
    return Deviation("output", error_in(dtype, ours, exact), allowed)
