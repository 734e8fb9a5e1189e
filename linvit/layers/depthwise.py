"""Depthwise convolutions that keep the sides of a map."""

from timm.layers import register_notrace_module
from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype
from linvit.ops.backend import built_for_cpu


@register_notrace_module  # symbolic tracing does not know the memory format of a map
class DepthwiseConv(nn.Conv2d):
    """A depthwise convolution of stride 1 with an odd kernel; on a CPU it uses `linvit.kernels.cpu` once that is built.

    Args:
        width: channels in and out.
        kernel: (height, width) of the kernel.
    """

    def __init__(self, width: int, kernel: tuple[int, int], device: Device = None, dtype: Dtype = None) -> None:
        padding = (kernel[0] // 2, kernel[1] // 2)
        super().__init__(width, width, kernel, padding=padding, groups=width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        kernels = built_for_cpu()
        if kernels is not None and kernels.depthwise.obstacle(x, self.weight, self.padding) is None:
            x = kernels.depthwise.depthwise_conv(x, self.weight, self.bias, self.padding)
            return x
        x = self._conv_forward(x, self.weight, self.bias)
        return x
