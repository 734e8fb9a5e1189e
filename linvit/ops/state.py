"""The state: everything that a head keeps of the tokens it has read.

A state summarizes a set of tokens, and `merge` joins the states of two disjoint sets: bidirectional attention makes one
state, causal attention a running merge, decoding one merge per token; tiles and distributed ranks are merged too.

The fields are means and S is centred, because MALA's read-out subtracts: after 16,384 tokens with values around 3 ± 1,
sums kept in float32 decode with a relative error of 2.5e-5, uncentred means with 2.1e-5, this form with 1.7e-6.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from linvit.arguments import check_dense, check_floating, kind
from linvit.formulas.normalizer import Normalizer

Weighting = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Weights from κ(q), κ(k) and the mask (batch, heads, tokens) or None."""
WEIGHTINGS = ("uniform", "query_mean", "prefix_query_mean")


MOST = 60.0  # exponents whose exp is far from the largest float32


class Weights(NamedTuple):
    """Token j has the weight factor_j · exp(exponent_j), both (batch, heads, tokens); a masked token has factor 0.

    The exponent is separate because RALA's reaches 10⁴ on large activations. None stands for ones (factor) and zeros
    (exponent): uniform weights are `Weights()`.
    """

    factor: Tensor | None = None
    exponent: Tensor | None = None

    def relative(self, shift: Tensor, key: Tensor) -> Tensor:
        """factor · exp(exponent - shift) of the tokens of `key`; `shift` broadcasts against (batch, heads, tokens)."""
        if self.exponent is None:
            return torch.ones_like(key[..., 0]) if self.factor is None else self.factor
        mass = (self.visible_exponent() - shift).exp()
        return mass if self.factor is None else mass * self.factor

    def visible_exponent(self) -> Tensor:
        """The exponent; the lowest finite number where the factor is 0."""
        assert self.exponent is not None
        if self.factor is None:
            return self.exponent
        return self.exponent.masked_fill(self.factor == 0, torch.finfo(self.exponent.dtype).min)


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
            check_dense(name, x)
            if x.ndim < 3:
                raise ValueError(f"`{name}` has shape {tuple(x.shape)}, expected (batch, heads, tokens, width)")
            check_floating(name, x.dtype)
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
        check_dense(f"first.{field}", a)
        check_dense(f"second.{field}", b)
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
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


def mixed(states: State, mixing: Tensor) -> State:
    """For each of some blocks the state of all tokens, in which those of block b weigh mixing[i, b] times as much.

    Args:
        states: of the blocks, whose fields are (…, blocks) and then their sizes.
        mixing: (…, blocks, blocks), not negative.
    """
    shift, lowest = states.shift.unsqueeze(-2), torch.finfo(states.shift.dtype).min
    top = torch.where(mixing > 0, shift, lowest).amax(-1)
    relative = (shift - top.unsqueeze(-1)).clamp_max(MOST).exp()  # above 1 only where mixing is 0, which has a gradient
    mass = mixing * relative * states.n.unsqueeze(-2)
    n = mass.sum(-1)
    share = mass / nonzero(n).unsqueeze(-1)
    # Relative to the mean of the blocks, u loses little to rounding in the products.
    apart = states.u - states.u.mean(-2, keepdim=True)
    uncentred = (states.S + states.r.unsqueeze(-1) * apart.unsqueeze(-2)).flatten(-2)
    z, r, u, apart = (share @ x for x in (states.z, states.r, states.u, apart))
    S = (share @ uncentred).unflatten(-1, states.S.shape[-2:]) - r.unsqueeze(-1) * apart.unsqueeze(-2)
    return State(S, z, u, r, n, top, torch.zeros_like(z), torch.zeros_like(n))


