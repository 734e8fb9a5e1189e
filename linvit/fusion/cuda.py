"""Blocks for GPUs: a linear layer or convolution is one launch with the norm before it and the sums after it."""

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from linvit.fusion import care, folds, pyramid
from linvit.fusion.folds import first, last
from linvit.fusion.timm_layers import folded_sequence
from linvit.layers import (
    Attention2d,
    AttentionBlock,
    CareBlock,
    ConvDownsample,
    ConvStem,
    Interaction,
    PatchDownsample,
    PatchStem,
)
from linvit.layers.convolutions import PointwiseConv
from linvit.layers.mixer import ValueAttention
from linvit.layers.patches import Stem
from linvit.layers.product import surrounded
from linvit.ops import Rotary

Layers = TypeVar("Layers", bound=nn.Sequential)


class Surrounded(nn.Module):
    """A 1×1 convolution as a linear layer on (batch, height, width, channels), or another convolution of such maps.

    Args:
        layer: the convolution.
        activation: what follows it, a key of `linvit.layers.product.ACTIVATIONS`.
        eps: of a norm without weights before it; None for no norm.
    """

    def __init__(self, layer: nn.Conv2d, activation: str = "none", eps: float | None = None):
        super().__init__()
        is_linear = layer.kernel_size == layer.stride == (1, 1)
        weight = layer.weight.flatten(1) if is_linear else layer.weight.contiguous(memory_format=torch.channels_last)
        self.weight, self.bias = nn.Parameter(weight), layer.bias
        padding = cast(tuple[int, int], layer.padding)[0]
        self.options = {"eps": eps, "activation": activation, "stride": layer.stride[0], "padding": padding}

    def forward(self, *inputs: Tensor, **around: Any) -> Tensor:
        """The map that the layer makes of inputs side by side; around: residual, scale and added of `surrounded`."""
        return surrounded(inputs, self.weight, self.bias, **self.options, **around)


