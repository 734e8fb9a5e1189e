"""Attention of every token to the tokens of its sequence up to the end of its block: causal, by blocks, or packed.

Causal attention has blocks of one token, bidirectional attention one block for each sequence. Tokens are cut into
chunks: a chunk consists of small blocks or is a piece of a large one, and never has tokens of two sequences. All sizes
follow from shapes, so that nothing waits for the values of `cu_seqlens`: there may be up to one empty chunk per
sequence.

Inside a chunk of small blocks the scores are a small matrix; what came before is carried in as a state. A chunk of a
large block reads the state at the end of its block. The states are a running mean over chunks, taken first within
groups of chunks and then across groups, so that no loop runs over tokens and their number may be symbolic. (Compilers
and exporters get one extra, empty chunk and group, because a symbolic size must not become 1.) Cost and memory grow
linearly with the tokens; the scan across groups is quadratic in tokens / 1,024 and overtakes the rest only beyond a
million.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.arguments import is_traced
from linvit.formulas.normalizer import Normalizer
from linvit.ops.bidirectional import Rule, Tokens, mapped
from linvit.ops.state import State, Weights, count, joined, mixed, nonzero, query_mean, read, summarize, token_weights

CHUNK = 64
GROUP = 16


@dataclass(frozen=True)
class Chunks:
    """Tokens in chunks of `size`.

    block: the size of a small block, in tokens; None if a block consists of whole chunks.
    first: the first chunk of each sequence. of_chunk: the sequence of each chunk. place: where each token is among the
        places of all chunks. last: for each chunk the last one of its block. None for batches, in which chunks simply
        follow each other; `last` also if chunks consist of whole blocks.
    """

    size: int
    block: int | None
    first: Tensor | None = None
    of_chunk: Tensor | None = None
    place: Tensor | None = None
    last: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, width) → (batch, heads, chunks, size, width), padded with zeros."""
        batch, heads, tokens, width = x.shape
        if self.place is None or self.of_chunk is None:
            chunks = pieces(tokens, self.size)
            return F.pad(x, (0, 0, 0, chunks * self.size - tokens)).reshape(batch, heads, chunks, self.size, width)
        places = x.new_zeros(batch, heads, self.of_chunk.shape[0] * self.size, width).index_copy(2, self.place, x)
        return places.view(batch, heads, self.of_chunk.shape[0], self.size, width)

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """(batch, heads, chunks, size, width) → (batch, heads, tokens, width)."""
        x = x.flatten(2, 3)
        return x[:, :, :tokens] if self.place is None else x.index_select(2, self.place)

    def each_chunk(self, x: Tensor) -> Tensor:
        """What belongs to each sequence, (batch, heads, sequences, width), for each of its chunks; or broadcastable."""
        return x if self.of_chunk is None else x.index_select(2, self.of_chunk)

    def first_seen(self, x: Tensor, shown: Tensor) -> Tensor:
        """The mean of what all tokens of a sequence see of its first chunk, (batch, heads, sequences, width).

        x: (batch, heads, chunks, size, width). shown: 1 for what counts, otherwise 0, (batch, heads, chunks, size, 1).
        """
        if self.last is None:
            x, shown = x[..., :1, :], shown[..., :1, :]
        if self.first is None:
            x, shown = x[:, :, :1], shown[:, :, :1]
        else:
            x, shown = x.index_select(2, self.first), shown.index_select(2, self.first)
        return (shown.mT @ x).squeeze(-2) / shown.sum(-2).clamp_min(1)

    def carried(self, running: Tensor, nothing: float = 0) -> Tensor:
        """What each chunk continues, (batch, heads, chunks), from what was read up to its begin; or nothing."""
        running = running[:, :, :-1]
        if self.of_chunk is None:
            return running
        return running.masked_fill(self.of_chunk != F.pad(self.of_chunk[:-1], (1, 0), value=-1), nothing)

    def hidden(self, device: torch.device) -> Tensor:
        """True where a token (row) of a chunk does not see another one (column): it is in a later block."""
        block = torch.arange(self.size, device=device) // (self.block or self.size)
        return block[:, None] < block


