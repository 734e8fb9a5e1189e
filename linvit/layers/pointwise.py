"""1×1 convolutions of maps in either memory format."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module  # symbolic tracing does not know the memory format of a map
class PointwiseConv(nn.Conv2d):
    """A 1×1 convolution; on a CPU a single matrix product if the map is channels_last.

    With one thread torch would unfold the map and copy it back, forward and backward.

    Args:
        width, out_width: channels in and out.
        kernel_size, stride, padding, options: as of nn.Conv2d, whose arguments libraries pass that build a layer of the
            same class, such as peft; a 1×1 convolution has no other values.

    Raises:
        ValueError: for another kernel size, stride or padding.
    """

    def __init__(
        self,
        width: int,
        out_width: int,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        **options: Any,
    ) -> None:
        super().__init__(width, out_width, kernel_size, stride, padding, **options)
        if (self.kernel_size, self.stride, self.padding, self.groups) != ((1, 1), (1, 1), (0, 0), 1):
            raise ValueError(
                f"PointwiseConv has kernel size {self.kernel_size}, stride {self.stride}, padding {self.padding} and"
                f" {self.groups} groups, expected a 1×1 convolution: use nn.Conv2d"
            )

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
