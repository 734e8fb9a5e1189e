"""1×1 convolutions of maps in either memory format."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype


@register_notrace_module  # symbolic tracing does not know the memory format of a map
class PointwiseConv(nn.Conv2d):
    """A 1×1 convolution; on a CPU a single matrix product if the map is channels_last.

    With one thread torch would unfold the map and copy it back, forward and backward.

    Args:
        width, out_width: channels in and out.
    """

    def __init__(self, width: int, out_width: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(width, out_width, 1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to (batch, out_width, height, width), in the same memory format."""
        if _channels_innermost(x):
            return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        return F.conv2d(x, self.weight, self.bias)


def _channels_innermost(x: Tensor) -> bool:
    """Whether this is an eager channels_last map on a CPU; compilers choose for themselves."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
