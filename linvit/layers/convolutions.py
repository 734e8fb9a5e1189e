"""1×1 and depthwise convolutions of maps in either memory format, and products with weights on oneDNN."""

from collections.abc import Sequence
from math import prod
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, register_notrace_module
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from linvit.arguments import is_traced
from linvit.layers.checks import TensorOptions
from linvit.ops.backend import built_for_cpu, depthwise_kernels_for

ONEDNN_FROM = 16  # images in a batch from which torch computes 1×1 convolutions with oneDNN, whatever the threads
HAS_PRODUCT = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private in torch, and only in builds with oneDNN


@register_notrace_module  # symbolic tracing does not know the memory format of a map
class PointwiseConv(nn.Conv2d):
    """A 1×1 convolution; a single matrix product if the channels of the map are innermost in memory.

    On GPUs that is a linear layer on (tokens, channels), whose output has them innermost too. On a CPU with one thread
    torch would unfold the maps of small batches and copy them back, forward and backward. In float32 the product is
    that of oneDNN where possible: MKL's, that of F.linear, takes twice the time on processors of AMD.

    Args:
        width, out_width: channels in and out.
        kernel_size, stride, padding, options: as of nn.Conv2d, whose arguments libraries pass that build a layer of the
            same class, such as peft; a 1×1 convolution has no other values.
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

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to (batch, out_width, height, width), in the same memory format."""
        if x.device.type != "cpu" and x.stride(1) == 1 and not torch.compiler.is_exporting():
            rows = F.linear(x.permute(0, 2, 3, 1).flatten(0, 2), self.weight.flatten(1), self.bias)
            return rows.view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)
        if not _channels_innermost(x):
            return F.conv2d(x, self.weight, self.bias)
        tokens, weight = x.permute(0, 2, 3, 1), self.weight.flatten(1)
        if runs_on_onednn(x, self.weight):
            return product(tokens, weight, self.bias).permute(0, 3, 1, 2)
        # of such maps torch gives 1×1 convolutions to oneDNN
        chosen = len(x) >= ONEDNN_FROM or torch.get_num_threads() > 1
        if chosen and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            return F.conv2d(x, self.weight, self.bias)
        return F.linear(tokens, weight, self.bias).permute(0, 3, 1, 2)


@register_notrace_module  # symbolic tracing does not know the memory format of a map
class DepthwiseConv(nn.Conv2d):
    """A depthwise convolution of stride 1 with an odd kernel.

    On a GPU it is a kernel of `linvit.kernels` if that is exact there; on a CPU the gradient of weights other than
    3×3, of which oneDNN is faster, is that of `linvit.kernels.cpu` once it is built.

    Args:
        width: channels in and out.
        kernel: (height, width) of the kernel.
    """

    def __init__(self, width: int, kernel: tuple[int, int], **dd: Unpack[TensorOptions]) -> None:
        padding = (kernel[0] // 2, kernel[1] // 2)
        super().__init__(width, width, kernel, padding=padding, groups=width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        out = depthwise_on_gpu(x, [[self]], asking=self)
        if out is not None:
            return out
        kernels = None if self.kernel_size == (3, 3) else built_for_cpu()
        if kernels is not None and kernels.depthwise.obstacle(x, self.weight, self.padding) is None:
            return kernels.depthwise.depthwise_conv(x, self.weight, self.bias, self.padding)
        return self._conv_forward(x, self.weight, self.bias)


@register_notrace_function
def channels_of(x: Tensor, first: int, end: int | None = None) -> Tensor:
    """Some channels of a map. Their gradient has the channels innermost, if those of the map are."""
    if x.stride(1) != 1:
        return x[:, first:end]
    return x.permute(0, 2, 3, 1)[..., first:end].permute(0, 3, 1, 2)


def convolved(conv: nn.Module, x: Tensor, gelu: bool = False, residual: bool = False) -> Tensor:
    """conv(h) or h + conv(h) with h = GELU(x) or x, in one launch where `depthwise_on_gpu` can."""
    out = depthwise_on_gpu(x, [[conv]], gelu=gelu, residual=residual)
    if out is not None:
        return out
    if gelu:
        x = F.gelu(x)
    out = conv(x)
    return x + out if residual else out


def depthwise_on_gpu(
    x: Tensor,
    groups: Sequence[Sequence[nn.Module]],
    y: Tensor | None = None,
    gate: Tensor | None = None,
    gelu: bool = False,
    residual: bool = False,
    asking: nn.Module | None = None,
) -> Tensor | None:
    """(y + h + the convolutions of h) · gate, h = GELU(x) or x, in one launch; None where plain torch has to do it.

    groups: the convolutions of each group of channels, one or two; the results of two are added. Layers that were
    wrapped, patched or given hooks compute for themselves. asking: the layer that calls this, whose hooks have run.
    """
    kernels = depthwise_kernels_for(x)
    layers = [layer for group in groups for layer in group]
    if kernels is None or not all(layer is asking or _is_unchanged(layer) for layer in layers):
        return None
    weights = [cast(nn.Conv2d, layer).weight for layer in layers]
    biases = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    if torch.is_autocast_enabled(x.device.type) and not residual:
        x = x.to(torch.get_autocast_dtype(x.device.type))  # as a convolution does, but a sum does not
    if len(biases) not in (0, len(layers)) or kernels.depthwise_obstacle(x, weights, (y, gate)) is not None:
        return None
    around: dict[str, Any] = {"y": y, "gate": gate, "gelu": gelu, "residual": residual}
    out: Tensor = kernels.depthwise_convolutions(x, weights, biases, groups=[len(group) for group in groups], **around)
    return out


def _is_unchanged(layer: nn.Module) -> bool:
    changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is DepthwiseConv and not changed


def product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    """F.linear followed by "gelu" or "none" in one pass of oneDNN, if `runs_on_onednn`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")


def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    """The floating-point operations of a product, which torch's FlopCounterMode does not know."""
    return 2 * prod(x_shape) * weight_shape[0]


if HAS_PRODUCT and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_flops)


def runs_on_onednn(*tensors: Tensor) -> bool:
    """Whether this is plain inference in float32 on a CPU: no compiler, no gradient, no autocast."""
    return (
        not is_traced()  # comes first, because the rest would break a compiler's graph
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and torch.backends.mkldnn.is_available()
        and HAS_PRODUCT
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and not torch.is_autocast_enabled("cpu")
    )


def _channels_innermost(x: Tensor) -> bool:
    """Whether this is an eager channels_last map on a CPU; compilers choose for themselves."""
    if is_traced() or x.device.type != "cpu":
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
