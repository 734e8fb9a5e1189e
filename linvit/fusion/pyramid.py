"""The block of RAVLT and MAViT for inference: channels last, norms without weights, no layer scales."""

from typing import cast

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from linvit.fusion import folds
from linvit.fusion.folds import first, last, plus
from linvit.fusion.timm_layers import folded_sequence
from linvit.layers import Attention2d, AttentionBlock, ConvDownsample, ConvFeedForward, ConvStem, Operator
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.patches import Stem
from linvit.ops import Rotary

KNOWN = (AttentionBlock, Attention2d, Operator, ConvFeedForward, LayerNorm2d, nn.Tanh, *folds.LAYERS)
"""The layers of a block that can be folded."""


class FusedAttention(Attention2d):
    """Attention2d with products instead of 1×1 convolutions, and its sum in place."""

    @classmethod
    def of(cls, attention: Attention2d) -> "FusedAttention":
        """The attention itself, changed."""
        attention.__class__ = cls
        fused = cast(FusedAttention, attention)
        if fused.lepe is not None:
            folds.channels_last(fused.lepe)
        return folds.products(fused, "qkvo", "proj")

    def with_local(self, y: Tensor, value: Tensor) -> Tensor:
        return y if self.lepe is None else plus(self.lepe(value), y)


class FusedFeedForward(nn.Module):
    """ConvFeedForward on (batch, height, width, channels), its residual inside the depthwise convolution."""

    def __init__(self, feed_forward: ConvFeedForward):
        super().__init__()
        self.fc1 = folds.linear(feed_forward.fc1, "gelu")
        self.conv = cast(DepthwiseConv, folds.with_identity(feed_forward.dwconv))
        self.fc2 = folds.linear(feed_forward.fc2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(folds.after_gelu(self.fc1, self.conv, x))


class FusedAttentionBlock(nn.Module):
    """AttentionBlock; maps in and out are (batch, channels, height, width), channels last in memory."""

    def __init__(self, block: AttentionBlock):
        super().__init__()
        attention, feed_forward = block.attn, block.ffn
        self.cpe = None if block.cpe is None else folds.with_identity(block.cpe)
        readers = cast(list[folds.Affine], attention.input_layers())  # made_of has checked their classes
        if readers:
            self.norm1 = folds.after_layer_norm(block.norm1, readers)
        else:  # the same norm, over the last dimension
            self.norm1 = nn.LayerNorm(block.norm1.normalized_shape, block.norm1.eps, device="meta")
            self.norm1.weight, self.norm1.bias = block.norm1.weight, block.norm1.bias
        self.norm2 = folds.after_layer_norm(block.norm2, [feed_forward.fc1])
        folds.scaled(attention.proj, block.gamma_1)
        folds.scaled(feed_forward.fc2, block.gamma_2)
        self.attn = FusedAttention.of(attention)
        self.ffn = FusedFeedForward(feed_forward)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = last(x if self.cpe is None else self.cpe(x))
        x = plus(last(self.attn(first(self.norm1(x)), rotary)), x)
        return first(plus(self.ffn(self.norm2(x)), x))


def fused_block(block: AttentionBlock) -> nn.Module:
    """The block for inference; a block with layers of unknown classes stays as it is."""
    return FusedAttentionBlock(block) if folds.made_of(block, *KNOWN) else block


def fused_downsample(downsample: ConvDownsample) -> nn.Module:
    """One convolution, whose output is channels last."""
    if not folds.made_of(downsample, ConvDownsample, nn.Conv2d, nn.BatchNorm2d):
        return downsample
    return folds.channels_last(folds.before_batch_norm(downsample.conv, downsample.norm))


def fused_stem(stem: Stem) -> Stem:
    """The stem without its batch norms, GELU inside its convolutions; its output is channels last."""
    folded_sequence(stem)
    conv = None
    for name, layer in stem.named_children():
        if type(layer) is nn.GELU and conv is not None:
            setattr(stem, conv, folds.with_gelu(cast(nn.Conv2d, stem.get_submodule(conv))))
            setattr(stem, name, nn.Identity())
        elif type(layer) is not nn.Identity:
            conv = name if type(layer) is nn.Conv2d else None
    return folds.channels_last(stem)


FOLDS: folds.Folds = {AttentionBlock: fused_block, ConvDownsample: fused_downsample, ConvStem: fused_stem}
