"""The blocks that the stages of RAVLT, MAViT, CARE and H-ViT³ are made of, and their feed-forward."""

from typing import Any, Unpack

import torch
from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn
from torch.nn.functional import gelu

from linvit.layers.attention import Attention2d, attention_options
from linvit.layers.checks import TensorOptions
from linvit.layers.convolutions import DepthwiseConv, PointwiseConv, channels_of, convolved
from linvit.layers.mixer import LOCAL_SIZES, Interaction, TokenMixer
from linvit.layers.recent_mechanisms import InnerStepAttention
from linvit.ops import Rotary


def _drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate > 0 else nn.Identity()


class ConvFeedForward(nn.Module):
    """Two 1×1 convolutions with a 3×3 depthwise residual between them: fc2(h + dwconv(h)), h = gelu(fc1(x)).

    Args:
        width: channels in and out.
        ratio: hidden channels over width; at least one channel.
    """

    def __init__(self, width: int, ratio: float, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        hidden = max(int(width * ratio), 1)
        self.fc1 = PointwiseConv(width, hidden, **dd)
        self.dwconv = DepthwiseConv(hidden, (3, 3), **dd)
        self.fc2 = PointwiseConv(hidden, width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        return self.fc2(convolved(self.dwconv, self.fc1(x), gelu=True, residual=True))


class AttentionBlock(nn.Module):
    """RAVLT's and MAViT's block: x + cpe(x), then attention and feed-forward, each normed, scaled and added.

    Args:
        width: channels.
        heads: number of heads.
        mechanism: see Attention2d.
        attention: options of Attention2d; softmax attention accepts only modulation, lepe and rope.
        cpe: start the block with a 3×3 depthwise convolution, the conditional position encoding.
        ffn_ratio: hidden channels of the feed-forward over width.
        layer_scale: initial value of gamma_1 and gamma_2. They have the released shape (1, width, 1, 1), so timm
            applies weight decay to them.
        drop_path: rate of stochastic depth.
    """

    attention_class: type[Attention2d] = Attention2d

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        attention: dict[str, Any] | None = None,
        cpe: bool = True,
        ffn_ratio: float = 3.5,
        layer_scale: float = 1.0,
        drop_path: float = 0.0,
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.layer_scale = layer_scale
        self.cpe = DepthwiseConv(width, (3, 3), **dd) if cpe else None
        self.norm1 = LayerNorm2d(width, eps=1e-6, **dd)
        self.attn = self.attention_class(width, heads, mechanism, **attention_options(attention, mechanism), **dd)
        self.norm2 = LayerNorm2d(width, eps=1e-6, **dd)
        self.ffn = ConvFeedForward(width, ffn_ratio, **dd)
        self.gamma_1 = nn.Parameter(torch.empty(1, width, 1, 1, **dd))
        self.gamma_2 = nn.Parameter(torch.empty(1, width, 1, 1, **dd))
        self.drop_path = _drop_path(drop_path)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both layer scales to their initial value."""
        nn.init.constant_(self.gamma_1, self.layer_scale)
        nn.init.constant_(self.gamma_2, self.layer_scale)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map (batch, width, height, width) and the rotation of its grid to a map of the same shape."""
        return self.with_feed_forward(self.with_attention(x, rotary))

    def with_attention(self, x: Tensor, rotary: Rotary) -> Tensor:
        """The first half of the block."""
        if self.cpe is not None:
            x = convolved(self.cpe, x, residual=True)
        return x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), rotary))

    def with_feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the block."""
        return x + self.drop_path(self.gamma_2 * self.ffn(self.norm2(x)))


class CareBlock(nn.Module):
    """CARE's block: mix tokens, interact within the features, then across features and memory.

    The first quarter of the channels is the memory, the other three quarters are the features.

    Args:
        width: channels, a multiple of 4 with memory.
        head_width, mechanism: see TokenMixer.
        ratios: hidden channels over width of the two interactions.
        layer_scale: initial value of gamma, shaped (width,).
        drop_path: rate of stochastic depth.
        last: this is the last block of the network. It returns the hidden map of its second interaction without layer
            scale and skip connection, so stochastic depth drops the features of an image completely, as released.
        split, local_sizes: see TokenMixer.
        interactions: whether to keep the first and the second interaction. A missing one is not replaced: without the
            first, the mixed features enter the second unchanged; without the second, memory and features meet only at
            the end of a stage, and the last block is like the others.
        memory: keep the memory; without it all channels are features.
    """

    def __init__(
        self,
        width: int,
        head_width: int,
        mechanism: str,
        ratios: tuple[int, int],
        layer_scale: float = 1e-6,
        drop_path: float = 0.0,
        last: bool = False,
        split: str = "asymmetric",
        interactions: tuple[bool, bool] = (True, True),
        memory: bool = True,
        local_sizes: tuple[int, ...] = LOCAL_SIZES,
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        first, second = interactions
        self.memory_width = width // 4 if memory else 0
        self.layer_scale = layer_scale
        features = width - self.memory_width
        self.mixer = TokenMixer(features, head_width, mechanism, split, local_sizes, **dd)
        self.interact_features = Interaction(features, ratios[0], **dd) if first else None
        self.interact_memory = Interaction(width, ratios[1], project=not last, **dd) if second else None
        self.gamma = None if last and second else nn.Parameter(torch.empty(width, **dd))
        self.drop_path = _drop_path(drop_path)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the layer scale to its initial value."""
        if self.gamma is not None:
            nn.init.constant_(self.gamma, self.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape (the last block: ratios[1] × width channels)."""
        mixed: Tensor = self.mixer(channels_of(x, self.memory_width))
        if self.interact_features is not None:
            mixed = self.interact_features(mixed)
        if self.memory_width > 0:
            mixed = torch.cat((channels_of(x, 0, self.memory_width), mixed), dim=1)
        if self.interact_memory is not None:
            mixed = self.interact_memory(mixed)
        if self.gamma is None:
            return self.drop_path(mixed)
        return x + self.drop_path(mixed * self.gamma.view(1, -1, 1, 1))


class GeluFeedForward(ConvFeedForward):
    """ConvFeedForward with a GELU after the convolution too: fc2(gelu(h + dwconv(h))), h = gelu(fc1(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(convolved(self.dwconv, self.fc1(x), gelu=True, residual=True)))


class InnerStepBlock(nn.Module):
    """x + cpe(x), then InnerStepAttention with MLLA's rotation and GeluFeedForward, each normed and added.

    Args:
        width, heads: channels, and heads of the first branch.
        ffn_ratio: hidden channels of the feed-forward over width.
        drop_path: rate of stochastic depth.
    """

    def __init__(
        self, width: int, heads: int, ffn_ratio: float = 4.0, drop_path: float = 0.0, **dd: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        self.cpe = DepthwiseConv(width, (3, 3), **dd)
        self.norm1 = LayerNorm2d(width, eps=1e-5, **dd)
        self.attn = InnerStepAttention(width, heads, "vittt", (1, 1), rope=True, **dd)
        self.norm2 = LayerNorm2d(width, eps=1e-5, **dd)
        self.ffn = GeluFeedForward(width, ffn_ratio, **dd)
        self.drop_path = _drop_path(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        x = convolved(self.cpe, x, residual=True)
        grid = (x.shape[-2], x.shape[-1])
        tokens = self.attn(self.norm1(x).flatten(2).mT, grid)
        x = x + self.drop_path(tokens.mT.unflatten(-1, grid))
        return x + self.drop_path(self.ffn(self.norm2(x)))