def at_hand(cu_seqlens: Tensor) -> bool:
    """Whether its values can be read at once: on a CPU a loop over sequences takes half the time of chunks or less."""
    return cu_seqlens.is_cpu and type(cu_seqlens) is Tensor and not is_traced()


def pieces(length: int, size: int) -> int:
    """How many pieces of that size contain the length; one more under a tracer, whose sizes must not become 1."""
    count = (length + size - 1) // size
    return count + 1 if is_traced() else max(1, count)


def chunks_of(tokens: int, block: int | None, cu_seqlens: Tensor | None, device: torch.device) -> Chunks:
    """The chunks of a call; block: the size of its blocks, None for one block per sequence."""
    within = block is not None and block < CHUNK
    per_block = 1 if within else pieces(tokens, CHUNK) if block is None else -(-block // CHUNK)
    if block is None:
        size, unit = CHUNK, CHUNK * per_block
    else:
        size = block * (CHUNK // block) if within else -(-block // per_block)
        unit = size if within else block
    if cu_seqlens is None and within:
        return Chunks(size if is_traced() else min(size, max(1, tokens)), block)
    bounds = torch.arange(2, device=device) * tokens if cu_seqlens is None else cu_seqlens.long()
    start, end = bounds[:-1], bounds[1:]
    length = end - start
    count = length // unit * per_block + (length % unit + size - 1) // size
    total = count.cumsum(0)
    before = total - count

    token = torch.arange(tokens, device=device)
    of_token = torch.searchsorted(end, token, right=True)
    offset = token - start[of_token]
    chunk = before[of_token] + offset // unit * per_block + offset % unit // size
    place = chunk * size + offset % unit % size

    chunk = torch.arange(tokens * per_block // unit + start.shape[0], device=device)
    of_chunk = torch.searchsorted(total, chunk, right=True).clamp_max(start.shape[0] - 1)  # also of the empty ones
    first = before.clamp_max(chunk.shape[0] - 1)
    known: dict[str, Any] = {"first": first, "of_chunk": of_chunk, "place": place}
    if within:
        return Chunks(size, block, **known)
    whole = ((chunk - before[of_chunk]) // per_block + 1) * per_block
    return Chunks(size, None, **known, last=before[of_chunk] + torch.minimum(whole, count[of_chunk]) - 1)


class Prefix(NamedTuple):
    """The weights of tokens, fixed when they are read; the mean of κ(q) after the last token, and the queries in it."""

    weights: Weights
    query: Tensor
    num_queries: Tensor


def causal_attention(tokens: Tokens, rule: Rule, chunks: Chunks, state: State | None = None) -> tuple[Tensor, State]:
    """The output for tokens that follow those in `state`, in the query's dtype, and the state after them.

    Without a state these tokens are the first, but for those of earlier shards.
    """
    q, rq, k, rk, v = mapped(tokens, rule)
    before = State.empty(q, v) if state is None else state
    if rule.shard is not None and rule.weighting == "prefix_query_mean":
        mean, number = rule.shard.mean(query_mean(q, tokens.visible), count(q, tokens.visible), before=True)
        before = before._replace(query=mean, num_queries=number)
    prefix = prefix_weights(rule.weighting, q, k, tokens.visible, before, chunks)
    if rule.shard is not None:
        before = rule.shard.state(summarize(k, rk, v, prefix.weights), before=True)
    if state is not None and q.shape[-2] == 1:
        after = joined(before, summarize(k, rk, v, prefix.weights))
        out = read(after, q, rq, rule.normalizer, rule.eps)
    else:
        out, after = chunked(q, rq, k, rk, v, prefix.weights, rule.normalizer, rule.eps, before, chunks)
    after = after._replace(query=prefix.query, num_queries=prefix.num_queries)
    return out.to(tokens.query.dtype), after


def prefix_weights(
    weighting: str | Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None, before: State, chunks: Chunks
) -> Prefix:
    """The weights of tokens that follow those in `before`, from κ(q) and κ(k); key_mask is (batch, heads, tokens).

    With a mean of queries, this is for each token the mean over all that it sees. Even the last row of causal attention
    differs from the bidirectional one: later queries do not re-weigh earlier keys.
    """
    if isinstance(weighting, Tensor) or weighting == "uniform":
        return Prefix(token_weights(weighting, query, key, key_mask), before.query, before.num_queries)
    shown = torch.ones_like(query[..., :1]) if key_mask is None else key_mask.unsqueeze(-1).to(query.dtype)
    query = query if key_mask is None else query.masked_fill(~key_mask.unsqueeze(-1), 0)
    query, shown = chunks.split(query), chunks.split(shown)
    number = shown.sum(-2)
    means = torch.cat((before.query.unsqueeze(2), query.sum(-2) / number.clamp_min(1)), dim=2)
    number = torch.cat((before.num_queries.unsqueeze(2), number.squeeze(-1)), dim=2)
    means, number, _ = _running_mean(means, number, torch.zeros_like(number), chunks.of_chunk)
    if chunks.last is not None:
        mean = means[:, :, 1:].index_select(2, chunks.last).unsqueeze(-2)
    else:
        seen = (~chunks.hidden(query.device)).to(query.dtype)
        count = chunks.carried(number)[..., None, None]
        mean = (means[:, :, :-1].unsqueeze(-2) * count + seen @ query) / (count + seen @ shown).clamp_min(1)
    product = (mean * chunks.split(key)).sum(-1, keepdim=True)
    exponent = query.shape[-1] ** -0.5 * chunks.join(product, key.shape[-2]).squeeze(-1)
    factor = None if key_mask is None else key_mask.to(key.dtype)
    return Prefix(Weights(factor, exponent), means[:, :, -1], number[:, :, -1])


def chunked(
    query: Tensor,
    rotated_query: Tensor,
    key: Tensor,
    rotated_key: Tensor,
    value: Tensor,
    weights: Weights,
    normalizer: Normalizer,
    eps: float,
    state: State,
    chunks: Chunks,
    mixing: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Attention of tokens that follow those in `state`.

    Args:
        query, rotated_query, key, rotated_key: κ and Rκ of queries and keys, (batch, heads, tokens, width).
        value: (batch, heads, tokens, value width).
        weights: how much each token counts, fixed when it is read.
        normalizer, eps: as in `linvit.ops.state.read`.
        state: the tokens already read; none with packed sequences.
        chunks: how the tokens are cut.
        mixing: tokens of chunk b weigh mixing[i, b] times as much in chunk i, (chunks, chunks) or (heads, chunks,
            chunks), if there are no tokens before these; the state that is returned is then without it.

    Returns:
        (batch, heads, tokens, value width), and the state of all tokens (with packed sequences of the last one).
    """
    tokens = query.shape[-2]
    rotated = rotated_key is not key
    factor = torch.ones_like(key[..., 0]) if weights.factor is None else weights.factor
    split = chunks.split
    weights = Weights(*(None if w is None else split(w.unsqueeze(-1)).squeeze(-1) for w in (factor, weights.exponent)))
    value = split(value)
    # Values are relative to what all of their sequence sees, so that the centred read-out subtracts small numbers only.
    first = chunks.first_seen(value, split((factor > 0).unsqueeze(-1).to(factor.dtype)))
    origin = torch.where(state.n[..., None, None] > 0, state.u.unsqueeze(-2), first)
    value = value - chunks.each_chunk(origin).unsqueeze(-2)
    query, key = split(query), split(key)
    rotated_query, rotated_key = (split(rotated_query), split(rotated_key)) if rotated else (query, key)

    running = _running(key, rotated_key, value, weights, state, origin[:, :, 0], chunks)
    total = _around(State(*(field[:, :, -1] for field in running)), origin[:, :, -1])
    total = total._replace(query=state.query, num_queries=state.num_queries)
    origin = chunks.each_chunk(origin)
    if chunks.last is not None:
        seen = State(*(field[:, :, 1:].index_select(2, chunks.last) for field in running))
        out = read(_around(seen, origin), query, rotated_query, normalizer, eps)
        return chunks.join(out, tokens), total
    if mixing is None:
        carried = State(*(field[:, :, :-1] for field in running))
        lowest = torch.finfo(running.shift.dtype).min
        carried = carried._replace(n=chunks.carried(running.n), shift=chunks.carried(running.shift, lowest))
    else:
        carried, weights = _mixed_before(summarize(key, rotated_key, value, weights), weights, mixing)
    alpha, share, mass = _row_weights(weights, carried, chunks.hidden(query.device))
    scores = rotated_query @ rotated_key.mT * alpha
    num = share * (rotated_query @ carried.r.unsqueeze(-1)) + scores.sum(-1, keepdim=True)
    den = num
    if rotated:
        den = share * (query @ carried.z.unsqueeze(-1)) + (query @ key.mT * alpha).sum(-1, keepdim=True)
    u = share * carried.u.unsqueeze(-2) + alpha @ value
    covariance = share * (rotated_query @ carried.S) + scores @ value - num * u
    gain, level = normalizer(num, den, mass, query.shape[-1] ** -0.5, eps)
    out = gain * covariance + level * (u + origin.unsqueeze(-2))
    return chunks.join(out, tokens), total


def _mixed_before(states: State, weights: Weights, mixing: Tensor) -> tuple[State, Weights]:
    """What each chunk reads of those before it, S not centred, and the weights of its own tokens."""
    before = mixed(states, mixing.tril(-1))
    diagonal = mixing.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    assert weights.factor is not None
    factor = weights.factor * diagonal
    return before._replace(S=before.S + before.r.unsqueeze(-1) * before.u.unsqueeze(-2)), weights._replace(
        factor=factor
    )


def _running(
    key: Tensor, rotated_key: Tensor, value: Tensor, weights: Weights, state: State, origin: Tensor, chunks: Chunks
) -> State:
    """The state before the first chunk and after each; u is relative to the origin, and S is not centred."""
    chunk = summarize(key, rotated_key, value, weights)
    before = state._replace(u=state.u - origin)
    states = State(*(torch.cat((b.unsqueeze(2), c), dim=2) for b, c in zip(before, chunk, strict=True)))
    widths = [states.S.shape[3:].numel(), states.z.shape[-1], states.u.shape[-1], states.r.shape[-1]]
    uncentred = states.S + states.r.unsqueeze(-1) * states.u.unsqueeze(-2)
    means = torch.cat((uncentred.flatten(-2), states.z, states.u, states.r), dim=-1)
    means, n, shift = _running_mean(means, states.n, states.shift, chunks.of_chunk)
    S, z, u, r = means.split(widths, dim=-1)
    return State(S.unflatten(-1, states.S.shape[-2:]), z, u, r, n, shift, states.query, states.num_queries)


def _around(running: State, origin: Tensor) -> State:
    """One of the running states as it is elsewhere: S centred, u with its origin."""
    S = running.S - running.r.unsqueeze(-1) * running.u.unsqueeze(-2)
    return running._replace(S=S, u=running.u + origin)


def _row_weights(weights: Weights, carried: State, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """α of the chunk's own tokens in each row, (…, size, size), and of all that is carried in; and their total mass.

    The last two are (…, size, 1). hidden: True where a token does not see another, (size, size).
    """
    assert weights.factor is not None
    before = carried.n.unsqueeze(-1)
    if weights.exponent is None:
        within = weights.factor.unsqueeze(-2).masked_fill(hidden, 0)
        shift = torch.zeros_like(before)
    else:
        exponent = weights.visible_exponent().unsqueeze(-2)
        shift = torch.maximum(_largest_seen(exponent.detach(), hidden), carried.shift.unsqueeze(-1))
        # Masked before exp: a later token's exponent may be far above this row's shift.
        relative = (exponent - shift.unsqueeze(-1)).masked_fill(hidden, -torch.inf)
        within = relative.exp() * weights.factor.unsqueeze(-2)
        before = before * (carried.shift.unsqueeze(-1) - shift).exp()
    relative_mass = (within.sum(-1) + before).unsqueeze(-1)
    divisor = nonzero(relative_mass)
    return within / divisor, before.unsqueeze(-1) / divisor, relative_mass * shift.unsqueeze(-1).exp()


def _largest_seen(exponent: Tensor, hidden: Tensor) -> Tensor:
    """The largest exponent (…, 1, entries) that each row of hidden leaves, (…, rows)."""
    return exponent.masked_fill(hidden, torch.finfo(exponent.dtype).min).amax(-1)


def _running_mean(means: Tensor, n: Tensor, shift: Tensor, of_chunk: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean of each entry and those before it in its sequence: (batch, heads, entries, width) and weights.

    The first entry is what was read before the chunks. of_chunk: the sequences of the chunks; None for a single one.
    """
    entries = n.shape[2]
    sequence = n.new_zeros(entries, dtype=torch.long) if of_chunk is None else F.pad(of_chunk, (1, 0))
    if not is_traced() and entries <= GROUP:
        return _scan(means, n, shift, sequence)
    lowest = torch.finfo(shift.dtype).min
    groups = pieces(entries, GROUP)
    pad = groups * GROUP - entries
    means = F.pad(means, (0, 0, 0, pad)).unflatten(2, (-1, GROUP))
    n = F.pad(n, (0, pad)).unflatten(2, (-1, GROUP))
    shift = F.pad(shift, (0, pad), value=lowest).unflatten(2, (-1, GROUP))
    sequence = F.pad(sequence, (0, pad)).unflatten(0, (-1, GROUP))
    means, n, shift = _scan(means, n, shift, sequence)
    # A group hands on the mean of its last sequence, which only that sequence's chunks take.
    ends = sequence[:, -1]
    group_means, group_n, group_shift = _scan(means[:, :, :, -1], n[..., -1], shift[..., -1], ends)
    other = sequence != F.pad(ends, (1, -1)).unsqueeze(-1)
    group_means = F.pad(group_means, (0, 0, 1, -1)).unsqueeze(-2)
    group_n = F.pad(group_n, (1, -1)).unsqueeze(-1).masked_fill(other, 0)
    group_shift = F.pad(group_shift, (1, -1), value=lowest).unsqueeze(-1).masked_fill(other, lowest)

    top = torch.maximum(shift, group_shift)
    inside, before = n * (shift - top).exp(), group_n * (group_shift - top).exp()
    share = (before / nonzero(inside + before)).unsqueeze(-1)
    means = means + share * (group_means - means)
    return tuple(x.flatten(2, 3)[:, :, :entries] for x in (means, inside + before, top))  # type: ignore[return-value]


def _scan(means: Tensor, n: Tensor, shift: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The running mean by one matrix of weights: (…, entries, width), and (…, entries) for the others."""
    entries = n.shape[-1]
    later = torch.ones(entries, entries, dtype=torch.bool, device=n.device).triu(1)
    hidden = later | (sequence.unsqueeze(-1) != sequence.unsqueeze(-2))
    top = _largest_seen(shift.unsqueeze(-2), hidden)
    mass = n.unsqueeze(-2) * (shift.unsqueeze(-2) - top.unsqueeze(-1)).masked_fill(hidden, -torch.inf).exp()
    total = mass.sum(-1)
    return mass / nonzero(total).unsqueeze(-1) @ means, total, top
