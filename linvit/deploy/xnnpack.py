"""Programs whose steps XNNPACK takes in few pieces: ExecuTorch's own operators between the pieces are slow."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn.functional import conv2d

aten = torch.ops.aten


def for_xnnpack(program: ExportedProgram) -> ExportedProgram:
    """The same program with `SIMPLER` steps, and with what depends on no input, such as rotations, as numbers."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    program = program.run_decompositions(SIMPLER)
    targets = {node.target for node in program.graph.nodes}
    # weights stay in 8 bits
    kept = {target for target in targets if getattr(target, "namespace", None) == "quantized_decomposed"}
    smaller: ExportedProgram = constant_prop_pass(program, custom_skip_targets=kept)
    return smaller


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
