"""The layers of a decoder: attention over the tokens so far, with a cache.

Every mechanism has the same parameters. Training reads complete rows of tokens; generation reads them piece by piece. A
linear mechanism then keeps one State, softmax attention all keys and values.
"""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from timm.layers import SwiGLU
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from linvit.layers.cache import AttentionCache
from linvit.layers.checks import TensorOptions, check_turns
from linvit.layers.operator import AttentionLayer, in_heads, merged
from linvit.ops import Rotary
from linvit.ranges import lookup

CAUSAL_MODULATIONS: Mapping[str, type[nn.Module] | None] = {
    "none": None,
    "linear": nn.Identity,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}
FORMS = ("chunked", "matrix")


class Packing:
    """Several documents packed into one row: moves each document to its own row, and back.

    Args:
        documents: the number of each token's document, (batch, tokens); the tokens of a document are adjacent.
    """

    def __init__(self, documents: Tensor) -> None:
        batch, tokens = documents.shape
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        flat = first.flatten()
        self.row = flat.cumsum(0) - 1
        starts = flat.nonzero().flatten()
        self.column = torch.arange(batch * tokens, device=documents.device) - starts[self.row]
        self.shape = len(starts), int(self.column.max()) + 1

    def apart(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → (documents, longest, width), padded with zeros."""
        rows = x.new_zeros(*self.shape, x.shape[-1])
        return rows.index_put((self.row, self.column), x.flatten(0, 1))

    def together(self, rows: Tensor, like: Tensor) -> Tensor:
        """The rows from `apart`, moved back to their places in `like`."""
        return rows[self.row, self.column].view(*like.shape[:2], -1)


class CausalConv(nn.Module):
    """Depthwise convolution over a token and the size - 1 tokens before it.

    Args:
        width: channels.
        size: kernel size in tokens.
        passes: initialize as the identity; otherwise with small random values.
    """

    def __init__(self, width: int, size: int, passes: bool = True, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.size, self.passes = size, passes
        self.weight = nn.Parameter(torch.empty(width, 1, size, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity, or normal values with mean 0 and standard deviation 0.02."""
        if self.passes:
            nn.init.zeros_(self.weight)
            nn.init.ones_(self.weight[..., -1])
        else:
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, tokens, width) to the same shape; and the last size - 1 inputs, for the next call."""
        history = pad(x, (0, 0, self.size - 1, 0)) if before is None else torch.cat((before, x), dim=1)
        # as a channels_last image of one row: no copy, and a third of conv1d's time
        row = history.mT.unsqueeze(-2)
        out = conv2d(row, self.weight.unsqueeze(-2), groups=x.shape[-1]).squeeze(-2).mT
        return out, history[:, history.shape[1] - self.size + 1 :]


class CausalAttention(AttentionLayer):
    """Attention of each token to itself and all before it: proj((operator(q, k, v) + lepe(v)) · φ(x)).

    Args:
        width, heads, mechanism: as in AttentionLayer.
        conv: kernel size in tokens of the short convolution of q, k and v; 0 for none.
        lepe: kernel size in tokens of the convolution of v that is added to the output; 0 for none.
        modulation: φ, a name in CAUSAL_MODULATIONS, applied to a further projection of x; "none" for no gate.
        rope: rotate queries and keys by their position; linear mechanisms do so in the numerator only.
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
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__(width, heads, mechanism, causal=True, place="sequences", **dd)
        phi = lookup("modulation", modulation, CAUSAL_MODULATIONS)
        if rope:
            check_turns(width // heads)
        self.rope = rope
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
        cache: AttentionCache | None = None,
        form: str = "chunked",
    ) -> Tensor:
        """Tokens (batch, tokens, width) to the same shape.

        rotary: table of their positions, for `rope`. packing: the documents of each row, which do not see each other.
        cache: the tokens read before; these are added to it. form: "chunked", linear in the tokens, or "matrix",
        with the explicit scores, without a cache only.
        """
        projections, split = self.qkvo(x), 3 * x.shape[-1]
        qkv, gate = projections[..., :split], projections[..., split:]
        if packing is not None:
            qkv = packing.apart(qkv)
        if self.conv is not None:
            qkv, inputs = self.conv(qkv, None if cache is None else cache.conv)
            if cache is not None:
                cache.conv = inputs
        query, key, value = (in_heads(y, self.heads) for y in qkv.chunk(3, dim=-1))
        rotary = rotary if self.rope else None
        if form == "matrix":
            scores = self.operator.scores(query, key, value, rotary)
            y = merged((scores @ value.to(scores.dtype)).to(value.dtype))
        else:
            y = merged(self.operator(query, key, value, rotary, cache=cache))
        if self.lepe is not None:
            local, inputs = self.lepe(merged(value), None if cache is None else cache.lepe)
            if cache is not None:
                cache.lepe = inputs
            y = y + local
        if packing is not None:
            y = packing.together(y, x)
        if self.modulate is not None:
            y = y * self.modulate(gate)
        return self.proj(y)


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)), with RMS norms.

    Args:
        width, heads, mechanism: see CausalAttention.
        hidden: channels of the feed-forward.
        options: conv, lepe, modulation and rope of CausalAttention.
    """

    attn: CausalAttention

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        hidden: int,
        options: Mapping[str, Any],
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6, **dd)
        self.attn = CausalAttention(width, heads, mechanism, **dd, **options)
        self.norm2 = nn.RMSNorm(width, eps=1e-6, **dd)
        self.ffn = SwiGLU(width, hidden, bias=False, **dd)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As CausalAttention."""
        x = x + self.attn(self.norm1(x), *args, **kwargs)
        return x + self.ffn(self.norm2(x))
