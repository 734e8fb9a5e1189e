"""The block of H-ViT³: an inner step on the tokens of a map, and a feed-forward with a convolution inside."""

from typing import Unpack

from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn
from torch.nn.functional import gelu

from linvit.layers.block import ConvFeedForward
from linvit.layers.checks import TensorOptions
from linvit.layers.convolutions import DepthwiseConv, convolved
from linvit.layers.recent_mechanisms import InnerStepAttention


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
        self.drop_path: nn.Module = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        x = convolved(self.cpe, x, residual=True)
        grid = (x.shape[-2], x.shape[-1])
        tokens = self.attn(self.norm1(x).flatten(2).mT, grid)
        x = x + self.drop_path(tokens.mT.unflatten(-1, grid))
        return x + self.drop_path(self.ffn(self.norm2(x)))
