"""The blocks of which stages are stacked."""

import torch
from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn

from linvit.layers.attention import Attention2d
from linvit.layers.feed_forward import ConvFeedForward
from linvit.layers.mixer import Interaction, TokenMixer


def _drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate > 0 else nn.Identity()


class AttentionBlock(nn.Module):
    """RAVLT's and MAViT's block: x + cpe(x), then attention and feed-forward, each normed, scaled and added.

    Args:
        width: channels.
        heads: number of heads.
        mixer: the mechanism, see Attention2d.
        ffn_ratio: hidden channels of the feed-forward over width.
        layer_scale: initial value of gamma_1 and gamma_2, shaped (1, width, 1, 1) as released: so they are decayed.
        drop_path: rate of stochastic depth.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mixer: str,
        ffn_ratio: float = 3.5,
        layer_scale: float = 1.0,
        drop_path: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.layer_scale = layer_scale
        self.cpe = nn.Conv2d(width, width, 3, padding=1, groups=width, **dd)
        self.norm1 = LayerNorm2d(width, eps=1e-6, **dd)
        self.attn = Attention2d(width, heads, mixer, **dd)
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, width, height, width) and the rotary table of its grid to a map of the same shape."""
        x = x + self.cpe(x)
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), cos, sin))
        return x + self.drop_path(self.gamma_2 * self.ffn(self.norm2(x)))


class CareBlock(nn.Module):
    """CARE's block: mix tokens, interact within the features, then across features and memory.

    The first quarter of the channels is the memory, the other three the features.

    Args:
        width: channels, a multiple of 4.
        head_width, mixer: see TokenMixer.
        ratios: hidden channels over width of the two interactions.
        layer_scale: initial value of gamma, shaped (width,).
        drop_path: rate of stochastic depth.
        last: whether this block ends the network: it then returns the hidden map of its second interaction, without
            layer scale and skip connection, and stochastic depth drops whole images, as in the released code.
    """

    def __init__(
        self,
        width: int,
        head_width: int,
        mixer: str,
        ratios: tuple[int, int],
        layer_scale: float = 1e-6,
        drop_path: float = 0.0,
        last: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.memory_width = width // 4
        self.layer_scale = layer_scale
        self.mixer = TokenMixer(width // 4, head_width, mixer, **dd)
        self.interact_features = Interaction(width - width // 4, ratios[0], **dd)
        self.interact_memory = Interaction(width, ratios[1], project=not last, **dd)
        self.gamma = None if last else nn.Parameter(torch.empty(width, **dd))
        self.drop_path = _drop_path(drop_path)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the layer scale to its initial value."""
        if self.gamma is not None:
            nn.init.constant_(self.gamma, self.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape (the last block: ratios[1] × width channels)."""
        memory = x[:, : self.memory_width]
        features = self.interact_features(self.mixer(x[:, self.memory_width :]))
        mixed = self.interact_memory(torch.cat((memory, features), dim=1))
        if self.gamma is None:
            return self.drop_path(mixed)
        return x + self.drop_path(mixed * self.gamma.view(1, -1, 1, 1))
