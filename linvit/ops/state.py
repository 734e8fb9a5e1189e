"""The state: everything that a head keeps of the tokens it has read.

A state summarizes a set of tokens, and `merge` joins the states of two disjoint sets: bidirectional attention makes one
state, causal attention a running merge, decoding one merge per token; tiles and distributed ranks are merged too.

The fields are means and S is centred, because MALA's read-out subtracts: after 16,384 tokens with values around 3 ± 1,
sums kept in float32 decode with a relative error of 2.5e-5, uncentred means with 2.1e-5, this form with 1.7e-6.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linvit.arguments import check_floating, form, kind
from linvit.ops.normalizer import Normalizer
from linvit.ops.weighting import Weights


class State(NamedTuple):
    """Summary of the tokens read; α are their weights, Σ_j α_j = 1. Float32, or float64 for float64 tokens.

    S: Σ_j α_j Rκ(k_j) ⊗ (v_j - u), (batch, heads, width, value width).
    z: Σ_j α_j κ(k_j), (batch, heads, width).
    u: Σ_j α_j v_j, (batch, heads, value width).
    r: Σ_j α_j Rκ(k_j), (batch, heads, width); equals z without rotation.
    n: total weight over exp(shift), (batch, heads); the number of tokens for uniform weights.
    shift: the largest exponent among the weights, (batch, heads).
    query: mean of κ(q), (batch, heads, width), for prefix_query_mean; otherwise zeros.
    num_queries: the number of queries in that mean, (batch, heads).
    """

    S: Tensor
    z: Tensor
    u: Tensor
    r: Tensor
    n: Tensor
    shift: Tensor
    query: Tensor
    num_queries: Tensor

    @classmethod
    def empty(cls, query: Tensor, value: Tensor) -> "State":
        """The state before any token, shaped for these queries (batch, heads, …, width) and values."""
        for name, x in (("query", query), ("value", value)):
            shape, dtype, _ = form(name, x)
            if len(shape) < 3:
                raise ValueError(f"`{name}` has shape {tuple(shape)}, expected (batch, heads, tokens, width)")
            check_floating(name, dtype)
        dtype, device = accumulator_dtype(query.dtype), query.device
        sizes = field_sizes(query.shape[-1], value.shape[-1])
        state = cls(*(torch.zeros(*query.shape[:2], *size, dtype=dtype, device=device) for size in sizes))
        return state._replace(shift=state.shift + torch.finfo(dtype).min)


FIELDS = State._fields


def field_sizes(width: int, value_width: int) -> tuple[tuple[int, ...], ...]:
    """The sizes of a state's fields, in order, without batch and heads."""
    return (width, value_width), (width,), (value_width,), (width,), (), (), (width,), ()


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nonzero(mass: Tensor) -> Tensor:
    """The mass to divide by: 1 where all weights are zero."""
    return mass.masked_fill(mass == 0, 1)


def summarize(key: Tensor, rotated_key: Tensor, value: Tensor, weights: Weights) -> State:
    """Summary of a set of tokens.

    Args:
        key: κ(k), (batch, heads, tokens, width).
        rotated_key: Rκ(k), the same shape; `key` itself without rotation.
        value: (batch, heads, tokens, value width).
        weights: how much each token counts.

    Returns:
        Their state; zeros where every token is masked.
    """
    alpha, n, shift = _normalized(weights, key)
    u = _mean(value, alpha)
    z = _mean(key, alpha)
    r = z if rotated_key is key else _mean(rotated_key, alpha)
    centred = value - u.unsqueeze(-2)
    S = rotated_key.mT @ (centred if alpha is None else _times(centred, alpha.unsqueeze(-1)))
    if alpha is None:
        S = S / key.shape[-2]
    return State(S, z, u, r, n, shift, query=torch.zeros_like(z), num_queries=torch.zeros_like(n))


def merge(first: State, second: State) -> State:
    """The state of the tokens of both; associative and commutative.

    Raises:
        TypeError: if one of them is not a State.
        ValueError: if their fields differ in shape, dtype or device.
    """
    for name, state in (("first", first), ("second", second)):
        if not isinstance(state, State):
            raise TypeError(f"`{name}` is {kind(state)}, expected a State")
    for field, a, b in zip(FIELDS, first, second, strict=True):
        if form(f"first.{field}", a) != form(f"second.{field}", b):
            raise ValueError(
                f"`first.{field}` is {a.dtype} of shape {tuple(a.shape)} on {a.device}, `second.{field}` {b.dtype} of "
                f"shape {tuple(b.shape)} on {b.device}, expected the same"
            )
    return joined(first, second)


def joined(first: State, second: State) -> State:
    """`merge` without its checks."""
    shift = torch.maximum(first.shift, second.shift)
    n_first = first.n * (first.shift - shift).exp()
    n_second = second.n * (second.shift - shift).exp()
    n = n_first + n_second
    share = n_second / nonzero(n)
    along, across = share.unsqueeze(-1), share.unsqueeze(-1).unsqueeze(-1)
    spread = (second.r - first.r).unsqueeze(-1) * (second.u - first.u).unsqueeze(-2)
    num_queries = first.num_queries + second.num_queries
    query_share = (second.num_queries / num_queries.clamp_min(1)).unsqueeze(-1)
    # lerp starts from the nearer end, so a share that rounds to one leaves nothing of the smaller part.
    return State(
        S=torch.lerp(first.S, second.S, across).addcmul(across * (1 - across), spread),
        z=torch.lerp(first.z, second.z, along),
        u=torch.lerp(first.u, second.u, along),
        r=torch.lerp(first.r, second.r, along),
        n=n,
        shift=shift,
        query=torch.lerp(first.query, second.query, query_share),
        num_queries=num_queries,
    )


def read(state: State, query: Tensor, rotated_query: Tensor, normalizer: Normalizer, eps: float) -> Tensor:
    """The output of queries that see all tokens of a state.

    Args:
        state: the summary of the tokens that they see.
        query: κ(q), (batch, heads, queries, width).
        rotated_query: Rκ(q), the same shape; `query` itself without rotation.
        normalizer: sets gain and level, see `linvit.ops.normalizer`.
        eps: added to denominators.

    Returns:
        (batch, heads, queries, value width).
    """
    den = query @ state.z.unsqueeze(-1)
    num = den if rotated_query is query else rotated_query @ state.r.unsqueeze(-1)
    mass = (state.n * state.shift.exp()).unsqueeze(-1).unsqueeze(-1)
    gain, level = normalizer(num, den, mass, query.shape[-1] ** -0.5, eps)
    covariance = rotated_query @ state.S
    return _times(covariance, gain).addcmul_(level, state.u.unsqueeze(-2))


def _normalized(weights: Weights, key: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    shift = torch.zeros_like(key[..., 0, 0])
    if weights.exponent is not None:
        shift = weights.visible_exponent().amax(-1).detach()
    elif weights.factor is None:
        return None, shift + key.shape[-2], shift
    mass = weights.relative(shift.unsqueeze(-1), key)
    n = mass.sum(-1)
    return mass / nonzero(n).unsqueeze(-1), n, shift


def _times(fresh: Tensor, x: Tensor) -> Tensor:
    """fresh · x, in place unless a gradient needs `fresh`, which only this code may read."""
    return fresh * x if fresh.requires_grad else fresh.mul_(x)


def _mean(x: Tensor, alpha: Tensor | None) -> Tensor:
    return x.mean(-2) if alpha is None else (alpha.unsqueeze(-2) @ x).squeeze(-2)
