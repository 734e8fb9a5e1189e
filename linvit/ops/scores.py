"""The explicit score matrix by which linear attention multiplies the values.

Quadratic in the tokens: used by the analyses, and as the reference in tests.
"""

from typing import Any

import torch
from torch import Tensor

from linvit.formulas.feature_map import FeatureMap
from linvit.formulas.normalizer import Normalizer
from linvit.ops.bidirectional import mapped, rule_of, tokens_of
from linvit.ops.checks import check_call, check_mixing, weights_of
from linvit.ops.mixing import blocks_of
from linvit.ops.position import Rotary
from linvit.ops.state import Weighting, Weights, nonzero, token_weights


def attention_scores(
    query: Tensor,
    key: Tensor,
    *,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] = "elu1",
    weighting: str | Tensor | Weighting = "uniform",
    normalizer: str | Normalizer = "divide",
    rotary: Rotary | None = None,
    key_mask: Tensor | None = None,
    causal: bool | str = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    mixing: Tensor | None = None,
    blocks: tuple[int, int] | Tensor | None = None,
    grid: tuple[int, int] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The matrix A for which A @ value is `linear_attention(query, key, value, …)`.

    With num_ij = Rκ(q_i)·Rκ(k_j), A_ij = α_j·num_ij/(den_i + ε) for divide,
    α_j·[s·num_ij·(1 + 1/(s·den_i + ε)) - s·den_i] for magnitude, α_j·[s·num_ij + 1 - s·den_i] for subtract and
    α_j·num_ij for none
    (times the number of tokens for sum).

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads, tokens, width).
        feature_map, weighting, normalizer, rotary, key_mask, causal, block_size, cu_seqlens: as in `linear_attention`;
            entries between packed sequences are zero.
        mixing, blocks, grid, eps: as there.

    Returns:
        (batch, heads, queries, tokens), float32 (float64 for float64 inputs). Without rotation rows sum to one with
        divide, magnitude and subtract. Entries may be negative, except with divide and a positive feature map.

    Raises:
        ValueError: as `linear_attention`.
    """
    form: dict[str, Any] = {"rotary": rotary, "causal": causal, "block_size": block_size, "cu_seqlens": cu_seqlens}
    check_call(query, key, key, weighting=weighting, key_mask=key_mask, eps=eps, has_mixing=mixing is not None, **form)
    check_mixing(mixing, blocks, grid, query, key, causal=causal, block_size=block_size, cu_seqlens=cu_seqlens)
    if callable(weighting):
        weighting = weights_of(weighting, query, key, feature_map, key_mask)
    whole = not causal and cu_seqlens is None
    rule = rule_of(feature_map, weighting, normalizer, eps, query.dtype, None, whole and key_mask is None)
    tokens = tokens_of(query, key, key, key_mask, rotary, rule)
    (q, rq, k, rk, _), visible = mapped(tokens, rule), tokens.visible
    size = block_size if causal == "block" else None
    sees = None if whole else _seen(k.shape[-2], causal, size, cu_seqlens, k.device)
    if sees is None or isinstance(weighting, Tensor) or weighting == "uniform":
        weights = token_weights(weighting, q, k, visible)
    else:
        counted = sees if visible is None else sees & visible.unsqueeze(-2)
        shown = q if visible is None else q.masked_fill(~visible.unsqueeze(-1), 0)
        means = counted.to(rule.dtype) @ shown / counted.sum(-1, keepdim=True).clamp_min(1)
        factor = None if visible is None else visible.to(rule.dtype)
        weights = Weights(factor, q.shape[-1] ** -0.5 * (means * k).sum(-1))

    log_mass = k.new_zeros(k.shape[:-1])
    if weights.factor is not None:
        log_mass = log_mass + weights.factor.log()
    if weights.exponent is not None:
        log_mass = log_mass + weights.exponent
    rows = log_mass.unsqueeze(-2).expand(*log_mass.shape[:2], q.shape[-2], -1)
    if sees is not None:
        rows = rows.masked_fill(~sees, -torch.inf)
    blind = rows.isneginf().all(-1, keepdim=True)  # a row that sees no token has a softmax without a gradient
    rows = rows.masked_fill(blind, 0)
    alpha = rows.softmax(-1).masked_fill(blind, 0)
    mass = rows.logsumexp(-1, keepdim=True).exp().masked_fill(blind, 0)
    if mixing is not None:
        places = torch.arange(k.shape[-2], device=k.device)
        if block_size is None:
            of_token = blocks_of(key, mixing, blocks, grid, cu_seqlens).of_token()
        else:
            of_token = places // block_size
        alpha = alpha * mixing.to(rule.dtype)[..., of_token[:, None], of_token]
        share = alpha.sum(-1, keepdim=True)
        alpha, mass = alpha / nonzero(share), mass * share

    product = rq @ rk.mT
    num = (alpha * product).sum(-1, keepdim=True)
    den = num if rotary is None else (alpha * (q @ k.mT)).sum(-1, keepdim=True)
    gain, level = rule.normalizer(num, den, mass, q.shape[-1] ** -0.5, eps)
    return alpha * (gain * (product - num) + level)


def _seen(
    tokens: int, causal: bool | str, block_size: int | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor:
    """True where a token (row) sees another (column): of its sequence, and not in a later block."""
    place = torch.arange(tokens, device=device)
    sequence = torch.zeros_like(place)
    if cu_seqlens is not None:
        sequence = (cu_seqlens[1:, None] <= place).sum(0)
        place = place - cu_seqlens[sequence]
    sees = sequence[:, None] == sequence
    if not causal:
        return sees
    block = place if block_size is None else place // block_size
    return sees & (block[:, None] >= block)
