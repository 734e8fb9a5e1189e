"""What a decoder is made of: attention over the tokens so far, with memory of what it has read.

Every mechanism has the same parameters. In training a row of tokens is read at once; in generation piece by piece,
where a linear mechanism keeps one State and softmax attention keeps every key and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import SwiGLU
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, scaled_dot_product_attention

from linvit.layers.checks import check_size
from linvit.ops import PRESETS, Rotary, State, attention_scores, linear_attention
from linvit.ops.position import rotate

# None stands for softmax; RALA's weights are the causal ones, of the queries so far.
CAUSAL_MECHANISMS: Mapping[str, dict[str, Any] | None] = {
    "softmax": None,
    "linear": PRESETS["linear"],
    "mala": PRESETS["mala"],
    "rala": {**PRESETS["rala"], "weighting": "prefix_query_mean"},
    "rala_mala": {**PRESETS["rala_mala"], "weighting": "prefix_query_mean"},
}
CAUSAL_MODULATIONS: Mapping[str, type[nn.Module] | None] = {
    "none": None,
    "linear": nn.Identity,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}
FORMS = ("chunked", "matrix")


class Packing:
    """Where several documents stand in one row: brings each into a row of its own, and back.

    Args:
        documents: numbers of the documents, (batch, tokens), equal within a document, whose tokens stand together.
    """

    def __init__(self, documents: Tensor):
        batch, tokens = documents.shape
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        flat = first.flatten()
        self.row = flat.cumsum(0) - 1
        starts = flat.nonzero().flatten()
        self.column = torch.arange(batch * tokens, device=documents.device) - starts[self.row]
        self.shape = len(starts), int(self.column.max()) + 1

    def apart(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → (documents, longest, width), zeros after each document's end."""
        rows = x.new_zeros(*self.shape, x.shape[-1])
        return rows.index_put((self.row, self.column), x.flatten(0, 1))

    def together(self, rows: Tensor, like: Tensor) -> Tensor:
        """What `apart` took from `like`, back in its place."""
        return rows[self.row, self.column].view(*like.shape[:2], -1)


