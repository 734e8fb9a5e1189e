"""The arithmetic of folding, on layers that `fuse` has copied: what is given is changed or used up.

Weights are computed in float64 and rounded once, to the dtype that they had.
"""

from collections.abc import Iterable, Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import fuse_conv_bn_eval

from linvit.fusion.maps import GeluConv, MapProduct, Product
from linvit.layers.depthwise import DepthwiseConv
from linvit.layers.pointwise import PointwiseConv

# in every block of ours
LAYERS = (DepthwiseConv, PointwiseConv, nn.Conv2d, nn.GELU, nn.Identity, DropPath)
Affine = nn.Conv1d | nn.Conv2d | nn.Linear


def linear(layer: nn.Conv2d, activation: str = "none", kind: type[Product] = Product) -> Product:
    """A 1×1 convolution as a product over the last dimension, for maps whose channels come last."""
    product = kind(layer.in_channels, layer.out_channels, layer.bias is not None, activation, device="meta")
    return _filled(product, layer.weight.flatten(1), layer.bias, layer.weight)


def products(attention: nn.Module, *names: str) -> nn.Module:
    """An attention on maps with products for its 1×1 convolutions of these names."""
    for name in names:
        setattr(attention, name, linear(getattr(attention, name), kind=MapProduct))
    return attention


def with_gelu(layer: nn.Conv2d) -> GeluConv:
    """gelu(layer(x)) as one step."""
    window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    conv = GeluConv(layer.in_channels, layer.out_channels, *window, layer.bias is not None, device="meta")
    return channels_last(_filled(conv, layer.weight, layer.bias, layer.weight))


def behind(layer: Affine, scale: Tensor, shift: Tensor) -> Affine:
    """layer(scale · x + shift) as a layer of x: W' = W · scale, b' = b + W shift. Exact where no zeros are padded.

    Args:
        layer: linear or convolution, one with groups too.
        scale, shift: (channels in,).
    """
    groups = getattr(layer, "groups", 1)
    by_group = layer.weight.double().unflatten(0, (groups, -1))
    shape = (groups, 1, -1, *(1,) * (by_group.ndim - 3))
    offset = (by_group * shift.double().reshape(shape)).flatten(2).sum(-1).flatten()
    if layer.bias is not None:
        offset = offset + layer.bias.double()
    return _filled(layer, (by_group * scale.double().reshape(shape)).flatten(0, 1), offset, layer.weight)


def behind_batch_norm(layer: Affine, norm: nn.BatchNorm2d) -> Affine:
    """layer(norm(x)) as a layer of x, exact where no zeros are padded."""
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    return behind(layer, scale, norm.bias.double() - norm.running_mean.double() * scale)


def behind_layer_norm(norm: nn.LayerNorm, layers: Iterable[Affine]) -> nn.LayerNorm:
    """Hand the weights of a layer norm to all the layers that read it; what is left of the norm is returned."""
    if norm.elementwise_affine:
        shift = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        for layer in layers:
            behind(layer, norm.weight, shift)
    return nn.LayerNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)


def before_batch_norm(layer: nn.Conv2d, norm: nn.Module) -> nn.Conv2d:
    """norm(layer(x)) as a convolution of x."""
    dtype = layer.weight.dtype
    return fuse_conv_bn_eval(layer.double(), norm.double()).to(dtype).requires_grad_(False)


def scaled(layer: Affine, scale: Tensor) -> Affine:
    """scale · layer(x) as a layer of x; as many numbers as there are channels."""
    scale = scale.double().flatten()
    weight = layer.weight.double() * scale.reshape(-1, *(1,) * (layer.weight.ndim - 1))
    return _filled(layer, weight, None if layer.bias is None else layer.bias.double() * scale, layer.weight)


def with_identity(layer: nn.Conv2d) -> nn.Conv2d:
    """x + layer(x) as one depthwise convolution: its middle tap grows by one."""
    weight = layer.weight.double().clone()
    weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += 1
    return channels_last(_filled(layer, weight, layer.bias, layer.weight))


def summed(layers: Sequence[nn.Conv2d]) -> nn.Conv2d:
    """The sum of depthwise convolutions of the same map, as one of the size that covers all of them."""
    return _depthwise(sum(_of_one_size(layers)), sum(layer.bias.double() for layer in layers), layers[0].weight)


def side_by_side(layers: Sequence[nn.Conv2d]) -> nn.Conv2d:
    """Depthwise convolutions of neighbouring channels as one over all of them, of the size that covers all."""
    bias = torch.cat([layer.bias.double() for layer in layers])
    return _depthwise(torch.cat(_of_one_size(layers)), bias, layers[0].weight)


def averaged(layers: Sequence[nn.Linear]) -> nn.Linear:
    """The mean of what linear layers of the same input give, as one."""
    weight = torch.stack([layer.weight.double() for layer in layers]).mean(0)
    return _filled(layers[0], weight, torch.stack([layer.bias.double() for layer in layers]).mean(0), layers[0].weight)


def channels_last(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with its weights in the order of channels-last maps, so that it returns one whatever it reads."""
    return layer.to(memory_format=torch.channels_last)


def made_of(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether everything in the module is of exactly these classes: nothing quantized, adapted or reparametrized."""
    return all(type(layer) in types for layer in module.modules())


def _of_one_size(layers: Sequence[nn.Conv2d]) -> list[Tensor]:
    height, width = (max(layer.kernel_size[i] for layer in layers) for i in range(2))
    weights = []
    for layer in layers:
        rows, columns = (height - layer.kernel_size[0]) // 2, (width - layer.kernel_size[1]) // 2
        weights.append(pad(layer.weight.double(), (columns, columns, rows, rows)))
    return weights


def _depthwise(weight: Tensor, bias: Tensor, like: Tensor) -> nn.Conv2d:
    channels, _, *size = weight.shape
    padding = tuple(side // 2 for side in size)
    layer = nn.Conv2d(channels, channels, tuple(size), padding=padding, groups=channels, device="meta")
    return channels_last(_filled(layer, weight, bias, like))


def _filled(layer: Affine, weight: Tensor, bias: Tensor | None, like: Tensor) -> Affine:
    """The layer with these weights, in the dtype and on the device of `like`."""
    layer.weight = nn.Parameter(weight.to(like).contiguous(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.to(like), requires_grad=False)
    return layer
