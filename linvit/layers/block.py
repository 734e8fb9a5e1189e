"""The blocks of which stages are stacked."""

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn

from linvit.layers.attention import Attention2d, attention_options
from linvit.layers.feed_forward import ConvFeedForward
from linvit.layers.mixer import LOCAL_SIZES, Interaction, TokenMixer
from linvit.ops import Rotary


def _drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate > 0 else nn.Identity()


class AttentionBlock(nn.Module):
    """RAVLT's and MAViT's block: x + cpe(x), then attention and feed-forward, each normed, scaled and added.

    Args:
        width: channels.
        heads: number of heads.
        mechanism: the mechanism, see Attention2d.
        attention: other arguments of Attention2d than its defaults; with softmax attention those around it alone.
        cpe: whether the block begins with its 3×3 depthwise convolution.
        ffn_ratio: hidden channels of the feed-forward over width.
        layer_scale: initial value of gamma_1 and gamma_2, shaped (1, width, 1, 1) as released: so they are decayed.
        drop_path: rate of stochastic depth.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        attention: Mapping[str, Any] | None = None,
        cpe: bool = True,
        ffn_ratio: float = 3.5,
        layer_scale: float = 1.0,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.layer_scale = layer_scale
        self.cpe = nn.Conv2d(width, width, 3, padding=1, groups=width, **dd) if cpe else None
        self.norm1 = LayerNorm2d(width, eps=1e-6, **dd)
        self.attn = Attention2d(width, heads, mechanism, **attention_options(attention, mechanism), **dd)
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
        if self.cpe is not None:
            x = x + self.cpe(x)
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), rotary))
        return x + self.drop_path(self.gamma_2 * self.ffn(self.norm2(x)))


class CareBlock(nn.Module):
    """CARE's block: mix tokens, interact within the features, then across features and memory.

    The first quarter of the channels is the memory, the other three the features.

    Args:
        width: channels, a multiple of 4.
        head_width, mechanism: see TokenMixer.
        ratios: hidden channels over width of the two interactions.
        layer_scale: initial value of gamma, shaped (width,).
        drop_path: rate of stochastic depth.
        last: whether this block ends the network: it then returns the hidden map of its second interaction, without
            layer scale and skip connection, and stochastic depth drops whole images, as in the released code.
        split, local_sizes: see TokenMixer.
        interactions: whether there is a first, and a second interaction. Nothing stands in the place of one that is
            missing: without the first, the mixed features go to the second as they are; without the second, memory and
            features meet only where a stage ends, and the last block is like the others.
        memory: whether there is one; without it all channels are features.
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
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
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
        mixed = self.mixer(x[:, self.memory_width :])
        if self.interact_features is not None:
            mixed = self.interact_features(mixed)
        if self.memory_width > 0:
            mixed = torch.cat((x[:, : self.memory_width], mixed), dim=1)
        if self.interact_memory is not None:
            mixed = self.interact_memory(mixed)
        if self.gamma is None:
            return self.drop_path(mixed)
        return x + self.drop_path(mixed * self.gamma.view(1, -1, 1, 1))