class OfMap(Surrounded):
    """The same of a map (batch, channels, height, width), channels last in memory."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return first(super().forward(last(x), residual=() if residual is None else [last(residual)]))


class CudaAttention(Attention2d):
    """Attention2d of the norm of its input, plus the input."""

    @classmethod
    def of(cls, attention: Attention2d, eps: float) -> "CudaAttention":
        """The attention itself, changed. eps: of the norm."""
        attention.__class__ = cls
        if attention.lepe is not None:
            folds.channels_last(attention.lepe)
        setattr(attention, "qkvo", OfMap(attention.qkvo, eps=eps))  # noqa: B010 - of another class than in Attention2d
        setattr(attention, "proj", OfMap(attention.proj))  # noqa: B010
        return cast(CudaAttention, attention)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        return self.proj(self.mixed(x, rotary), x)


class CudaAttentionBlock(nn.Module):
    """AttentionBlock; maps in and out are (batch, channels, height, width), channels last in memory."""

    def __init__(self, block: AttentionBlock):
        super().__init__()
        attention, feed_forward = block.attn, block.ffn
        self.cpe = None if block.cpe is None else folds.with_identity(block.cpe)
        folds.after_layer_norm(block.norm1, cast(list[folds.Affine], attention.input_layers()))
        folds.after_layer_norm(block.norm2, [feed_forward.fc1])
        folds.scaled(attention.proj, block.gamma_1)
        folds.scaled(feed_forward.fc2, block.gamma_2)
        self.attn = CudaAttention.of(attention, block.norm1.eps)
        self.fc1 = OfMap(feed_forward.fc1, "gelu", block.norm2.eps)
        self.conv = folds.with_identity(feed_forward.dwconv)
        self.fc2 = OfMap(feed_forward.fc2)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = self.attn(x if self.cpe is None else self.cpe(x), rotary)
        return self.fc2(self.conv(self.fc1(x)), x)


class CudaInteraction(nn.Module):
    """Interaction of maps (batch, height, width, channels) side by side, without its skip connection."""

    def __init__(self, interaction: Interaction):
        super().__init__()
        self.fc1 = Surrounded(folds.after_batch_norm(interaction.fc1, interaction.norm), "gelu")
        self.conv = folds.channels_last(interaction.conv)
        self.fc2 = None if interaction.fc2 is None else Surrounded(interaction.fc2)

    def forward(self, *inputs: Tensor, **around: Any) -> Tensor:
        """around: as of `Surrounded`, for the last layer."""
        hidden = last(self.conv(first(self.fc1(*inputs))))
        return hidden if self.fc2 is None else self.fc2(hidden, **around)


class CudaCareBlock(nn.Module):
    """CareBlock with both interactions; maps as in CudaAttentionBlock."""

    def __init__(self, block: CareBlock):
        super().__init__()
        self.memory_width, self.gamma = block.memory_width, block.gamma
        memory = cast(Interaction, block.interact_memory)
        if self.gamma is not None:
            folds.scaled(cast(folds.Affine, memory.fc2), self.gamma)
        self.mixer = block.mixer
        if isinstance(self.mixer.attended, ValueAttention):
            setattr(self.mixer.attended, "qk", OfMap(self.mixer.attended.qk))  # noqa: B010 - of another class
        self.interact_features = CudaInteraction(cast(Interaction, block.interact_features))
        self.interact_memory = CudaInteraction(memory)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(map(last, self.mixer.parts(x[:, self.memory_width :])))
        x = last(x)
        mixed = [self.interact_features(*parts, residual=parts)]
        if self.memory_width > 0:
            mixed.insert(0, x[..., : self.memory_width])
        around = {} if self.gamma is None else {"residual": mixed, "scale": self.gamma, "added": x}
        return first(self.interact_memory(*mixed, **around))


def cuda_block(block: AttentionBlock) -> nn.Module:
    """The block for a GPU; that of `pyramid` if its norm has other readers than linear layers."""
    known = folds.made_of(block, *pyramid.KNOWN)
    return CudaAttentionBlock(block) if known and block.attn.input_layers() else pyramid.fused_block(block)


def cuda_care_block(block: CareBlock) -> nn.Module:
    """The same for CARE; that of `care` if an interaction is missing."""
    known = folds.made_of(block, *care.KNOWN)
    whole = block.interact_features is not None and block.interact_memory is not None
    return CudaCareBlock(block) if known and whole else care.fused_block(block)


def cuda_downsample(downsample: ConvDownsample | PatchDownsample) -> nn.Module:
    """One convolution with its bias."""
    if isinstance(downsample, PatchDownsample):
        conv = care.fused_downsample(downsample)
    else:
        conv = pyramid.fused_downsample(downsample)
    return OfMap(conv) if type(conv) is nn.Conv2d else conv


def cuda_stem(stem: Stem) -> Stem:
    """The stem with GELU and biases in its convolutions."""
    return _with_activations(stem, nn.Conv2d)


def cuda_sequence(sequence: nn.Sequential) -> nn.Sequential:
    """A 1×1 convolution of ours with the activation after it, as at the end of pyramids."""
    return _with_activations(sequence, PointwiseConv)


def _with_activations(sequence: Layers, kind: type[nn.Conv2d]) -> Layers:
    folded_sequence(sequence)
    layers = [(name, layer) for name, layer in sequence.named_children() if type(layer) is not nn.Identity]
    for (name, conv), (following, act) in zip(layers, [*layers[1:], ("", nn.Identity())], strict=True):
        if type(conv) is kind and conv.padding_mode == "zeros":
            activation = "silu" if type(act) is nn.SiLU else "gelu" if type(act) is nn.GELU else "none"
            setattr(sequence, name, OfMap(conv, activation))
            if activation != "none":
                setattr(sequence, following, nn.Identity())
    return sequence


FOLDS: folds.Folds = {
    AttentionBlock: cuda_block,
    CareBlock: cuda_care_block,
    **dict.fromkeys((ConvDownsample, PatchDownsample), cuda_downsample),
    **dict.fromkeys((ConvStem, PatchStem), cuda_stem),
    nn.Sequential: cuda_sequence,
}
