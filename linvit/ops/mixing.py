"""Attention by blocks: tokens in blocks with a state each, and a matrix that says what each block reads of the others.

From MHLA (ICLR 2026, arXiv 2601.07832, Eq. 3 and 4), for every weighting and normalizer: a query of block i gives a
token of block b its weight times mixing[i, b], and the weights that it sees are set to one as always. Mixing states is
one product, so that with a fixed number of blocks cost grows linearly with the tokens.
"""

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.arguments import is_traced
from linvit.ops.bidirectional import Rule, Tokens, mapped
from linvit.ops.causal import Chunks, chunked, pieces, prefix_weights
from linvit.ops.state import State, Weights, mixed, nonzero, query_mean, read, summarize, weights_by_mean


class Blocks(NamedTuple):
    """Where tokens are: each has a place among those of all blocks, of which the larger ones have `size` places.

    place: (tokens,); number: of blocks in a sequence; sequences: packed ones, or 1. order: the tokens, block by block;
    cuts: where blocks begin among them, and their number, (sequences × blocks + 1,).
    """

    place: Tensor
    size: int
    number: int
    sequences: int
    order: Tensor
    cuts: Tensor

    @classmethod
    def at(cls, place: Tensor, size: int, number: int, sequences: int = 1) -> "Blocks":
        """Blocks with tokens at these places."""
        order = place.argsort()
        bounds = size * torch.arange(sequences * number + 1, device=place.device)
        return cls(place, size, number, sequences, order, torch.searchsorted(place[order], bounds))

    def split(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, width) to (batch, heads, sequences × blocks, size, width), zeros at empty places."""
        batch, heads, _, width = x.shape
        blocks = self.sequences * self.number
        places = x.new_zeros(batch, heads, blocks * self.size, width).index_copy(2, self.place, x)
        return places.view(batch, heads, blocks, self.size, width)

    def join(self, x: Tensor) -> Tensor:
        """The opposite of `split`."""
        return x.flatten(2, 3).index_select(2, self.place)

    def of_token(self) -> Tensor:
        """The block of each token in its sequence, (tokens,)."""
        return self.place // self.size % self.number


def blocks_of(
    key: Tensor,
    mixing: Tensor,
    blocks: tuple[int, int] | Tensor | None,
    grid: tuple[int, int] | None,
    cu_seqlens: Tensor | None = None,
) -> Blocks:
    """The blocks of a bidirectional call of `linear_attention`, whose arguments are checked."""
    if isinstance(blocks, Tensor):
        return _blocks_of_tokens(blocks, mixing.shape[-1], cu_seqlens)
    assert blocks is not None
    assert grid is not None
    return blocks_of_grid(grid, blocks, key.shape[2] - grid[0] * grid[1], key.device)


def blocks_of_grid(
    grid: tuple[int, int], blocks: tuple[int, int], prefix: int, device: torch.device | None = None
) -> Blocks:
    """A grid cut into rows × columns blocks whose sides differ by one token at most; tokens before it are a block more.

    Block (i, j) has the rows floor(i · height / rows) … floor((i + 1) · height / rows) - 1, and columns alike. A grid
    of fewer rows or columns leaves blocks empty.
    """
    if is_traced():
        return _cut(grid, blocks, prefix, device)
    return _cut_once((grid[0], grid[1]), (blocks[0], blocks[1]), prefix, device)


@lru_cache(64)
def _cut_once(grid: tuple[int, int], blocks: tuple[int, int], prefix: int, device: torch.device | None) -> Blocks:
    with torch.inference_mode(False):  # the tensors may be saved for gradients later
        return _cut(grid, blocks, prefix, device)


def _cut(grid: tuple[int, int], blocks: tuple[int, int], prefix: int, device: torch.device | None) -> Blocks:
    sides, offsets, numbers = [], [], []
    for length, count in zip(grid, blocks, strict=True):
        place = torch.arange(length, device=device)
        number = ((place + 1) * count + length - 1) // length - 1
        sides.append((length + count - 1) // count)
        offsets.append(place - number * length // count)
        numbers.append(number)
    number = (numbers[0].unsqueeze(1) * blocks[1] + numbers[1]).flatten()
    offset = (offsets[0].unsqueeze(1) * sides[1] + offsets[1]).flatten()
    size, count = sides[0] * sides[1], blocks[0] * blocks[1]
    if not prefix:
        return Blocks.at(number * size + offset, size, count)
    size = cast(int, torch.sym_max(size, prefix)) if isinstance(size, torch.SymInt) else max(size, prefix)
    place = torch.cat((torch.arange(prefix, device=device), (number + 1) * size + offset))
    return Blocks.at(place, size, count + 1)


def _blocks_of_tokens(number: Tensor, count: int, cu_seqlens: Tensor | None) -> Blocks:
    """Blocks by the number of each token, from 0 to count - 1; it waits for these values."""
    sequences = 1
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        place = torch.arange(number.shape[0], device=number.device)
        number = number + count * torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)
    order = number.argsort(stable=True)
    counts = number.bincount(minlength=sequences * count)
    first = F.pad(counts.cumsum(0), (1, -1))
    offset = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=order.device))
    size = max(int(counts.max()), 1)
    return Blocks.at(number * size + offset - first[number], size, count, sequences)


def mixed_attention(tokens: Tokens, rule: Rule, mixing: Tensor, blocks: Blocks) -> Tensor:
    """The output of bidirectional attention, (batch, heads, queries, value width), in the query's dtype.

    mixing: (blocks, blocks) or (heads, blocks, blocks).
    """
    q, rq, k, rk, v = mapped(tokens, rule)
    mean = query_mean(q, tokens.visible) if rule.weighting == "query_mean" else None
    weights = weights_by_mean(rule.weighting, mean, k, tokens.visible)
    is_full = tokens.key.shape[2] == blocks.place.shape[0] == blocks.sequences * blocks.number * blocks.size
    factor = weights.factor if is_full or weights.factor is not None else torch.ones_like(k[..., 0])
    parts = (None if x is None else blocks.split(x.unsqueeze(-1)).squeeze(-1) for x in (factor, weights.exponent))
    keys, queries = blocks.split(k), blocks.split(q)
    rotated_keys, rotated_queries = (keys, queries) if rk is k else (blocks.split(rk), blocks.split(rq))
    states = summarize(keys, rotated_keys, blocks.split(v), Weights(*parts))
    states = State(*(field.unflatten(2, (blocks.sequences, -1)) for field in states))
    states = mixed(states, mixing.to(rule.dtype).unsqueeze(-3))
    states = State(*(field.flatten(2, 3) for field in states))
    out = read(states, queries, rotated_queries, rule.normalizer, rule.eps)
    return blocks.join(out).to(tokens.query.dtype)


def causal_mixed_attention(tokens: Tokens, rule: Rule, mixing: Tensor, size: int, block: int) -> Tensor:
    """The same of causal attention: a token sees the blocks of `size` tokens before its own, and its own up to itself.

    block: 1, or `size` if a token sees all of its own block. Cost grows with tokens × size.
    """
    q, rq, k, rk, v = mapped(tokens, rule)
    chunks, before = Chunks(size, block), State.empty(q, v)
    weights = prefix_weights(rule.weighting, q, k, tokens.visible, before, chunks).weights
    number = pieces(q.shape[2], size)
    mixing = F.pad(mixing.to(rule.dtype), (0, 1, 0, 1))[..., :number, :number]
    out, _ = chunked(q, rq, k, rk, v, weights, rule.normalizer, rule.eps, before, chunks, mixing)
    return out.to(tokens.query.dtype)


def initial_mixing(blocks: tuple[int, int], prefix: bool = False, **options: Any) -> Tensor:
    """The matrix that MHLA's released code starts with, (blocks, blocks).

    Of the blocks' distance on their grid: 1 - distance / (the largest), columns set to the sum 1; the paper sets the
    rows to it. Tokens before the grid, which MHLA has not, are block 0, with equal entries.

    Args:
        blocks: (rows, columns).
        prefix: whether there are tokens before the grid.
        options: dtype and device.
    """
    rows, columns = (torch.arange(number, **options) for number in blocks)
    places = torch.cartesian_prod(rows, columns).double()
    apart = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")
    nearness = 1 - apart / apart.max().clamp_min(1)
    nearness = nearness / nearness.sum(0)
    return F.pad(nearness, (1, 0, 1, 0), value=1 / len(nearness)) if prefix else nearness


def resized_mixing(mixing: Tensor, blocks: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The matrix for another number of blocks, interpolated between the blocks' centres; columns keep the sum 1."""
    prefix = mixing.shape[-1] - blocks[0] * blocks[1]

    def resized(rows: Tensor) -> Tensor:
        as_map = rows[:, prefix:].unflatten(-1, blocks).unsqueeze(1)
        whole = F.interpolate(as_map, new, mode="bilinear", align_corners=False).flatten(1)
        return torch.cat((rows[:, :prefix], whole), dim=-1)

    mixing = resized(resized(mixing).mT).mT
    return mixing / nonzero(mixing.sum(-2, keepdim=True))
