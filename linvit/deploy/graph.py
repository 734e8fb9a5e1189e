"""Programs that are written to files, such as that of uint8 pixels in, outputs of the network out."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from linvit.files import reason_of

POOLING = torch.ops.aten.adaptive_avg_pool2d.default
CUMMAX = torch.ops.aten.cummax.default
SMALLEST_DYNAMIC = 96  # pixels: where a map has one row, the graph would hold for one row alone


class OnPixels(nn.Module):
    """A network on uint8 images (batch, channels, height, width), which it normalizes itself.

    Args:
        network: reads normalized float32 images.
        mean, std: per channel in 0..1.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, std))
        self.register_buffer("scale", 1 / (255 * deviations))
        self.register_buffer("shift", -means / deviations)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = self.network(images.float() * self.scale + self.shift)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def sample(channels: int, size: tuple[int, int], dynamic: bool) -> Tensor:
    """Black images to export a network with: one of that size, or if the graph must hold for any, two large enough."""
    side = [length * ceil(SMALLEST_DYNAMIC / length) for length in size] if dynamic else list(size)  # whole patches
    return torch.zeros(2 if dynamic else 1, channels, *side, dtype=torch.uint8)


def exported(network: nn.Module, images: Tensor, dynamic: bool = False) -> ExportedProgram:
    """The program of a network for these images; with `dynamic` for any batch, height and width."""
    return traced(network, (images,), (dict.fromkeys((0, 2, 3), Dim.DYNAMIC),) if dynamic else None)


def traced(network: nn.Module, inputs: tuple[Tensor, ...], shapes: tuple[Any, ...] | None) -> ExportedProgram:
    """The program of a network for inputs like these; shapes: as `dynamic_shapes` of torch.export.

    No tensor may be given twice, because torch.export would take two inputs for one.
    """
    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()  # a channels-last weight is an error to XNNPACK
    try:
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`create_unbacked_symint`", FutureWarning)  # torchvision's suppression
            program = torch.export.export(network, inputs, dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises errors of many classes
        way = " for any size: set `dynamic=False`" if shapes else ": torch.export must be able to follow it"
        raise ValueError(f"The network cannot be exported{way} ({reason_of(error)}).") from error
    targets = {node.target for node in program.graph.nodes if node.target is not POOLING or max(node.args[1]) > 1}
    if shapes and (missing := {target: by for target, by in WITHOUT_ONNX.items() if target in targets}):
        program = program.run_decompositions(missing)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def pooled(x: Tensor, cells: Sequence[int]) -> Tensor:
    """Means over a grid of (rows, columns) cells by two products: ONNX has no pooling of any size to a grid."""
    rows, columns = (_means(length, count, x) for length, count in zip(x.shape[-2:], cells, strict=True))
    return rows @ x @ columns.mT


def _means(length: int, count: int, like: Tensor) -> Tensor:
    """(count, length): the weights with which each cell reads the positions, as in adaptive average pooling."""
    cell = torch.arange(count, device=like.device)[:, None]
    position = torch.arange(length, device=like.device)
    inside = (position >= cell * length // count) & (position < ((cell + 1) * length + count - 1) // count)
    return inside.to(like.dtype) / inside.sum(1, keepdim=True)


def running_maximum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Tensor.cummax by a matrix of the entries that each one sees: few, and ONNX has no other."""
    x = x.movedim(dim, -1)
    later = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    values, places = x.unsqueeze(-2).masked_fill(later, -torch.inf).max(-1)
    return values.movedim(-1, dim), places.movedim(-1, dim)


WITHOUT_ONNX: Mapping[Any, Callable[..., Any]] = {POOLING: pooled, CUMMAX: running_maximum}
"""Operators that ONNX does not have for any size, and what is computed instead."""
