"""The layers of a Conformer, for padded batches of utterances of different lengths, and for streams.

Padding frames are neither attended to, convolved nor counted in statistics, so they cannot change the frames before
them. Causal layers continue from an AttentionCache: linear attention from a State, softmax attention from its keys and
values, and both from the last inputs of the convolution.
"""

import math
from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn.functional import conv2d, glu, pad, relu, silu

from linvit.layers.cache import AttentionCache
from linvit.layers.causal import CAUSAL_MODULATIONS
from linvit.layers.checks import TensorOptions
from linvit.layers.operator import AttentionLayer, in_heads, merged
from linvit.ops import Rotary
from linvit.ranges import lookup

CONV_NORMS: Mapping[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
SUBSAMPLED = 4  # frames of features per frame of the encoder


def subsampled(lengths: Tensor) -> Tensor:
    """The numbers of frames after subsampling."""
    return (lengths + SUBSAMPLED - 1) // SUBSAMPLED


def relative_positions(first: int, last: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines of the distances first, first - 1, …, last: (distances, width), in the dtype of `like`.

    Source: Transformer-XL (ACL 2019): the transformer's sinusoids for each distance between query and key.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distances = torch.arange(first, last - 1, -1, dtype=dtype, device=like.device)
    channels = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    angles = distances[:, None] * torch.exp(channels * (-math.log(10_000) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(like.dtype)


def by_distance(x: Tensor, keys: int) -> Tensor:
    """Scores per distance to scores per key: (…, queries, keys + queries - 1) → (…, queries, keys).

    The distances descend from keys - 1. Query i has the position keys - queries + i: the queries are the last tokens.
    """
    *batch, queries, distances = x.shape
    rolled = pad(x, (1, 0)).reshape(*batch, distances + 1, queries)
    return rolled[..., 1:, :].reshape(*batch, queries, distances)[..., :keys]


class Subsampling(nn.Module):
    """Two 3×3 convolutions of stride 2 over frames and mel bands, then a projection: every fourth frame.

    Args:
        mels: mel bands of the features.
        width: channels of both convolutions and of the output.
        causal: no frame sees a later one; output i depends on features 0 … 4·i.
    """

    def __init__(self, mels: int, width: int, causal: bool, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.around = (2, 0) if causal else (1, 1)
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, **dd)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, **dd)
        self.proj = nn.Linear(width * -(-mels // 4), width, **dd)

    def forward(self, x: Tensor, lengths: Tensor | None = None, before: list[Tensor] | None = None) -> Tensor:
        """(batch, frames, mels) to (batch, frames / 4 rounded up, width).

        lengths: frames of each utterance, (batch,), if some are padded. before: in a stream, the last two inputs of
        each convolution, empty at first; this call replaces them.
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


class FrameAttention(AttentionLayer):
    """Attention between the frames of an utterance: softmax with relative positions, or a linear mechanism with a gate.

    Args:
        width, heads, mechanism: as in AttentionLayer.
        causal: each frame sees only itself and the frames before it; RALA's weights then come from the queries so far.
        modulation: φ, a name in CAUSAL_MODULATIONS, applied to a further projection of x that gates the output of a
            linear mechanism. That projection replaces the projection of positions of softmax attention, so that all
            mechanisms have the same number of parameters.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        causal: bool = False,
        modulation: str = "linear",
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__(width, heads, mechanism, causal=causal, place="sequences", **dd)
        softmax = self.operator.options is None
        phi = lookup("modulation", modulation, CAUSAL_MODULATIONS)
        phi = None if softmax else phi
        self.qkv = nn.Linear(width, 3 * width, **dd)
        self.gate = nn.Linear(width, width, **dd) if phi else None
        self.modulate = phi() if phi else None
        self.proj = nn.Linear(width, width, **dd)
        self.position = nn.Linear(width, width, bias=False, **dd) if softmax else None
        if softmax:
            self.content_bias = nn.Parameter(torch.zeros(heads, width // heads, **dd))
            self.position_bias = nn.Parameter(torch.zeros(heads, width // heads, **dd))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | Rotary | None = None,
        valid: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Frames (batch, frames, width) to the same shape.

        positions: for softmax, `relative_positions` from keys - 1 down to 1 - queries; for a linear mechanism its
        rotary table or None. valid: False for padding, (batch, frames). cache: for causal attention, the frames
        read before; these are added to it.
        """
        query, key, value = (in_heads(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        rotary, bias = None, None
        if self.position is None:
            rotary = cast(Rotary | None, positions)
        else:
            place = in_heads(self.position(positions)[None], self.heads)
            distances = (query + self.position_bias[:, None]) @ place.mT
            keys = distances.shape[-1] + 1 - query.shape[-2]
            bias = by_distance(distances, keys) * query.shape[-1] ** -0.5
            query = query + self.content_bias[:, None]
        y = merged(self.operator(query, key, value, rotary, key_mask=valid, bias=bias, cache=cache))
        if self.gate is not None and self.modulate is not None:
            y = y * self.modulate(self.gate(x))
        return self.proj(y)


class ConvModule(nn.Module):
    """Norm, gated pointwise convolution, depthwise convolution over the frames, norm, SiLU, pointwise convolution.

    Args:
        width: channels in and out.
        kernel: kernel size of the depthwise convolution in frames; an even one sees one frame more after than before.
        causal: no frame sees a later one.
        conv_norm: "batch", a batch norm whose statistics ignore padding, or "layer".
    """

    def __init__(
        self, width: int, kernel: int, causal: bool, conv_norm: str = "batch", **dd: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        self.around = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        self.norm = nn.LayerNorm(width, **dd)
        self.expand = nn.Linear(width, 2 * width, **dd)
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width, **dd)
        self.conv_norm: nn.Module = lookup("conv_norm", conv_norm, CONV_NORMS)(width, **dd)
        self.proj = nn.Linear(width, width, **dd)

    def forward(self, x: Tensor, valid: Tensor | None = None, cache: AttentionCache | None = None) -> Tensor:
        """Frames (batch, frames, width) to the same shape; valid and cache as in FrameAttention."""
        x = glu(self.expand(self.norm(x)), dim=-1)
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0)
        before = None if cache is None else cache.conv
        history = pad(x, (0, 0, *self.around)) if before is None else torch.cat((before, x), dim=1)
        if cache is not None:
            cache.conv = history[:, history.shape[1] - self.around[0] :]
        # as a channels_last image of one row: no copy
        row, weight = history.mT.unsqueeze(-2), self.depthwise.weight.unsqueeze(-2)
        x = conv2d(row, weight, self.depthwise.bias, groups=x.shape[-1]).squeeze(-2).mT
        return self.proj(silu(self._normalized(x, valid)))

    def _normalized(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if isinstance(self.conv_norm, nn.LayerNorm):
            return self.conv_norm(x)
        if valid is None or not self.training:
            return self.conv_norm(x.flatten(0, 1)).view_as(x)
        if type(self.conv_norm) is nn.BatchNorm1d:
            return _masked_batch_norm(self.conv_norm, x, valid)
        counted: Tensor = self.conv_norm(x[valid])  # which shares its statistics among processes
        return counted.new_zeros(x.shape).masked_scatter(valid.unsqueeze(-1), counted)


def _masked_batch_norm(norm: nn.BatchNorm1d, x: Tensor, valid: Tensor) -> Tensor:
    """Batch norm in training of the frames that count, zeros elsewhere: sizes do not depend on their number."""
    counts = valid.unsqueeze(-1)
    number = valid.sum()
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~counts, 0)
    mean = wide.sum((0, 1)) / number
    centred = (wide - mean).masked_fill(~counts, 0)
    variance = centred.square().sum((0, 1)) / number
    momentum = cast(float, norm.momentum)
    with torch.no_grad():
        cast(Tensor, norm.num_batches_tracked).add_(1)
        cast(Tensor, norm.running_mean).lerp_(mean.to(norm.running_mean), momentum)
        cast(Tensor, norm.running_var).lerp_((variance * number / (number - 1)).to(norm.running_var), momentum)
    out = centred * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
    return out.masked_fill(~counts, 0).to(x.dtype)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each with a skip connection; then a norm.

    Args:
        width, heads, mechanism, causal, modulation: see FrameAttention.
        kernel, conv_norm: see ConvModule.
        ratio: channels inside the feed-forwards over width.
        dropout: rate for the output of each of the four, and for the hidden layer of the feed-forwards.

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
        conv_norm: str = "batch",
        ratio: int = 4,
        dropout: float = 0.1,
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        feed: dict[str, Any] = {"act_layer": nn.SiLU, "drop": dropout, **dd}
        self.norm1 = nn.LayerNorm(width, **dd)
        self.ffn1 = Mlp(width, ratio * width, **feed)
        self.norm2 = nn.LayerNorm(width, **dd)
        self.attn = FrameAttention(width, heads, mechanism, causal, modulation, **dd)
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
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """As FrameAttention."""
        x = x + 0.5 * self.ffn1(self.norm1(x))
        x = x + self.dropout(self.attn(self.norm2(x), positions, valid, cache))
        x = x + self.dropout(self.conv(x, valid, cache))
        x = x + 0.5 * self.ffn2(self.norm3(x))
        return self.norm4(x)


class Predictor(nn.Module):
    """A transducer's predictor: an embedding and an LSTM over the tokens so far, which start with the blank, token 0.

    Source: *Sequence Transduction with Recurrent Neural Networks* (arXiv 1211.3711), with the sizes of Conformer.
    """

    def __init__(self, tokens: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width, **dd)
        self.lstm = nn.LSTM(width, width, batch_first=True, **dd)

    def forward(
        self, tokens: Tensor, before: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """int64 (batch, tokens) to (batch, tokens, width), and the state of the LSTM for the next call."""
        with torch.autocast("cpu", enabled=False):  # oneDNN has no bfloat16 LSTM for CPUs without AVX-512
            states: tuple[Tensor, tuple[Tensor, Tensor]] = self.lstm(self.embed(tokens), before)
        return states


class Joint(nn.Module):
    """The joint network of a transducer: logits of every token for each frame and each place in the text."""

    def __init__(self, tokens: int, frame_width: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.frame = nn.Linear(frame_width, width, **dd)
        self.place = nn.Linear(width, width, **dd)
        self.head = nn.Linear(width, tokens, **dd)

    def forward(self, frames: Tensor, places: Tensor) -> Tensor:
        """(batch, frames, frame width), (batch, places, width) → (batch, frames, places, tokens)."""
        return self.head(torch.tanh(self.frame(frames).unsqueeze(2) + self.place(places).unsqueeze(1)))