class KeyValues:
    """Keys and values of all tokens read, in buffers that double when they are full; `append` changes them."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, these included, each (batch, heads, tokens, width)."""
        end = self.length + key.shape[-2]
        if self.key is None or end > self.key.shape[-2]:
            self.key, self.value = (self._grown(*pair, 2 * end) for pair in ((self.key, key), (self.value, value)))
        assert self.value is not None
        self.key[:, :, self.length : end] = key
        self.value[:, :, self.length : end] = value
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]

    def _grown(self, held: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        buffer = like.new_empty(*like.shape[:2], capacity, like.shape[-1])
        if held is not None:
            buffer[:, :, : self.length] = held[:, :, : self.length]
        return buffer

    def num_bytes(self) -> int:
        """Memory of the tokens held, without the buffers' spare room."""
        if self.key is None or self.value is None:
            return 0
        return sum(x[:, :, : self.length].numel() * x.element_size() for x in (self.key, self.value))


@dataclass
class AttentionMemory:
    """What one attention keeps: what it has read, and the last inputs of its two convolutions (None before any)."""

    read: State | KeyValues | None = None
    conv: Tensor | None = None
    lepe: Tensor | None = None

    def num_bytes(self) -> int:
        """Bytes that it takes."""
        held = [x for x in (self.conv, self.lepe) if x is not None]
        if isinstance(self.read, KeyValues):
            return self.read.num_bytes() + sum(x.nbytes for x in held)
        return sum(x.nbytes for x in (*held, *(self.read or ())))


class CausalConv(nn.Module):
    """Depthwise convolution over a token and the size - 1 before it; at first it passes its input on.

    Args:
        width: channels.
        size: tokens that it sees.
        passes: at first gives its input; otherwise small random values.
    """

    def __init__(self, width: int, size: int, passes: bool = True, device=None, dtype=None):
        super().__init__()
        self.size, self.passes = size, passes
        self.weight = nn.Parameter(torch.empty(width, 1, size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity, or zero-mean values of deviation 0.02."""
        if self.passes:
            nn.init.zeros_(self.weight)
            nn.init.ones_(self.weight[..., -1])
        else:
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, tokens, width) to the same shape; and the last size - 1 inputs, to go on from."""
        history = pad(x, (0, 0, self.size - 1, 0)) if before is None else torch.cat((before, x), dim=1)
        # a picture of one row, channels last in memory as the tokens are: no copy, and a third of conv1d's time
        row = history.mT.unsqueeze(-2)
        out = conv2d(row, self.weight.unsqueeze(-2), groups=x.shape[-1]).squeeze(-2).mT
        return out, history[:, history.shape[1] - self.size + 1 :]


class CausalAttention(nn.Module):
    """Attention of each token to itself and all before it: proj((mix(q, k, v) + lepe(v)) · φ(x)).

    Args:
        width: channels in and out.
        heads: number of heads; divides width.
        mechanism: a name in CAUSAL_MECHANISMS.
        conv: tokens that the short convolution of q, k and v sees; 0 for none.
        lepe: tokens that the convolution of the values sees which is added to the output; 0 for none.
        modulation: φ, a name in CAUSAL_MODULATIONS: what happens to one more projection of x; "none" for no φ.
        rope: whether queries and keys are rotated by their position: in the numerator alone for linear mechanisms.

    Raises:
        ValueError: for an unknown mechanism or modulation, sizes that are no such numbers, where heads does not divide
            width, and an odd head width with rope.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        conv: int = 4,
        lepe: int = 0,
        modulation: str = "none",
        rope: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        _check("mechanism", mechanism, CAUSAL_MECHANISMS)
        _check("modulation", modulation, CAUSAL_MODULATIONS)
        for name, size, least in (("width", width, 1), ("heads", heads, 1), ("conv", conv, 0), ("lepe", lepe, 0)):
            check_size(name, size, least)
        if width % heads:
            raise ValueError(f"width is {width} and heads {heads}, expected a multiple: change one of the two")
        if not isinstance(rope, bool):
            raise ValueError(f"rope is {rope!r}, expected true or false: write one of them")
        if rope and width // heads % 2:
            raise ValueError(
                f"width is {width} and heads {heads}, but rope turns pairs of channels, so a head needs an even number:"
                " change one of the two, or leave rope out"
            )
        self.heads, self.mechanism, self.rope = heads, mechanism, rope
        self.options = CAUSAL_MECHANISMS[mechanism]
        phi = CAUSAL_MODULATIONS[modulation]
        self.qkvo = nn.Linear(width, (4 if phi else 3) * width, bias=False, **dd)
        self.conv = CausalConv(3 * width, conv, **dd) if conv else None
        self.lepe = CausalConv(width, lepe, passes=False, **dd) if lepe else None
        self.modulate = phi() if phi else None
        self.proj = nn.Linear(width, width, bias=False, **dd)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        packing: Packing | None = None,
        memory: AttentionMemory | None = None,
        form: str = "chunked",
    ) -> Tensor:
        """Tokens (batch, tokens, width) to the same shape.

        rotary: table of their positions, for `rope`. packing: the documents of each row, which do not see each other.
        memory: what was read before these tokens; it takes them up. form: "chunked", linear in the tokens, or "matrix",
        by the explicit scores, for whole rows alone.
        """
        width = x.shape[-1]
        parts = self.qkvo(x)
        qkv = parts[..., : 3 * width]
        if packing is not None:
            qkv = packing.apart(qkv)
        held = memory or AttentionMemory()
        if self.conv is not None:
            qkv, held.conv = self.conv(qkv, held.conv)
        value = qkv[..., 2 * width :]
        query, key, by_head = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        rotary = rotary if self.rope else None
        if memory is None:
            mixed = MIX[form](self.options, query, key, by_head, rotary)
        else:
            mixed = _mix_on(self.options, query, key, by_head, rotary, memory)
        mixed = mixed.transpose(1, 2).flatten(-2)
        if self.lepe is not None:
            local, held.lepe = self.lepe(value, held.lepe)
            mixed = mixed + local
        if packing is not None:
            mixed = packing.together(mixed, x)
        if self.modulate is not None:
            mixed = mixed * self.modulate(parts[..., 3 * width :])
        return self.proj(mixed)


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); the norms are root mean squares.

    Args:
        width, heads, mechanism, options: see CausalAttention.
        hidden: channels of the feed-forward.
    """

    def __init__(self, width: int, heads: int, mechanism: str, hidden: int, device=None, dtype=None, **options):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm1 = nn.RMSNorm(width, eps=1e-6, **dd)
        self.attn = CausalAttention(width, heads, mechanism, **options, **dd)
        self.norm2 = nn.RMSNorm(width, eps=1e-6, **dd)
        self.ffn = SwiGLU(width, hidden, bias=False, **dd)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As CausalAttention."""
        x = x + self.attn(self.norm1(x), *args, **kwargs)
        return x + self.ffn(self.norm2(x))


def _check(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{what} is {name!r}, expected one of {', '.join(known)}: choose a known one")


def _turned(query: Tensor, key: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    return (query, key) if rotary is None else (rotate(query, rotary), rotate(key, rotary))


def _mix(options: dict | None, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None) -> Tensor:
    if options is None:
        return scaled_dot_product_attention(*_turned(query, key, rotary), value, is_causal=True)
    return linear_attention(query, key, value, rotary=rotary, causal=True, **options)


def _mix_by_matrix(options: dict | None, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None) -> Tensor:
    if options is not None:
        scores = attention_scores(query, key, rotary=rotary, causal=True, **options)
        return (scores @ value.to(scores.dtype)).to(value.dtype)
    query, key = _turned(query, key, rotary)
    later = torch.ones(key.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device).triu(1)
    return (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(later, -torch.inf).softmax(-1) @ value


MIX = dict(zip(FORMS, (_mix, _mix_by_matrix), strict=True))


def _mix_on(
    options: dict | None, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None, memory: AttentionMemory
) -> Tensor:
    """What these tokens read of the memory and themselves, which the memory takes up."""
    if options is not None:
        state = State.empty(query, value) if memory.read is None else memory.read
        out, memory.read = linear_attention(query, key, value, rotary=rotary, causal=True, state=state, **options)
        return out
    query, key = _turned(query, key, rotary)
    cache = memory.read = memory.read or KeyValues()
    keys, values = cache.append(key, value)
    tokens, total = query.shape[-2], keys.shape[-2]
    if tokens == 1:
        return scaled_dot_product_attention(query, keys, values)
    seen = torch.ones(tokens, total, dtype=torch.bool, device=query.device).tril(total - tokens)
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen)
