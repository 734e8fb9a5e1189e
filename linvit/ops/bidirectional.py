"""Bidirectional attention: every query reads the state of all tokens.

Without gradients on a CPU, tokens are summarized and queries read block by block: intermediate results stay in the
core's cache, and the output is the only tensor of the inputs' size that is written. The blocks' states are merged. With
gradients every intermediate tensor is kept anyway, and a compiler makes its own blocks, so then there is one block.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.arguments import is_traced
from linvit.formulas.feature_map import FeatureMap, query_and_key_map, sees_one_token
from linvit.formulas.normalizer import Normalizer, resolve_normalizer
from linvit.ops.position import Rotary, rotate
from linvit.ops.state import (
    Shard,
    State,
    Weights,
    accumulator_dtype,
    count,
    joined,
    joined_means,
    query_mean,
    read,
    shown_queries,
    summarize,
    visible_in,
    visible_tokens,
    weights_by_mean,
    whole_mean,
    whole_state,
)

Mapped = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
BLOCK = 1 << 17  # numbers in one tensor of a block, 512 KB in float32; inputs below two blocks are not split


class Rule(NamedTuple):
    """The axes of `linear_attention`, names resolved, the dtype of intermediate results, and the shard."""

    query_map: FeatureMap
    key_map: FeatureMap
    weighting: str | Tensor
    normalizer: Normalizer
    eps: float
    dtype: torch.dtype
    shard: Shard | None = None


class Tokens(NamedTuple):
    """Query, key and value (batch, heads, tokens, …), the mask (batch, heads, tokens) and the rotary table."""

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    rotary: Rotary | None


def rule_of(
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap],
    weighting: str | Tensor,
    normalizer: str | Normalizer,
    eps: float,
    dtype: torch.dtype,
    shard: Shard | None = None,
    every_token_counts: bool = False,
) -> Rule:
    """The rule of these axes for tokens of that dtype; every_token_counts: in every query, but for a shard."""
    maps = query_and_key_map(feature_map, every_token_counts=every_token_counts and shard is None)
    return Rule(*maps, weighting, resolve_normalizer(normalizer), eps, accumulator_dtype(dtype), shard)


def tokens_of(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, rotary: Rotary | None, rule: Rule
) -> Tokens:
    """The tokens of a call, with queries of zeros where a mask hides them from their mean."""
    visible = None if key_mask is None else visible_tokens(key_mask, key)
    query = shown_queries(rule.weighting, query, visible)
    return Tokens(query, key, value, visible_in(rule.shard, key, visible), rotary)


def bidirectional(tokens: Tokens, rule: Rule) -> Tensor:
    """The output of attention, (batch, heads, queries, value width), in the query's dtype."""
    query, key, value = tokens[:3]
    if query.device.type != "cpu" or is_traced():
        return _at_once(tokens, rule)
    batch, heads, queries, width = query.shape
    length, size = max(queries, key.shape[-2]), max(BLOCK // (heads * max(width, value.shape[-1])), 1)
    if batch * length <= 2 * size or not _may_be_cut(tokens, rule):
        return _at_once(tokens, rule)
    out = None
    for images in _slices(batch, max(size // length, 1)):
        for block, piece in _pieces(*_some_images(tokens, rule, images), size):
            out = _room(query, piece) if out is None else out
            out[images, :, block] = piece
    assert out is not None
    return out


def one_by_one(tokens: Tokens, rule: Rule, cu_seqlens: Tensor) -> Tensor:
    """The same for packed sequences, by a loop over them; it waits for the values of cu_seqlens."""
    lengths = cu_seqlens.diff().tolist()
    repeated = [None] * len(lengths)
    split = [x.split(lengths, dim=2) for x in tokens[:3]]
    visible = repeated if tokens.visible is None else tokens.visible.split(lengths, dim=2)
    rotary: Any = repeated
    if tokens.rotary is not None:
        rotary = map(Rotary, *(table.split(lengths, dim=-2) for table in tokens.rotary))
    weightings: Any = [rule.weighting] * len(lengths)
    if isinstance(rule.weighting, Tensor):
        weightings = rule.weighting.expand(tokens.key.shape[:3]).split(lengths, dim=2)
    sequences = zip(*split, visible, rotary, weightings, strict=True)
    outs = [bidirectional(Tokens(*some), rule._replace(weighting=w)) for *some, w in sequences if some[0].shape[2]]
    return torch.cat(outs, dim=2)


def summarized(tokens: Tokens, rule: Rule) -> tuple[Mapped, Weights, State]:
    """What `mapped` returns, the weights of the tokens, and the state of all shards."""
    q, rq, k, rk, v = mapped(tokens, rule)
    mean = None
    if rule.weighting == "query_mean":
        mean = whole_mean(rule.shard, query_mean(q, tokens.visible), count(q, tokens.visible))
    weights = weights_by_mean(rule.weighting, mean, k, tokens.visible)
    return (q, rq, k, rk, v), weights, whole_state(rule.shard, summarize(k, rk, v, weights))


def _at_once(tokens: Tokens, rule: Rule) -> Tensor:
    (q, rq, *_), _, state = summarized(tokens, rule)
    return read(state, q, rq, rule.normalizer, rule.eps).to(tokens.query.dtype)


def _pieces(tokens: Tokens, rule: Rule, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Each block of queries, as a slice, with its output."""
    queries, length = tokens.query.shape[-2], tokens.key.shape[-2]
    if max(queries, length) <= 2 * size:
        yield slice(None), _at_once(tokens, rule)
        return
    mean = _query_mean(tokens, rule, size) if rule.weighting == "query_mean" else None

    def summary(block: slice) -> State:
        some, weighting = _some_keys(tokens, rule, block)
        k, rk, v = _keys(some, rule)
        return summarize(k, rk, v, weights_by_mean(weighting, mean, k, some.visible))

    state = whole_state(rule.shard, reduce(joined, map(summary, _slices(length, size))))
    for block in _slices(queries, size):
        q, rq = _mapped(tokens.query[:, :, block], rule.query_map, _rows(tokens.rotary, block), rule.dtype)
        yield block, read(state, q, rq, rule.normalizer, rule.eps)


def _query_mean(tokens: Tokens, rule: Rule, size: int) -> Tensor:
    """The mean of κ(q) over the visible tokens of all shards, from the means of the blocks."""
    means, counts = [], []
    for block in _slices(tokens.query.shape[-2], size):
        q = rule.query_map(tokens.query[:, :, block].to(rule.dtype))
        visible = None if tokens.visible is None else tokens.visible[:, :, block]
        means.append(query_mean(q, visible))
        counts.append(count(q, visible))
    by_block = torch.stack(counts)
    return whole_mean(rule.shard, joined_means(torch.stack(means), by_block), by_block.sum(0))


def mapped(tokens: Tokens, rule: Rule) -> Mapped:
    """κ(q), Rκ(q), κ(k), Rκ(k) and the values."""
    return *_mapped(tokens.query, rule.query_map, tokens.rotary, rule.dtype), *_keys(tokens, rule)


def _keys(tokens: Tokens, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """κ(k), Rκ(k) and the values; masked tokens, which may contain NaN, are set to zero first."""
    key, value = tokens.key, tokens.value
    if tokens.visible is not None:
        hidden = ~tokens.visible.unsqueeze(-1)
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    return *_mapped(key, rule.key_map, tokens.rotary, rule.dtype), value.to(rule.dtype)


def _mapped(x: Tensor, feature_map: FeatureMap, rotary: Rotary | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """κ(x) and Rκ(x)."""
    features = feature_map(x.to(dtype))
    return features, features if rotary is None else rotate(features, rotary)


def _may_be_cut(tokens: Tokens, rule: Rule) -> bool:
    """Whether the call can be computed block by block, with the same output."""
    inputs = tokens[:3] if isinstance(rule.weighting, str) else (*tokens[:3], rule.weighting)
    return (
        not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
        and sees_one_token(rule.query_map)
        and sees_one_token(rule.key_map)
        and (tokens.rotary is None or tokens.rotary.cos.dim() == 2)
    )


def _slices(length: int, size: int) -> list[slice]:
    """The fewest slices of at most `size` entries, of about equal length."""
    step = -(-length // -(-length // size))
    return [slice(start, start + step) for start in range(0, length, step)]


def _some_images(tokens: Tokens, rule: Rule, images: slice) -> tuple[Tokens, Rule]:
    visible = None if tokens.visible is None else tokens.visible[images]
    of_images = Tokens(tokens.query[images], tokens.key[images], tokens.value[images], visible, tokens.rotary)
    if isinstance(rule.weighting, Tensor):
        rule = rule._replace(weighting=rule.weighting.expand(tokens.key.shape[:3])[images])
    return of_images, rule


def _some_keys(tokens: Tokens, rule: Rule, block: slice) -> tuple[Tokens, str | Tensor]:
    """The keys of a block, and their weighting."""
    visible = None if tokens.visible is None else tokens.visible[:, :, block]
    key, value = tokens.key[:, :, block], tokens.value[:, :, block]
    weighting = rule.weighting[..., block] if isinstance(rule.weighting, Tensor) else rule.weighting
    return Tokens(tokens.query, key, value, visible, _rows(tokens.rotary, block)), weighting


def _rows(rotary: Rotary | None, block: slice) -> Rotary | None:
    return None if rotary is None else Rotary(*(table[block] for table in rotary))


def _room(query: Tensor, piece: Tensor) -> Tensor:
    """An empty output in the queries' memory order: heads within tokens for channels-last maps."""
    batch, heads, queries, _ = query.shape
    if query.stride(1) < query.stride(2):
        return piece.new_empty(batch, queries, heads, piece.shape[-1], dtype=query.dtype).transpose(1, 2)
    return piece.new_empty(batch, heads, queries, piece.shape[-1], dtype=query.dtype)
