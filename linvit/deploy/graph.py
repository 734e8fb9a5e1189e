"""Programs that are written to files, and what is computed instead of operators that a runtime does not have."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.functional import conv2d

from linvit.files import explained

aten = torch.ops.aten
POOLING, CUMMAX = aten.adaptive_avg_pool2d.default, aten.cummax.default
SMALLEST_DYNAMIC = 96  # pixels: where a map has one row, the graph would hold for one row alone


class OnPixels(nn.Module):
    """A network on uint8 images (batch, channels, height, width), normalized by mean and std per channel in 0..1."""

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
    way = " for any size: set `dynamic=False`" if shapes else ": torch.export must be able to follow it"
    with (
        explained(lambda reason: f"The network cannot be exported{way} ({reason})."),
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "`create_unbacked_symint`", FutureWarning)  # torchvision's suppression
        program = torch.export.export(network, inputs, dynamic_shapes=shapes)
    targets = {node.target for node in program.graph.nodes if node.target is not POOLING or max(node.args[1]) > 1}
    if shapes and (missing := {target: by for target, by in WITHOUT_ONNX.items() if target in targets}):
        program = program.run_decompositions(missing)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def pooled(x: Tensor, cells: Sequence[int]) -> Tensor:
    """Means over a grid of (rows, columns) cells by two products: ONNX has no pooling of any size to a grid."""
    means = []  # (cells, positions): the weights with which each cell reads them, as in adaptive average pooling
    for length, count in zip(x.shape[-2:], cells, strict=True):
        cell = torch.arange(count, device=x.device)[:, None]
        position = torch.arange(length, device=x.device)
        inside = (position >= cell * length // count) & (position < ((cell + 1) * length + count - 1) // count)
        means.append(inside.to(x.dtype) / inside.sum(1, keepdim=True))
    rows, columns = means
    return rows @ x @ columns.mT


def running_maximum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Tensor.cummax by a matrix of the entries that each one sees: few, and ONNX has no other."""
    x = x.movedim(dim, -1)
    later = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    values, places = x.unsqueeze(-2).masked_fill(later, -torch.inf).max(-1)
    return values.movedim(-1, dim), places.movedim(-1, dim)


WITHOUT_ONNX: Mapping[Any, Callable[..., Any]] = {POOLING: pooled, CUMMAX: running_maximum}
"""Operators that ONNX does not have for any size, and what is computed instead."""


# XNNPACK takes the steps of a program in pieces; ExecuTorch's own operators between the pieces are slow.


def for_xnnpack(program: ExportedProgram) -> ExportedProgram:
    """The same program with `SIMPLER` steps, and with what depends on no input, such as rotations, as numbers."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    program = program.run_decompositions(SIMPLER)
    targets = {node.target for node in program.graph.nodes}
    # weights stay in 8 bits
    kept = {target for target in targets if getattr(target, "namespace", None) == "quantized_decomposed"}
    return constant_prop_pass(program, custom_skip_targets=kept)


def mean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """A mean over the channels of maps is a convolution, and one over the last dimension a product."""
    if dtype is None and keepdim and dim is not None and len(dim) == 1:
        along = dim[0] % x.dim()
        if along == x.dim() - 1:
            return x @ torch.full((x.shape[-1], 1), 1 / x.shape[-1], dtype=x.dtype)
        if (along, x.dim()) == (1, 4):
            return conv2d(x, torch.full((1, x.shape[1], 1, 1), 1 / x.shape[1], dtype=x.dtype))
    return NotImplemented


def matmul(a: Tensor, b: Tensor) -> Any:
    """A product of matrices that are copied only where there are fewer of them on one side."""
    if min(a.dim(), b.dim()) < 2 or max(a.dim(), b.dim()) == 2:
        return NotImplemented
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x if x.shape[:-2] == leading else x.expand(*leading, *x.shape[-2:]) for x in (a, b))
    product = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    return product.reshape(*leading, *product.shape[-2:])


def reciprocal(x: Tensor) -> Tensor:
    """1/x as a division."""
    return torch.ones(1, dtype=x.dtype) / x


def rows(x: Tensor, dim: int, index: Tensor) -> Any:
    """Rows of matrices in another order: a product with a matrix of zeros and ones."""
    if dim % x.dim() != x.dim() - 2 or index.shape[0] != x.shape[-2]:
        return NotImplemented
    order = (index[:, None] == torch.arange(x.shape[-2])).to(x.dtype)
    return matmul(order.expand(*x.shape[:-2], -1, -1), x)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention without a mask needs no search for rows in which every score is masked."""
    if attn_mask is not None or dropout_p or is_causal or enable_gqa or query.shape[:-2] != key.shape[:-2]:
        return NotImplemented
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return matmul(matmul(query * scale, key.mT).softmax(-1), value)


SIMPLER: dict[Any, Callable[..., Any]] = {
    aten.mean.dim: mean,
    aten.matmul.default: matmul,
    aten.index_select.default: rows,
    aten.reciprocal.default: reciprocal,
    aten.scaled_dot_product_attention.default: softmax_attention,
}
"""Operators that XNNPACK does not know, or that torch writes as many steps, and what is computed instead.

NotImplemented leaves the operator as it is.
"""
