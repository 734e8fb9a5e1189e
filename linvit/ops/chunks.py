"""How the tokens of a call are cut into chunks.

A token sees the tokens of its sequence up to the end of its block. Causal attention has blocks of one token,
bidirectional attention one block for each sequence. A chunk consists of small blocks or is a piece of a large one, and
never has tokens of two sequences. All sizes follow from shapes, so that nothing waits for the values of `cu_seqlens`:
there may be up to one empty chunk per sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.arguments import is_traced

CHUNK = 64


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
