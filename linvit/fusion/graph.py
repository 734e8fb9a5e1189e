"""Blocks for the graphs of exported files: maps and tokens stay (…, channels, positions), and nothing is transposed.

Every matrix is a 1×1 convolution or a product with the tokens last, a layer norm is a mean over channels, a rotation
exchanges rows, and projections are apart: runtimes are slow at strided slices, concatenations and splits.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from linvit.formulas.feature_map import identity
from linvit.formulas.normalizer import NORMALIZERS
from linvit.fusion import care, folds, pyramid
from linvit.fusion.timm_layers import folded_sequence
from linvit.layers import (
    Attention2d,
    AttentionBlock,
    CareBlock,
    ConvFeedForward,
    ConvStem,
    Interaction,
    Operator,
    PatchStem,
    TokenMixer,
)
from linvit.layers.mixer import Strips, ValueAttention
from linvit.ops import Rotary
from linvit.ops.state import accumulator_dtype

EPS = 1e-6  # that of linear_attention


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 without expm1, which is slow in ONNX Runtime."""
    positive = relu(x)
    return (x - positive).exp() + positive


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu1": elu1,
    "relu": relu,
    "exp": torch.exp,
    "identity": identity,
}
AXES: dict[str, Collection[str]] = {
    "feature_map": FEATURE_MAPS,
    "weighting": ("uniform", "query_mean"),
    "normalizer": NORMALIZERS.keys() - {"sum"},
}
"""The values that `read` knows."""


class ChannelNorm(nn.Module):
    """A layer norm over the channels of a map, without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred * ((centred * centred).mean(1, keepdim=True) + self.eps).rsqrt()


def read(
    query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any] | None, turn: "Turn | None" = None
) -> Tensor:
    """Attention on (batch, heads, width, tokens).

    options: of linear attention, with values that `AXES` lists; None for softmax attention. turn: rotates queries and
    keys; None for no rotation.
    """
    if options is not None:
        return _linear(query, key, value, options, turn)
    query, key = (query, key) if turn is None else (turn(query), turn(key))
    return value @ (query.mT * query.shape[-2] ** -0.5 @ key).softmax(-1).mT


def _linear(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any], turn: "Turn | None") -> Tensor:
    """`linear_attention` with the tokens last: the same formula, transposed."""
    dtype, wide = query.dtype, accumulator_dtype(query.dtype)
    kappa, scale = FEATURE_MAPS[options.get("feature_map", "elu1")], query.shape[-2] ** -0.5
    q, k, value = kappa(query.to(wide)), kappa(key.to(wide)), value.to(wide)
    rq, rk = (q, k) if turn is None else (turn(q), turn(k))
    alpha = None
    if options.get("weighting") == "query_mean":
        alpha = ((scale * q.mean(-1, keepdim=True)).mT @ k).softmax(-1)
    den = _mean(k, alpha).mT @ q
    normalizer = options.get("normalizer", "divide")
    if normalizer == "divide":  # no large numbers are subtracted, so the values need not be centred
        return (_products(value, rk, alpha) @ rq / (den + EPS)).to(dtype)
    num = den if turn is None else _mean(rk, alpha).mT @ rq
    gain, level = NORMALIZERS[normalizer](num, den, torch.ones_like(den), scale, EPS)
    mean = _mean(value, alpha)
    return (_products(value - mean, rk, alpha) @ rq * gain + mean * level).to(dtype)


def _mean(x: Tensor, alpha: Tensor | None) -> Tensor:
    """The mean over the tokens with weights α (…, 1, tokens), equal ones for None."""
    return x.mean(-1, keepdim=True) if alpha is None else x @ alpha.mT


def _products(value: Tensor, key: Tensor, alpha: Tensor | None) -> Tensor:
    """Σ_j α_j v_j ⊗ k_j."""
    return value @ key.mT / key.shape[-1] if alpha is None else value * alpha @ key.mT


class Turn:
    """The rotation of (…, width, tokens) by a table: neighbouring channels change places, which copies whole rows."""

    def __init__(self, rotary: Rotary, width: int) -> None:
        cos, sin = (table.mT for table in rotary)
        self.cos = cos.repeat_interleave(2, dim=-2)
        self.sin = torch.stack((-sin, sin), dim=-2).flatten(-3, -2)
        self.partner = torch.arange(width).unflatten(0, (-1, 2)).flip(1).flatten()

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.cos.to(x.dtype) + x.index_select(-2, self.partner) * self.sin.to(x.dtype)


class GraphAttention(nn.Module):
    """Attention2d on maps."""

    def __init__(self, attention: Attention2d) -> None:
        super().__init__()
        self.heads, self.rope, self.projected = attention.heads, attention.rope, attention.projected
        self.options = attention.operator.options
        self.inputs = nn.ModuleList(apart(attention.qkvo, 4 if attention.projected else 3))
        self.lepe, self.proj = attention.lepe, attention.proj
        self.modulate = attention.modulate

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        projections = [layer(x) for layer in self.inputs]
        query, key, value = (by_head(y, self.heads) for y in projections[:3])
        turn = Turn(rotary, query.shape[-2]) if self.rope else None
        y = read(query, key, value, self.options, turn).reshape(x.shape)
        if self.lepe is not None:
            y = y + self.lepe(projections[2])
        if self.modulate is not None:
            y = y * self.modulate(projections[3] if self.projected else x)
        return self.proj(y)


def apart(layer: nn.Conv2d, count: int) -> list[nn.Conv2d]:
    """A 1×1 convolution as several of equal width, so that no runtime has to split its output."""
    weights = layer.weight.chunk(count)
    biases = [None] * count if layer.bias is None else layer.bias.chunk(count)
    return [_pointwise(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _pointwise(weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    return layer


def by_head(x: Tensor, heads: int) -> Tensor:
    """A map as (batch, heads, width, tokens): a view."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads, -1)