def read(state: State, query: Tensor, rotated_query: Tensor, normalizer: Normalizer, eps: float) -> Tensor:
    """The output of queries that see all tokens of a state.

    Args:
        state: the summary of the tokens that they see.
        query: κ(q), (batch, heads, queries, width).
        rotated_query: Rκ(q), the same shape; `query` itself without rotation.
        normalizer: sets gain and level, see `linvit.formulas.normalizer`.
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


def visible_tokens(key_mask: Tensor, key: Tensor) -> Tensor:
    """A key mask that is (batch, tokens) or broadcasts to (batch, heads, tokens), as bool of the latter shape."""
    mask = key_mask.unsqueeze(1) if key_mask.dim() == 2 else key_mask
    return mask.bool().expand(key.shape[:3])


def shown_queries(weighting: str | Tensor, query: Tensor, visible: Tensor | None) -> Tensor:
    """The queries; zeros where a mask also hides those from their mean, so that no gradient depends on them."""
    if visible is None or isinstance(weighting, Tensor) or weighting == "uniform":
        return query
    return query.masked_fill(~visible.unsqueeze(-1), 0)


def query_mean(query: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean of κ(q) (batch, heads, tokens, width) over the tokens where key_mask (batch, heads, tokens) is True."""
    if key_mask is None:
        return query.mean(-2)
    count = key_mask.sum(-1, keepdim=True).clamp_min(1)
    return query.masked_fill(~key_mask.unsqueeze(-1), 0).sum(-2) / count


def token_weights(weighting: str | Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Weights:
    """Weights of tokens that every query sees, from κ(q) and κ(k); key_mask is (batch, heads, tokens).

    The tokens whose keys count are those whose queries enter the mean.
    """
    needs_mean = isinstance(weighting, str) and weighting == "query_mean"
    return weights_by_mean(weighting, query_mean(query, key_mask) if needs_mean else None, key, key_mask)


def weights_by_mean(weighting: str | Tensor, mean: Tensor | None, key: Tensor, key_mask: Tensor | None) -> Weights:
    """The same with the mean of κ(q), (batch, heads, width), where the weighting is "query_mean".

    Its softmax is RALA's (CVPR 2025, Eq. 4): of s · mean_i κ(q_i) · κ(k_j). The paper takes the mean of the raw queries
    and no scale; the released code, which we follow, takes the mean of κ(q) and s = 1/√width.
    """
    factor = None if key_mask is None else key_mask.to(key.dtype)
    if isinstance(weighting, Tensor):
        given = weighting.to(key.dtype).expand(key.shape[:-1])
        return Weights(given if factor is None else given * factor)
    if mean is None:
        return Weights(factor)
    return Weights(factor, (key @ (key.shape[-1] ** -0.5 * mean).unsqueeze(-1)).squeeze(-1))


class Shard(Protocol):
    """The tokens that a call of `linear_attention` has, and a way to those that it has not.

    Together the shards hold every token; each counts in one of them.
    """

    def visible(self, tokens: int) -> Tensor | None:
        """Which of this shard's keys count here, bool (tokens,); None for all."""

    def mean(self, mean: Tensor, count: Tensor, *, before: bool) -> tuple[Tensor, Tensor]:
        """The mean of κ(q) over the tokens of all shards, (batch, heads, width), and their number, (batch, heads).

        mean, count: those of this shard. before: only of the shards before it, for causal attention.
        """

    def state(self, state: State, *, before: bool) -> State:
        """The merged state of all shards; as `mean`, with the state of this shard."""


def visible_in(shard: Shard | None, key: Tensor, visible: Tensor | None) -> Tensor | None:
    """Which keys count, bool (batch, heads, tokens), from the mask of the call; None for all."""
    counting = None if shard is None else shard.visible(key.shape[-2])
    if counting is None:
        return visible
    counting = counting.expand(key.shape[:3])
    return counting if visible is None else visible & counting


def count(query: Tensor, visible: Tensor | None) -> Tensor:
    """The number of queries (batch, heads, queries, width) that count, (batch, heads), in their dtype."""
    if visible is None:
        return query.new_full(query.shape[:2], query.shape[-2])
    return visible.sum(-1).to(query.dtype)


def whole_mean(shard: Shard | None, mean: Tensor, number: Tensor) -> Tensor:
    """The mean of κ(q) over all shards."""
    return mean if shard is None else shard.mean(mean, number, before=False)[0]


def whole_state(shard: Shard | None, state: State) -> State:
    """The state of all shards."""
    return state if shard is None else shard.state(state, before=False)


def joined_means(means: Tensor, counts: Tensor) -> Tensor:
    """The mean (batch, heads, width) of groups with means (groups, batch, heads, width) and counts (groups, …)."""
    share = counts / counts.sum(0).clamp_min(1)
    return (means * share.unsqueeze(-1)).sum(0)
