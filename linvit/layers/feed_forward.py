"""The feed-forward half of a block."""

from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype, Ratio, TensorOptions, Width
from linvit.layers.pointwise import PointwiseConv
from linvit.ranges import Checked


class ConvFeedForward(Checked, nn.Module):
    """Two 1×1 convolutions with a 3×3 depthwise residual between them: fc2(h + dwconv(h)), h = gelu(fc1(x)).

    Args:
        width: channels in and out.
        ratio: hidden channels over width; at least one channel.
    """

    def __init__(self, width: Width, ratio: Ratio, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        dd: TensorOptions = {"device": device, "dtype": dtype}
        hidden = max(int(width * ratio), 1)
        self.fc1 = PointwiseConv(width, hidden, **dd)
        self.act = nn.GELU()
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **dd)
        self.fc2 = PointwiseConv(hidden, width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        x = self.act(self.fc1(x))
        x = self.fc2(x + self.dwconv(x))
        return x
