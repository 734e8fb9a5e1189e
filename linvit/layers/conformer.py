"""What a Conformer is made of, for utterances of different lengths padded to one, and for streams.

Frames beyond an utterance's end are neither attended to, convolved nor counted, so that they change nothing before it.
Causal layers go on from an AttentionMemory: linear attention from a State, softmax from its keys and values, and both
from the last inputs of the convolution.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn.functional import conv2d, glu, pad, relu, scaled_dot_product_attention, silu

from linvit.layers.causal import CAUSAL_MECHANISMS, CAUSAL_MODULATIONS, AttentionMemory, KeyValues
from linvit.ops import PRESETS, Rotary, State, linear_attention

# None stands for softmax with relative positions.
FRAME_MECHANISMS: Mapping[str, dict[str, Any] | None] = {
    "softmax": None,
    **{name: PRESETS[name] for name in ("linear", "mala", "rala", "rala_mala")},
}
CONV_NORMS: Mapping[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
SUBSAMPLED = 4  # frames of features to one of the encoder


def known(what: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of that name.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in table:
        raise ValueError(f"{what} is {name!r}, expected one of {', '.join(table)}: choose a known one")
    return table[name]


def subsampled(lengths: Tensor) -> Tensor:
    """Frames after the subsampling of so many."""
    return (lengths + SUBSAMPLED - 1) // SUBSAMPLED


def relative_positions(first: int, last: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines of the distances first, first - 1 … last, (distances, width), in the dtype of `like`.

    Source: Transformer-XL (ACL 2019), the sinusoids of the transformer at each distance from query back to key.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distances = torch.arange(first, last - 1, -1, dtype=dtype, device=like.device)
    channels = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    angles = distances[:, None] * torch.exp(channels * (-math.log(10_000) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(like.dtype)


def by_distance(x: Tensor, keys: int) -> Tensor:
    """Scores by distance to scores by key: (…, queries, keys + queries - 1) → (…, queries, keys).

    The distances fall from keys - 1; query i is at place keys - queries + i, as the last queries of a stream are.
    """
    *batch, queries, distances = x.shape
    rolled = pad(x, (1, 0)).reshape(*batch, distances + 1, queries)
    return rolled[..., 1:, :].reshape(*batch, queries, distances)[..., :keys]


class Subsampling(nn.Module):
    """Two 3×3 convolutions of stride 2 over frames and mel bands, then a projection: every fourth frame.

    Args:
        mels: bands of the features.
        width: channels out, and of both convolutions.
        causal: sees no later frame: output i the features up to 4·i.
    """

    def __init__(self, mels: int, width: int, causal: bool, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.around = (2, 0) if causal else (1, 1)
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, **dd)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, **dd)
        self.proj = nn.Linear(width * -(-mels // 4), width, **dd)

    def forward(self, x: Tensor, lengths: Tensor | None = None, before: list[Tensor] | None = None) -> Tensor:
        """(batch, frames, mels) to (batch, frames / 4 rounded up, width).

        lengths: frames of each utterance, (batch,), where some are padded. before: of a stream, the last two inputs of
        each convolution; this call replaces them; empty at first.
        """
        x = x.unsqueeze(1)
        tails = []
        for number, conv in enumerate((self.conv1, self.conv2)):
            if lengths is not None:
                places = torch.arange(x.shape[-2], device=x.device)
                x = x.masked_fill((places >= lengths[:, None])[:, None, :, None], 0)
                lengths = (lengths + 1) // 2
            x = torch.cat((before[number], x), dim=-2) if before else pad(x, (0, 0, *self.around))
            tails.append(x[..., -2:, :])
            x = relu(conv(pad(x, (1, 1))))
        if before is not None:
            before[:] = tails
        return self.proj(x.transpose(1, 2).flatten(2))


class FrameAttention(nn.Module):
    """Attention between the frames of an utterance: softmax with relative positions, or a linear mechanism with a gate.

    Args:
        width: channels in and out.
        heads: number of heads; divides width.
        mechanism: "softmax", "linear", "mala", "rala" or "rala_mala".
        causal: each frame sees itself and those before it; RALA's weights are then of the queries so far.
        modulation: φ, a name in CAUSAL_MODULATIONS: what a further projection of x goes through before it multiplies
            what a linear mechanism gives. Its projection stands where softmax has that of its positions, so that all
            mechanisms are of one size.
        rope: whether a linear mechanism rotates queries and keys in the numerator.

    Raises:
        ValueError: for an unknown mechanism or modulation, and if heads does not divide width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        causal: bool = False,
        modulation: str = "linear",
        rope: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.options = known("mechanism", mechanism, CAUSAL_MECHANISMS if causal else FRAME_MECHANISMS)
        phi = known("modulation", modulation, CAUSAL_MODULATIONS) if self.options is not None else None
        if width % heads:
            raise ValueError(f"width is {width} and heads {heads}, expected a multiple: change one of the two")
        self.heads, self.mechanism, self.causal, self.rope = heads, mechanism, causal, rope
        self.qkv = nn.Linear(width, 3 * width, **dd)
        self.gate = nn.Linear(width, width, **dd) if phi else None
        self.modulate = phi() if phi else None
        self.proj = nn.Linear(width, width, **dd)
        if self.options is None:
            self.position = nn.Linear(width, width, bias=False, **dd)
            self.content_bias = nn.Parameter(torch.zeros(heads, width // heads, **dd))
            self.position_bias = nn.Parameter(torch.zeros(heads, width // heads, **dd))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | Rotary | None = None,
        valid: Tensor | None = None,
        memory: AttentionMemory | None = None,
    ) -> Tensor:
        """Frames (batch, frames, width) to the same shape.

        positions: of softmax, `relative_positions` from keys - 1 down to 1 - queries; of a linear mechanism the table
        of its rotation. valid: True where a frame is part of its utterance, (batch, frames). memory: what came before,
        of causal attention; it takes these frames up.
        """
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.options is None:
            mixed = self._softmax(query, key, value, positions, valid, memory)
        elif memory is not None:
            state = State.empty(query, value) if memory.read is None else memory.read
            mixed, memory.read = linear_attention(
                query, key, value, rotary=positions, causal=True, state=state, **self.options
            )
        else:
            mixed = linear_attention(
                query, key, value, rotary=positions, key_mask=valid, causal=self.causal, **self.options
            )
        mixed = mixed.transpose(1, 2).flatten(-2)
        if self.gate is not None:
            mixed = mixed * self.modulate(self.gate(x))
        return self.proj(mixed)

    def _softmax(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        memory: AttentionMemory | None,
    ) -> Tensor:
        if memory is not None:
            memory.read = memory.read or KeyValues()
            key, value = memory.read.append(key, value)
        queries, keys = query.shape[-2], key.shape[-2]
        place = self.position(positions).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        bias = by_distance((query + self.position_bias[:, None]) @ place.mT, keys) * query.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(1 + keys - queries)
            bias = bias.masked_fill(later, -torch.inf)
        if valid is not None:
            bias = bias.masked_fill(~valid[:, None, None, :], -torch.inf)
        return scaled_dot_product_attention(query + self.content_bias[:, None], key, value, attn_mask=bias)


class ConvModule(nn.Module):
    """Norm, gated pointwise convolution, depthwise convolution over the frames, norm, SiLU, pointwise convolution.

    Args:
        width: channels in and out.
        kernel: frames that the depthwise convolution sees; an even one sees one more after than before.
        causal: sees no later frame.
        norm: "batch", whose statistics are those of the frames that are no padding, or "layer".

    Raises:
        ValueError: for an unknown norm.
    """

    def __init__(self, width: int, kernel: int, causal: bool, norm: str = "batch", device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.around = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.norm = nn.LayerNorm(width, **dd)
        self.expand = nn.Linear(width, 2 * width, **dd)
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width, **dd)
        self.conv_norm = known("conv_norm", norm, CONV_NORMS)(width, **dd)
        self.proj = nn.Linear(width, width, **dd)

    def forward(self, x: Tensor, valid: Tensor | None = None, memory: AttentionMemory | None = None) -> Tensor:
        """Frames (batch, frames, width) to the same shape; valid and memory as in FrameAttention."""
        x = glu(self.expand(self.norm(x)), dim=-1)
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0)
        held = None if memory is None else memory.conv
        history = pad(x, (0, 0, *self.around)) if held is None else torch.cat((held, x), dim=1)
        if memory is not None:
            memory.conv = history[:, history.shape[1] - self.around[0] :]
        # a picture of one row, channels last in memory as the frames are: no copy
        row, weight = history.mT.unsqueeze(-2), self.depthwise.weight.unsqueeze(-2)
        x = conv2d(row, weight, self.depthwise.bias, groups=x.shape[-1]).squeeze(-2).mT
        return self.proj(silu(self._normalized(x, valid)))

    def _normalized(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if isinstance(self.conv_norm, nn.LayerNorm):
            return self.conv_norm(x)
        if valid is None or not self.training:
            return self.conv_norm(x.flatten(0, 1)).view_as(x)
        counted = self.conv_norm(x[valid])
        return counted.new_zeros(x.shape).masked_scatter(valid.unsqueeze(-1), counted)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each added to its input; and a norm.

    Args:
        width, heads, mechanism, causal, modulation, rope: see FrameAttention.
        kernel, conv_norm: see ConvModule.
        ratio: channels inside the feed-forwards over width.
        dropout: share of what each part adds, and of the feed-forwards' inside, that is dropped.

    Source: Conformer (Interspeech 2020, arXiv 2005.08100), Eq. 1.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        kernel: int,
        causal: bool = False,
        modulation: str = "linear",
        rope: bool = False,
        conv_norm: str = "batch",
        ratio: int = 4,
        dropout: float = 0.1,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        feed = {"act_layer": nn.SiLU, "drop": dropout, **dd}
        self.norm1 = nn.LayerNorm(width, **dd)
        self.ffn1 = Mlp(width, ratio * width, **feed)
        self.norm2 = nn.LayerNorm(width, **dd)
        self.attn = FrameAttention(width, heads, mechanism, causal, modulation, rope, **dd)
        self.conv = ConvModule(width, kernel, causal, conv_norm, **dd)
        self.norm3 = nn.LayerNorm(width, **dd)
        self.ffn2 = Mlp(width, ratio * width, **feed)
        self.norm4 = nn.LayerNorm(width, **dd)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | Rotary | None = None,
        valid: Tensor | None = None,
        memory: AttentionMemory | None = None,
    ) -> Tensor:
        """As FrameAttention."""
        x = x + 0.5 * self.ffn1(self.norm1(x))
        x = x + self.dropout(self.attn(self.norm2(x), positions, valid, memory))
        x = x + self.dropout(self.conv(x, valid, memory))
        x = x + 0.5 * self.ffn2(self.norm3(x))
        return self.norm4(x)
