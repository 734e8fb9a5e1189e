"""Depthwise convolution of channels-last maps, with a fast gradient of its weight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from linvit.arguments import is_traced
from linvit.kernels.support import transforms


def obstacle(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> str | None:
    """Why a convolution of stride 1 cannot run here or would gain nothing, as a clause; None if it should."""
    if is_traced() or transforms():
        return "a compiler or a trace, forward-mode gradients or a transform of torch.func are active"
    if not (x.is_cpu and x.dtype == weight.dtype == torch.float32) or torch.is_autocast_enabled("cpu"):
        return "map and weight are not float32 on a CPU"
    if x.stride(1) != 1 or x.numel() == 0:
        return "the map is not channels last"
    if tuple(2 * zeros + 1 for zeros in padding) != tuple(weight.shape[2:]):
        return "the convolution changes the height or width of the map"
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return "the weight needs no gradient"
    return None


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """`torch.nn.functional.conv2d` of stride 1 with one group per channel, where `obstacle` returns None.

    For a 5×5 weight, oneDNN takes four to seven times as long for the weight's gradient as for the rest; at 3×3 it is
    faster than this kernel, so layers of that size keep using it.

    Args:
        x: (batch, channels, height, width), channels last in memory, other strides arbitrary.
        weight: (channels, 1, height, width of the kernel).
        bias: (channels,) or None.
        padding: rows and columns of zeros on each side; half of an odd kernel.

    Returns:
        (batch, channels, height, width).
    """
    out: Tensor = _Depthwise.apply(x, weight, bias, padding)
    return out


class _Depthwise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return F.conv2d(x, weight, bias, padding=padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        ours = for_weight and not torch.is_grad_enabled()  # torch computes the gradient of the gradient
        by_x, by_weight, by_bias = torch.ops.aten.convolution_backward(
            grad, x, weight, [len(weight)], [1, 1], ctx.padding, [1, 1], False, [0, 0], len(weight),
            [for_x, for_weight and not ours, for_bias and not ours],
        )  # fmt: skip
        if ours:
            grad = grad.contiguous(memory_format=torch.channels_last)
            by_weight = torch.ops.linvit_cpu.depthwise_weight_gradient(grad, x, weight.shape[2:], ctx.padding)
            by_bias = grad.sum((0, 2, 3)) if for_bias else None
        return by_x, by_weight, by_bias, None
