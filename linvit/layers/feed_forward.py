"""The feed-forward half of a block."""

from torch import Tensor, nn

from linvit.layers.pointwise import PointwiseConv


class ConvFeedForward(nn.Module):
    """Two 1×1 convolutions with a 3×3 depthwise residual between them: fc2(h + dwconv(h)), h = gelu(fc1(x)).

    Args:
        width: channels in and out.
        ratio: hidden channels over width.
    """

    def __init__(self, width: int, ratio: float, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        hidden = int(width * ratio)
        self.fc1 = PointwiseConv(width, hidden, **dd)
        self.act = nn.GELU()
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **dd)
        self.fc2 = PointwiseConv(hidden, width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        x = self.act(self.fc1(x))
        return self.fc2(x + self.dwconv(x))
