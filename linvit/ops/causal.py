"""Causal attention: every token reads the state of itself and all before it.

Tokens are cut into chunks. Inside a chunk the scores are a small matrix; what came before is carried in as a state.
The carried states are a running mean over chunks, taken first within groups of chunks and then across groups, so that
no loop runs over tokens and their number may be symbolic. (Compilers and exporters get one extra, empty chunk and
group, because a symbolic size must not become 1.) Cost and memory grow linearly with the tokens; the scan
across groups is quadratic in tokens / 1,024 and overtakes the rest only beyond a million.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.arguments import is_traced
from linvit.ops.normalizer import Normalizer
from linvit.ops.state import State, nonzero, summarize
from linvit.ops.weighting import Weights

CHUNK = 64
GROUP = 16


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
) -> tuple[Tensor, State]:
    """Causal attention of tokens that follow those in `state`.

    Args:
        query, rotated_query, key, rotated_key: κ and Rκ of queries and keys, (batch, heads, tokens, width).
        value: (batch, heads, tokens, value width).
        weights: how much each token counts, fixed when it is read.
        normalizer, eps: as in `linvit.ops.state.read`.
        state: the tokens already read.

    Returns:
        (batch, heads, tokens, value width), and the state of all tokens.
    """
    tokens = query.shape[-2]
    rotated = rotated_key is not key
    factor = torch.ones_like(key[..., 0]) if weights.factor is None else weights.factor
    # Values are relative to one that every token sees, so that the centred read-out subtracts small numbers only.
    first = value[..., 0, :] * (factor[..., :1] > 0)
    origin = torch.where(state.n.unsqueeze(-1) > 0, state.u, first)
    weights = Weights(*(None if w is None else _split(w.unsqueeze(-1)).squeeze(-1) for w in (factor, weights.exponent)))
    query, key, value = _split(query), _split(key), _split(value - origin.unsqueeze(-2))
    if rotated:
        rotated_query, rotated_key = _split(rotated_query), _split(rotated_key)
    else:
        rotated_query, rotated_key = query, key

    carried, total = _carried(key, rotated_key, value, weights, state, origin)
    alpha, share, mass = _row_weights(weights, carried)
    scores = rotated_query @ rotated_key.mT * alpha
    num = share * (rotated_query @ carried.r.unsqueeze(-1)) + scores.sum(-1, keepdim=True)
    den = num
    if rotated:
        den = share * (query @ carried.z.unsqueeze(-1)) + (query @ key.mT * alpha).sum(-1, keepdim=True)
    u = share * carried.u.unsqueeze(-2) + alpha @ value
    covariance = share * (rotated_query @ carried.S) + scores @ value - num * u
    gain, level = normalizer(num, den, mass, query.shape[-1] ** -0.5, eps)
    out = gain * covariance + level * (u + origin.unsqueeze(-2).unsqueeze(-2))
    return out.flatten(-3, -2)[..., :tokens, :], total


def _split(x: Tensor) -> Tensor:
    """(batch, heads, tokens, width) → (batch, heads, chunks, chunk, width), padded with zeros; CHUNK tokens at most."""
    batch, heads, tokens, width = x.shape
    chunk = CHUNK if is_traced() else min(CHUNK, max(1, tokens))
    chunks = _pieces(tokens, chunk)
    return F.pad(x, (0, 0, 0, chunks * chunk - tokens)).reshape(batch, heads, -1, chunk, width)


def _pieces(length: int, size: int) -> int:
    pieces = (length + size - 1) // size
    return pieces + 1 if is_traced() else max(1, pieces)


def _carried(
    key: Tensor, rotated_key: Tensor, value: Tensor, weights: Weights, state: State, origin: Tensor
) -> tuple[State, State]:
    """The state before each chunk, S and u relative to `origin`; and the state after the last."""
    chunk = summarize(key, rotated_key, value, weights)
    before = state._replace(u=state.u - origin)
    states = State(*(torch.cat((b.unsqueeze(2), c), dim=2) for b, c in zip(before, chunk, strict=True)))
    widths = [states.S[0, 0, 0].numel(), states.z.shape[-1], states.u.shape[-1], states.r.shape[-1]]
    uncentred = states.S + states.r.unsqueeze(-1) * states.u.unsqueeze(-2)
    means = torch.cat((uncentred.flatten(-2), states.z, states.u, states.r), dim=-1)
    means, n, shift = _running_mean(means, states.n, states.shift)
    S, z, u, r = means.split(widths, dim=-1)
    running = State(S.unflatten(-1, states.S.shape[-2:]), z, u, r, n, shift, states.query, states.num_queries)
    total = State(*(field[:, :, -1] for field in running))
    total = total._replace(
        S=total.S - total.r.unsqueeze(-1) * total.u.unsqueeze(-2),
        u=total.u + origin,
        query=state.query,
        num_queries=state.num_queries,
    )
    return State(*(field[:, :, :-1] for field in running)), total


def _row_weights(weights: Weights, carried: State) -> tuple[Tensor, Tensor, Tensor]:
    """α of the chunk's own tokens in each row, (…, chunk, chunk), and of all that is carried in; and their total mass.

    The last two are (…, chunk, 1).
    """
    assert weights.factor is not None
    chunk = weights.factor.shape[-1]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=weights.factor.device).triu(1)
    before = carried.n.unsqueeze(-1)
    if weights.exponent is None:
        within = weights.factor.unsqueeze(-2).masked_fill(later, 0)
        shift = torch.zeros_like(before)
    else:
        exponent = weights.visible_exponent()
        shift = torch.maximum(exponent.detach().cummax(-1).values, carried.shift.unsqueeze(-1))
        # Masked before exp: a later token's exponent may be far above this row's shift.
        relative = (exponent.unsqueeze(-2) - shift.unsqueeze(-1)).masked_fill(later, -torch.inf)
        within = relative.exp() * weights.factor.unsqueeze(-2)
        before = before * (carried.shift.unsqueeze(-1) - shift).exp()
    relative_mass = (within.sum(-1) + before).unsqueeze(-1)
    divisor = nonzero(relative_mass)
    return within / divisor, before.unsqueeze(-1) / divisor, relative_mass * shift.unsqueeze(-1).exp()


def _running_mean(means: Tensor, n: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean of each entry and all before it along axis 2: (batch, heads, entries, width) and weights."""
    entries = n.shape[2]
    if not is_traced() and entries <= GROUP:
        return _scan(means, n, shift)
    groups = _pieces(entries, GROUP)
    pad = groups * GROUP - entries
    means = F.pad(means, (0, 0, 0, pad)).unflatten(2, (-1, GROUP))
    n = F.pad(n, (0, pad)).unflatten(2, (-1, GROUP))
    shift = F.pad(shift, (0, pad), value=torch.finfo(shift.dtype).min).unflatten(2, (-1, GROUP))
    means, n, shift = _scan(means, n, shift)
    group_means, group_n, group_shift = _scan(means[:, :, :, -1], n[..., -1], shift[..., -1])
    group_means = F.pad(group_means, (0, 0, 1, -1)).unsqueeze(-2)
    group_n = F.pad(group_n, (1, -1)).unsqueeze(-1)
    group_shift = F.pad(group_shift, (1, -1), value=torch.finfo(shift.dtype).min).unsqueeze(-1)

    top = torch.maximum(shift, group_shift)
    inside, before = n * (shift - top).exp(), group_n * (group_shift - top).exp()
    share = (before / nonzero(inside + before)).unsqueeze(-1)
    means = means + share * (group_means - means)
    return tuple(x.flatten(2, 3)[:, :, :entries] for x in (means, inside + before, top))  # type: ignore[return-value]


def _scan(means: Tensor, n: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The running mean by one matrix of weights: (…, entries, width), (…, entries), (…, entries)."""
    top = shift.cummax(-1).values
    entries = n.shape[-1]
    later = torch.ones(entries, entries, dtype=torch.bool, device=n.device).triu(1)
    mass = n.unsqueeze(-2) * (shift.unsqueeze(-2) - top.unsqueeze(-1)).masked_fill(later, -torch.inf).exp()
    total = mass.sum(-1)
    return mass / nonzero(total).unsqueeze(-1) @ means, total, top
