"""The explicit score matrix by which linear attention multiplies the values.

Quadratic in the tokens: used by the analyses, and as the reference in tests.
"""

import torch
from torch import Tensor

from linvit.ops.checks import check_call
from linvit.ops.feature_map import FeatureMap, query_and_key_map
from linvit.ops.normalizer import Normalizer, resolve_normalizer
from linvit.ops.position import Rotary, rotate
from linvit.ops.state import accumulator_dtype
from linvit.ops.weighting import causal_token_weights, token_weights, visible_tokens


def attention_scores(
    query: Tensor,
    key: Tensor,
    *,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] = "elu1",
    weighting: str | Tensor = "uniform",
    normalizer: str | Normalizer = "divide",
    rotary: Rotary | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
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
        feature_map, weighting, normalizer, rotary, key_mask, causal, eps: as in `linear_attention`.

    Returns:
        (batch, heads, queries, tokens), float32 (float64 for float64 inputs). Without rotation rows sum to one with
        divide, magnitude and subtract. Entries may be negative, except with divide and a positive feature map.

    Raises:
        ValueError: as `linear_attention`.
    """
    check_call(query, key, key, weighting=weighting, rotary=rotary, key_mask=key_mask, causal=causal, eps=eps)
    query_map, key_map = query_and_key_map(feature_map, every_token_counts=not causal and key_mask is None)
    normalize = resolve_normalizer(normalizer)
    dtype = accumulator_dtype(query.dtype)
    visible = None if key_mask is None else visible_tokens(key_mask, key)
    if visible is not None:
        key = key.masked_fill(~visible.unsqueeze(-1), 0)
    q, k = query_map(query.to(dtype)), key_map(key.to(dtype))
    if causal:
        nothing_read = torch.zeros_like(q[..., 0, :]), torch.zeros_like(q[..., 0, 0])
        weights, *_ = causal_token_weights(weighting, q, k, visible, *nothing_read)
    else:
        weights = token_weights(weighting, q, k, visible)

    log_mass = k.new_zeros(k.shape[:-1])
    if weights.factor is not None:
        log_mass = log_mass + weights.factor.log()
    if weights.exponent is not None:
        log_mass = log_mass + weights.exponent
    rows = log_mass.unsqueeze(-2).expand(*log_mass.shape[:2], q.shape[-2], -1)
    if causal:
        later = torch.ones(rows.shape[-2:], dtype=torch.bool, device=rows.device).triu(1)
        rows = rows.masked_fill(later, -torch.inf)
    alpha = rows.softmax(-1).nan_to_num(0)
    mass = rows.logsumexp(-1, keepdim=True).exp()

    rq, rk = (q, k) if rotary is None else (rotate(q, rotary), rotate(k, rotary))
    product = rq @ rk.mT
    num = (alpha * product).sum(-1, keepdim=True)
    den = num if rotary is None else (alpha * (q @ k.mT)).sum(-1, keepdim=True)
    gain, level = normalize(num, den, mass, q.shape[-1] ** -0.5, eps)
    return alpha * (gain * (product - num) + level)
