"""What a decoder is made of: attention over the tokens so far, with a cache of what it has read.

Every mechanism has the same parameters. In training a row of tokens is read at once; in generation piece by piece,
where a linear mechanism keeps one State and softmax attention keeps every key and value.
"""

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import SwiGLU
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from linvit.layers.cache import AttentionCache
from linvit.layers.checks import check_size, known
from linvit.layers.operator import Operands, SequenceSteps, merged
from linvit.ops import Rotary

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
        # an image of one row, channels last in memory as the tokens are: no copy, and a third of conv1d's time
        row = history.mT.unsqueeze(-2)
        out = conv2d(row, self.weight.unsqueeze(-2), groups=x.shape[-1]).squeeze(-2).mT
        return out, history[:, history.shape[1] - self.size + 1 :]


class CausalAttention(SequenceSteps):
    """Attention of each token to itself and all before it: proj((operator(q, k, v) + lepe(v)) · φ(x)).

    Args:
        width, heads, mechanism: as in AttentionSteps.
        conv: tokens that the short convolution of q, k and v sees; 0 for none.
        lepe: tokens that the convolution of the values sees which is added to the output; 0 for none.
        modulation: φ, a name in CAUSAL_MODULATIONS: what happens to one more projection of x; "none" for no φ.
        rope: whether queries and keys are rotated by their position: in the numerator alone for linear mechanisms.

    Raises:
        ValueError: as AttentionSteps, for an unknown modulation, sizes that are not such numbers, and an odd head width
            with rope.
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
        dd = {"device": device, "dtype": dtype}
        for name, size, least in (("width", width, 1), ("heads", heads, 1), ("conv", conv, 0), ("lepe", lepe, 0)):
            check_size(name, size, least)
        super().__init__(width, heads, mechanism, causal=True, place="sequences", **dd)
        phi = known("modulation", modulation, CAUSAL_MODULATIONS)
        if not isinstance(rope, bool):
            raise ValueError(f"`rope` is {rope!r}, expected true or false: write one of them")
        if rope and width // heads % 2:
            raise ValueError(
                f"`width` is {width} and `heads` {heads}, but `rope` turns pairs of channels, so a head needs an even"
                " number: change one of the two, or leave `rope` out"
            )
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
        cache: what was read before these tokens, which are added to it. form: "chunked", linear in the tokens, or
        "matrix", by the explicit scores, for whole rows alone.
        """
        operands = self.operands(x, rotary, packing, cache)
        mixed = operands.product() if form == "matrix" else self.operator(operands)
        return self.proj(self.gated(self.with_local(self.arranged(mixed, operands), operands), operands))

    def operands(
        self, x: Tensor, rotary: Rotary | None, packing: Packing | None, cache: AttentionCache | None
    ) -> Operands:
        """What enters the operator."""
        projections = self.qkvo(x)
        qkv = projections[..., : 3 * x.shape[-1]]
        if packing is not None:
            qkv = packing.apart(qkv)
        if self.conv is not None:
            qkv, inputs = self.conv(qkv, None if cache is None else cache.conv)
            if cache is not None:
                cache.conv = inputs
        tokens = (self.by_head(t) for t in qkv.chunk(3, dim=-1))
        context = {"cache": cache, "x": x, "gate": projections[..., 3 * x.shape[-1] :], "packing": packing}
        return self.operator.operands(*tokens, rotary if self.rope else None, **context)

    def with_local(self, y: Tensor, operands: Operands) -> Tensor:
        cache = operands.cache
        if self.lepe is not None:
            value = merged(operands.value[:, :, -operands.query.shape[-2] :])
            local, inputs = self.lepe(value, None if cache is None else cache.lepe)
            if cache is not None:
                cache.lepe = inputs
            y = y + local
        return y if operands.packing is None else operands.packing.together(y, operands.x)


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
