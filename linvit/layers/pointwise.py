"""1×1 convolutions of maps whose channels may lie innermost in memory."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module  # how a map lies in memory is not known when symbols are traced
class PointwiseConv(nn.Conv2d):
    """A 1×1 convolution; on a CPU one product where the channels of the map lie innermost (channels_last).

    torch sends 1×1 convolutions of one thread to a path that unfolds the map and copies it back, forward and backward.

    Args:
        width, out_width: channels in and out.
    """

    def __init__(self, width: int, out_width: int, device=None, dtype=None):
        super().__init__(width, out_width, 1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to (batch, out_width, height, width), in the same memory format."""
        if _channels_innermost(x):
            return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        return F.conv2d(x, self.weight, self.bias)


def _channels_innermost(x: Tensor) -> bool:
    """Whether this is an eager map on a CPU whose channels lie innermost; compilers choose for themselves."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
