"""Fused kernels of `linvit.ops.linear_attention`: for GPUs in Triton, for CPUs in C++ (`linvit.kernels.cpu`).

And for GPUs the softmax attention of short sequences, with its rotation, depthwise convolutions, and products with
what surrounds them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linvit.formulas import Formula
from linvit.kernels import cpu as cpu
from linvit.kernels.support import depthwise_obstacle as depthwise_obstacle
from linvit.kernels.support import obstacle as obstacle
from linvit.kernels.support import padded
from linvit.kernels.support import product_obstacle as product_obstacle
from linvit.kernels.support import softmax_obstacle as softmax_obstacle

Map = str | Formula  # a feature map or normalizer


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: tuple[Map, Map] = ("elu1", "elu1"),
    weighting: str | Tensor = "uniform",
    normalizer: Map = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    blocks: tuple[Tensor, Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`linvit.ops.linear_attention` on arguments that it has checked and for which `obstacle` returns None.

    Query, key, value, mixing and tensors of formulas get first derivatives, and if not causal weights and rotary
    tables. Sums have a fixed order, so results are the same in every run.

    Args:
        query, key, value, weighting, rotary, causal, block_size, cu_seqlens, eps: as there.
        feature_map, normalizer: names, or formulas in place of functions.
        key_mask: True where a token counts, (batch, heads, tokens).
        blocks: the tokens block by block, int64 (tokens,); where blocks begin among them, and their number, int64
            (blocks + 1,); and the mixing, (blocks, blocks) or (heads, blocks, blocks).

    Returns:
        (batch, heads, queries, value width) in the inputs' dtype and the values' order in memory; by blocks, heads
        inside tokens.
    """
    from linvit.kernels.operator import attend  # Triton is optional

    weights = weighting.expand(key.shape[:3]).float() if isinstance(weighting, Tensor) else None
    names, parameters = _named(query, (*feature_map, normalizer), eps)
    block, by_mean = block_size or int(causal), isinstance(weighting, str) and weighting == "query_mean"
    tables = _tables(rotary)
    if blocks is not None:
        from linvit.kernels.blocks import attention

        return attention(query, key, value, blocks, tables, key_mask, *parameters, *names, eps)
    keep = _needs_gradients(query, key, value, *tables, weights, *parameters)
    seen = *tables, key_mask, weights, cu_seqlens, *parameters
    out: Tensor = attend(query, key, value, *seen, *names[:2], by_mean, block, names[2], eps, keep)[0]
    return out


def packed_linear_attention(
    projections: Tensor,
    *,
    feature_map: tuple[Map, Map] = ("elu1", "elu1"),
    weighting: str = "uniform",
    normalizer: Map = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The same of (batch, tokens, 3, heads, width), with one gradient that is written in this form.

    Returns:
        (batch, heads, tokens, width) in the inputs' dtype; heads lie inside tokens.
    """
    from linvit.kernels.operator import attend_packed

    query = projections.permute(2, 0, 3, 1, 4)[0]
    names, parameters = _named(query, (*feature_map, normalizer), eps)
    block, by_mean = block_size or int(causal), weighting == "query_mean"
    tables = _tables(rotary)
    keep = _needs_gradients(projections, *tables, *parameters)
    seen = *tables, key_mask, None, cu_seqlens, *parameters
    out: Tensor = attend_packed(projections, *seen, *names[:2], by_mean, block, names[2], eps, keep)[0]
    return out


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention of queries and keys that it rotates, for arguments for which `softmax_obstacle` returns None.

    Query, key and value get first derivatives. Sums have a fixed order, so results are the same in every run.

    Args:
        query, key, value: (batch, heads, tokens, width), in one dtype; queries and values may have other lengths and
            widths of their own.
        rotary: cosines and sines, each (tokens, width / 2), of queries and keys; None leaves both as they are.
        key_mask: True where a key counts, (batch, keys). A query that sees none gets zeros.

    Returns:
        (batch, heads, queries, value width) in the inputs' dtype and the values' order in memory.
    """
    from linvit.kernels.operator import attend_softmax  # Triton is optional

    visible = None if key_mask is None else key_mask[:, None].expand(key.shape[:3])
    keep = _needs_gradients(query, key, value)
    out: Tensor = attend_softmax(query, key, value, *_tables(rotary), visible, keep)[0]
    return out


def depthwise_convolutions(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    groups: Sequence[int] = (1,),
    y: Tensor | None = None,
    gate: Tensor | None = None,
    gelu: bool = False,
    residual: bool = False,
) -> Tensor:
    """(y + h + convolutions of h) · gate, h = GELU(x) or x, for arguments for which `depthwise_obstacle` returns None.

    One launch for all groups of channels. All tensors get first derivatives; sums have a fixed order, so results are
    the same in every run.

    Args:
        x: (batch, channels, height, width), channels innermost in memory, other strides arbitrary.
        weights: (channels of its group, 1, height, width) each, with odd sizes; zeros around the map. The results of
            two weights of one group are added.
        biases: one for each weight, (channels of its group,), or none at all.
        groups: how many weights each group of channels has, one or two.
        y: added; the same shape as x, or None.
        gate: multiplies everything; the same shape as x, or None.
        gelu: take the exact GELU of x first.
        residual: add h.

    Returns:
        The shape and dtype of x, channels innermost.
    """
    from linvit.kernels.depthwise_launch import depthwise  # Triton is optional

    out: Tensor = depthwise(x, weights, biases, y, gate, groups, gelu, residual)
    return out


def surrounded_product(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, **around: Any) -> Tensor:
    """`linvit.layers.product.composed` in one launch, for arguments for which `product_obstacle` returns None.

    Without gradients. Sums are float32 and have a fixed order, so results are the same in every run. A norm needs one
    map and a linear layer, inputs side by side a linear layer.
    """
    from linvit.kernels.product_launch import surrounded  # Triton is optional

    nothing = {
        "eps": None,
        "activation": "none",
        "residual": (),
        "scale": None,
        "added": None,
        "stride": 1,
        "padding": 0,
    }
    out: Tensor = surrounded(inputs, weight, bias, *(nothing | around).values())
    return out


def _named(
    query: Tensor, formulas: tuple[Map, Map, Map], eps: float
) -> tuple[tuple[str, ...], tuple[Tensor | None, ...]]:
    """Two feature maps and a normalizer by the names that the operator knows, and their parameters."""
    if all(isinstance(given, str) for given in formulas):
        return formulas, (None, None, None)  # type: ignore[return-value]
    from linvit.kernels.device_code import name_of

    heads, width = query.shape[1], query.shape[-1]
    names: list[str] = []
    parameters: list[Tensor | None] = []
    for given in formulas:
        if isinstance(given, str):
            names.append(given)
            parameters.append(None)
        else:
            names.append(name_of(given))
            parameters.append(given.parameter_rows(heads, width, padded(width), eps))
    return tuple(names), tuple(parameters)


def _tables(rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if rotary is None:
        return None, None
    cos, sin = rotary
    return cos.float().contiguous(), sin.float().contiguous()


def _needs_gradients(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
