"""Fused kernels of `linvit.ops.linear_attention`: for GPUs in Triton, for CPUs in C++ (`linvit.kernels.cpu`).

And one for GPUs of the softmax attention of short sequences, with its rotation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linvit.formulas import formula_of
from linvit.kernels import cpu as cpu
from linvit.kernels.support import obstacle as obstacle
from linvit.kernels.support import softmax_obstacle as softmax_obstacle

Map = str | Callable[..., Any]  # a feature map or normalizer


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: Map | tuple[Map, Map] = "elu1",
    weighting: str | Tensor = "uniform",
    normalizer: Map = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`linvit.ops.linear_attention` on arguments that it has checked and for which `obstacle` returns None.

    Query, key and value get first derivatives, and if not causal weights and rotary tables. Sums have a fixed order, so
    results are the same in every run.

    Args:
        query, key, value, feature_map, weighting, normalizer: as there.
        rotary, causal, block_size, cu_seqlens, eps: as there.
        key_mask: True where a token counts, (batch, heads, tokens).

    Returns:
        (batch, heads, queries, value width) in the inputs' dtype and the values' order in memory.
    """
    from linvit.kernels.operator import attend  # Triton is optional

    weights = weighting.expand(key.shape[:3]).float() if isinstance(weighting, Tensor) else None
    rule = _rule(query, feature_map, weighting, block_size or int(causal), normalizer, eps)
    tables = _tables(rotary)
    keep = _needs_gradients(query, key, value, *tables, weights)
    out: Tensor = attend(query, key, value, *tables, key_mask, weights, cu_seqlens, *rule, keep)[0]
    return out


def packed_linear_attention(
    projections: Tensor,
    *,
    feature_map: Map | tuple[Map, Map] = "elu1",
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

    rule = _rule(
        projections.permute(0, 3, 1, 2, 4)[:, :, :, 0],
        feature_map,
        weighting,
        block_size or int(causal),
        normalizer,
        eps,
    )
    tables = _tables(rotary)
    keep = _needs_gradients(projections, *tables)
    out: Tensor = attend_packed(projections, *tables, key_mask, None, cu_seqlens, *rule, keep)[0]
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


def _rule(
    query: Tensor, feature_map: Map | tuple[Map, Map], weighting: str | Tensor, block: int, normalizer: Map, eps: float
) -> tuple[str, str, bool, int, str, float]:
    """The arguments of the operator, which knows functions by the names of their formulas."""
    from linvit.kernels.device_code import name_of

    def name(given: Map, width: int | None) -> str:
        if isinstance(given, str):
            return given
        return name_of(formula_of(given, query.shape[1], width, query.device))

    query_map, key_map = feature_map if isinstance(feature_map, tuple | list) else (feature_map, feature_map)
    maps = name(query_map, query.shape[-1]), name(key_map, query.shape[-1])
    by_mean = isinstance(weighting, str) and weighting == "query_mean"
    return *maps, by_mean, block, name(normalizer, None), eps


def _tables(rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if rotary is None:
        return None, None
    cos, sin = rotary
    return cos.float().contiguous(), sin.float().contiguous()


def _needs_gradients(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
