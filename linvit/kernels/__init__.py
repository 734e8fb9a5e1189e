"""Fused kernels of `linvit.ops.linear_attention`: for GPUs in Triton, for CPUs in C++ (`linvit.kernels.cpu`)."""

import torch
from torch import Tensor

from linvit.kernels import cpu as cpu
from linvit.kernels.support import obstacle as obstacle


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