class GraphFeedForward(nn.Module):
    """ConvFeedForward, its residual inside the depthwise convolution."""

    def __init__(self, feed_forward: ConvFeedForward) -> None:
        super().__init__()
        self.fc1, self.conv, self.fc2 = feed_forward.fc1, folds.with_identity(feed_forward.dwconv), feed_forward.fc2

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.conv(gelu(self.fc1(x))))


class GraphAttentionBlock(nn.Module):
    """AttentionBlock without layer scales and weights of norms."""

    def __init__(self, block: AttentionBlock) -> None:
        super().__init__()
        self.cpe = None if block.cpe is None else folds.with_identity(block.cpe)
        readers = cast(list[folds.Affine], block.attn.input_layers())
        self.norm1: nn.Module = block.norm1
        if readers:
            folds.after_layer_norm(block.norm1, readers)
            self.norm1 = ChannelNorm(block.norm1.eps)
        folds.after_layer_norm(block.norm2, [block.ffn.fc1])
        self.norm2 = ChannelNorm(block.norm2.eps)
        folds.scaled(block.attn.proj, block.gamma_1)
        folds.scaled(block.ffn.fc2, block.gamma_2)
        self.attn, self.ffn = GraphAttention(block.attn), GraphFeedForward(block.ffn)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        if self.cpe is not None:
            x = self.cpe(x)
        x = x + self.attn(self.norm1(x), rotary)
        return x + self.ffn(self.norm2(x))


class GraphValueAttention(nn.Module):
    """ValueAttention on maps."""

    def __init__(self, attention: ValueAttention) -> None:
        super().__init__()
        self.heads, self.options = attention.heads, attention.operator.options
        self.query, self.key = apart(attention.qk, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (by_head(layer(x), self.heads) for layer in (self.query, self.key))
        return read(query, key, by_head(x, self.heads), self.options).reshape(x.shape)


class GraphMixer(nn.Module):
    """TokenMixer with its local convolutions as one."""

    def __init__(self, mixer: TokenMixer) -> None:
        super().__init__()
        attended = mixer.attended
        self.attended = attended if isinstance(attended, Strips) else GraphValueAttention(attended)
        local = [conv for conv in (mixer.local3, mixer.local7) if conv is not None]
        self.stacked = nn.Sequential(*local) if mixer.stacked else None
        self.local = folds.side_by_side(local) if local and not mixer.stacked else None
        self.width = mixer.widths[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.stacked is not None:
            x = self.attended(self.stacked(x))
        elif self.local is None:
            x = self.attended(x)
        else:
            x = torch.cat([self.attended(x[:, : self.width]), self.local(x[:, self.width :])], dim=1)
        return x


class GraphInteraction(nn.Module):
    """Interaction without its skip connection, its norm folded into fc1."""

    def __init__(self, interaction: Interaction) -> None:
        super().__init__()
        self.fc1 = folds.after_batch_norm(interaction.fc1, interaction.norm)
        self.conv, self.fc2 = interaction.conv, interaction.fc2

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(gelu(self.fc1(x)))
        return x if self.fc2 is None else self.fc2(x)


class GraphCareBlock(nn.Module):
    """CareBlock without batch norms, its layer scale in the last projection."""

    def __init__(self, block: CareBlock) -> None:
        super().__init__()
        self.memory_width, self.gamma = block.memory_width, block.gamma
        features, memory = block.interact_features, block.interact_memory
        if self.gamma is not None and memory is not None:
            folds.scaled(cast(folds.Affine, memory.fc2), self.gamma)
        self.mixer = GraphMixer(block.mixer)
        self.interact_features = None if features is None else GraphInteraction(features)
        self.interact_memory = None if memory is None else GraphInteraction(memory)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixer(x[:, self.memory_width :])
        if self.interact_features is not None:
            mixed = mixed + self.interact_features(mixed)
        if self.memory_width > 0:
            mixed = torch.cat((x[:, : self.memory_width], mixed), dim=1)
        if self.gamma is not None:
            x = x + mixed * self.gamma.view(1, -1, 1, 1)
        if self.interact_memory is None:
            return x
        out: Tensor = self.interact_memory(mixed)
        return out if self.gamma is None else x + out


def graph_block(block: AttentionBlock) -> nn.Module:
    """The block for a graph; that for eager torch if `read` does not know its attention."""
    if not _is_known(block.attn.operator):
        return pyramid.fused_block(block)
    return GraphAttentionBlock(block) if folds.made_of(block, *pyramid.KNOWN) else block


def graph_care_block(block: CareBlock) -> nn.Module:
    """The same for CARE."""
    attended = block.mixer.attended
    if isinstance(attended, ValueAttention) and not _is_known(attended.operator):
        return care.fused_block(block)
    return GraphCareBlock(block) if folds.made_of(block, *care.KNOWN) else block


def _is_known(operator: Operator) -> bool:
    if operator.options is None:
        return operator.mechanism == "softmax"
    return operator.blocks is None and all(value in AXES[axis] for axis, value in operator.options.items())


FOLDS: folds.Folds = {
    AttentionBlock: graph_block,
    CareBlock: graph_care_block,
    ConvStem: folded_sequence,
    PatchStem: folded_sequence,
}
