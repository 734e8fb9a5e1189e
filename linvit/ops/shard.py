"""Attention over tokens of which a call has only some: the others are in other processes, or not read yet."""

from typing import Protocol

from torch import Tensor

from linvit.ops.state import State


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


def check_shard(
    shard: Shard | None,
    weighting: str | Tensor,
    state: State | None,
    cu_seqlens: Tensor | None,
    block_size: int | None,
) -> None:
    """Raises ValueError for arguments of `linear_attention` that a shard excludes."""
    weights = weighting if isinstance(weighting, Tensor) else None
    excluded = {"state": state, "weighting": weights, "cu_seqlens": cu_seqlens, "block_size": block_size}
    for name, value in excluded.items():
        if shard is not None and value is not None:
            raise ValueError(f"`{name}` is a {type(value).__name__}, but there is a `shard`: leave one out")
