"""The arithmetic of folding. It changes the layers it is given, which `fuse` has copied.

Weights are computed in float64 and rounded once, to their original dtype.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import fuse_conv_bn_eval

from linvit.layers.convolutions import DepthwiseConv, PointwiseConv, convolved, product, runs_on_onednn
from linvit.ops.backend import depthwise_kernels_for

LAYERS = (DepthwiseConv, PointwiseConv, nn.Conv2d, nn.GELU, nn.Identity, DropPath)
"""Layers that every block of this package may have."""
Affine = nn.Conv1d | nn.Conv2d | nn.Linear
Folds = dict[type[nn.Module], Callable[[Any], nn.Module]]
"""The fold of each class of module; subclasses are not folded."""
Layer = TypeVar("Layer", bound=Affine)
Module = TypeVar("Module", bound=nn.Module)


def last(x: Tensor) -> Tensor:
    """(batch, channels, height, width) as (batch, height, width, channels): a view."""
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    """(batch, height, width, channels) as (batch, channels, height, width): a view."""
    return x.permute(0, 3, 1, 2)


def after_gelu(product: "Product", conv: DepthwiseConv, x: Tensor) -> Tensor:
    """conv of the product, which ends in GELU; (batch, height, width, channels) in and out."""
    if depthwise_kernels_for(x) is not None:  # takes the GELU of what it reads
        return last(convolved(conv, first(F.linear(x, product.weight, product.bias)), gelu=True))
    return last(conv(first(product(x))))


def plus(fresh: Tensor, x: Tensor) -> Tensor:
    """x + fresh, written into `fresh`, which only this code may read."""
    return fresh.add_(x) if fresh.dtype == x.dtype else x + fresh


class Product(nn.Linear):
    """A linear layer followed by "gelu" or "none", in one pass of oneDNN where possible.

    F.linear writes the bias first and then adds to it, and GELU would be another pass.
    """

    def __init__(
        self, width: int, out_width: int, bias: bool = True, activation: str = "none", device: str | None = None
    ):
        super().__init__(width, out_width, bias, device=device)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if runs_on_onednn(x):
            return product(x, self.weight, self.bias, self.activation)
        out: Tensor = super().forward(x)
        return out if self.activation == "none" else _gelu(out)


class MapProduct(Product):
    """The same on a channels-last map (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return first(super().forward(last(x)))


class OnLast(nn.Module):
    """A layer that reads maps, applied to (batch, height, width, channels)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return last(self.layer(first(x)))


class GeluConv(nn.Conv2d):
    """A convolution followed by GELU, in one pass of oneDNN where possible."""

    def forward(self, x: Tensor) -> Tensor:
        if runs_on_onednn(x):
            window = (self.padding, self.stride, self.dilation)
            return torch.ops.mkldnn._convolution_pointwise(
                x, self.weight, self.bias, *window, self.groups, "gelu", [], "none"
            )
        return _gelu(super().forward(x))


def _gelu(fresh: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(fresh)


def linear(layer: nn.Conv2d, activation: str = "none", kind: type[Product] = Product) -> Product:
    """A 1×1 convolution as a product over the last dimension, for maps whose channels come last."""
    product = kind(layer.in_channels, layer.out_channels, layer.bias is not None, activation, device="meta")
    return _filled(product, layer.weight.flatten(1), layer.bias, layer.weight)


def products(attention: Module, *names: str) -> Module:
    """The attention with products instead of the 1×1 convolutions of these names."""
    for name in names:
        setattr(attention, name, linear(getattr(attention, name), kind=MapProduct))
    return attention


def with_gelu(layer: nn.Conv2d) -> GeluConv:
    """gelu(layer(x)) as one step."""
    conv = GeluConv(
        layer.in_channels,
        layer.out_channels,
        cast(tuple[int, int], layer.kernel_size),
        cast(tuple[int, int], layer.stride),
        cast(str | tuple[int, int], layer.padding),
        cast(tuple[int, int], layer.dilation),
        layer.groups,
        layer.bias is not None,
        device="meta",
    )
    return channels_last(_filled(conv, layer.weight, layer.bias, layer.weight))


def after_affine(layer: Layer, scale: Tensor, shift: Tensor) -> Layer:
    """layer(scale · x + shift) as a layer of x: W' = W · scale, b' = b + W shift. Exact if no zeros are padded.

    Args:
        layer: a linear layer or a convolution, with groups or without.
        scale, shift: (channels in,).
    """
    groups = getattr(layer, "groups", 1)
    by_group = layer.weight.double().unflatten(0, (groups, -1))
    shape = (groups, 1, -1, *(1,) * (by_group.ndim - 3))
    offset = (by_group * shift.double().reshape(shape)).flatten(2).sum(-1).flatten()
    if layer.bias is not None:
        offset = offset + layer.bias.double()
    return _filled(layer, (by_group * scale.double().reshape(shape)).flatten(0, 1), offset, layer.weight)


def after_batch_norm(layer: Layer, norm: nn.BatchNorm2d) -> Layer:
    """layer(norm(x)) as a layer of x, exact if no zeros are padded; the norm must have running statistics."""
    mean, variance = cast(Tensor, norm.running_mean).double(), cast(Tensor, norm.running_var).double()
    scale = norm.weight.double() * (variance + norm.eps).rsqrt()
    return after_affine(layer, scale, norm.bias.double() - mean * scale)


def after_layer_norm(norm: nn.LayerNorm, layers: Iterable[Affine]) -> nn.LayerNorm:
    """Fold the weights of a layer norm into all layers that read it; returns a norm without weights."""
    if norm.elementwise_affine:
        shift = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        for layer in layers:
            after_affine(layer, norm.weight, shift)
    return nn.LayerNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)


def before_batch_norm(layer: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """norm(layer(x)) as a convolution of x."""
    dtype = layer.weight.dtype
    return fuse_conv_bn_eval(layer.double(), norm.double()).to(dtype).requires_grad_(False)


def before_norm_of_first(layer: nn.Linear, norm: nn.BatchNorm1d) -> nn.Linear:
    """The layer followed by a batch norm of its first channels out, as one layer."""
    mean, variance = cast(Tensor, norm.running_mean).double(), cast(Tensor, norm.running_var).double()
    scale = norm.weight.double() * (variance + norm.eps).rsqrt()
    others = (0, layer.out_features - norm.num_features)
    shift, scale = pad(norm.bias.double() - mean * scale, others), pad(scale, others, value=1.0)
    bias = shift if layer.bias is None else layer.bias.double() * scale + shift
    return _filled(layer, layer.weight.double() * scale.unsqueeze(-1), bias, layer.weight)


def scaled(layer: Layer, scale: Tensor) -> Layer:
    """scale · layer(x) as a layer of x; `scale` has one number per channel out."""
    scale = scale.double().flatten()
    weight = layer.weight.double() * scale.reshape(-1, *(1,) * (layer.weight.ndim - 1))
    return _filled(layer, weight, None if layer.bias is None else layer.bias.double() * scale, layer.weight)


def with_identity(layer: nn.Conv2d) -> nn.Conv2d:
    """x + layer(x) as one depthwise convolution: its middle tap grows by one."""
    weight = layer.weight.double().clone()
    weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += 1
    return channels_last(_filled(layer, weight, layer.bias, layer.weight))


def summed(layers: Sequence[nn.Conv2d]) -> nn.Conv2d:
    """The sum of depthwise convolutions of the same map, as one convolution of the largest size."""
    return _depthwise(torch.stack(_of_one_size(layers)).sum(0), torch.stack(_biases(layers)).sum(0), layers[0].weight)


def side_by_side(layers: Sequence[nn.Conv2d]) -> nn.Conv2d:
    """Depthwise convolutions of consecutive groups of channels, as one convolution of the largest size."""
    return _depthwise(torch.cat(_of_one_size(layers)), torch.cat(_biases(layers)), layers[0].weight)


def averaged(layers: Sequence[nn.Linear]) -> nn.Linear:
    """The mean of linear layers of the same input, as one layer."""
    weight = torch.stack([layer.weight.double() for layer in layers]).mean(0)
    return _filled(layers[0], weight, torch.stack(_biases(layers)).mean(0), layers[0].weight)


def channels_last(layer: Module) -> Module:
    """The layer with channels-last weights, so that its output is always channels last."""
    return layer.to(memory_format=torch.channels_last)


def made_of(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether everything in the module is of exactly these classes: nothing quantized, adapted or reparametrized."""
    return all(type(layer) in types for layer in module.modules())


def _biases(layers: Sequence[Affine]) -> list[Tensor]:
    return [cast(Tensor, layer.bias).double() for layer in layers]


def _of_one_size(layers: Sequence[nn.Conv2d]) -> list[Tensor]:
    height, width = (max(layer.kernel_size[i] for layer in layers) for i in range(2))
    weights = []
    for layer in layers:
        rows, columns = (height - layer.kernel_size[0]) // 2, (width - layer.kernel_size[1]) // 2
        weights.append(pad(layer.weight.double(), (columns, columns, rows, rows)))
    return weights


def _depthwise(weight: Tensor, bias: Tensor, like: Tensor) -> nn.Conv2d:
    channels, _, height, width = weight.shape
    padding = height // 2, width // 2
    layer = nn.Conv2d(channels, channels, (height, width), padding=padding, groups=channels, device="meta")
    return channels_last(_filled(layer, weight, bias, like))


def _filled(layer: Layer, weight: Tensor, bias: Tensor | None, like: Tensor) -> Layer:
    """The layer with these weights, in the dtype and on the device of `like`."""
    layer.weight = nn.Parameter(weight.to(like).contiguous(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.to(like), requires_grad=False)
    return layer
