"""Fused kernels of `linvit.ops.linear_attention`: for GPUs in Triton, for CPUs in C++ (`linvit.kernels.cpu`).

And one for GPUs of the softmax attention of short sequences, with its rotation.
"""

import torch
from torch import Tensor

from linvit.kernels import cpu as cpu
from linvit.kernels.support import obstacle as obstacle
from linvit.kernels.support import softmax_obstacle as softmax_obstacle


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | tuple[str, str] = "elu1",
    weighting: str | Tensor = "uniform",
    normalizer: str = "divide",
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

    cos, sin = (None, None) if rotary is None else (table.float().contiguous() for table in rotary)
    maps = (feature_map, feature_map) if isinstance(feature_map, str) else feature_map
    weights = weighting.expand(key.shape[:3]).float() if isinstance(weighting, Tensor) else None
    inputs = query, key, value, cos, sin, weights
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    block = block_size or int(causal)
    options = *maps, weights is None and weighting == "query_mean", block, normalizer, eps, keep
    out: Tensor = attend(query, key, value, cos, sin, key_mask, weights, cu_seqlens, *options)[0]
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

    cos, sin = (None, None) if rotary is None else (table.float().contiguous() for table in rotary)
    visible = None if key_mask is None else key_mask[:, None].expand(key.shape[:3])
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    out: Tensor = attend_softmax(query, key, value, cos, sin, visible, keep)[0]
    return out
