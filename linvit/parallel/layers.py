"""Which layers can have only some rows of an image, and what changes in them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import timm.layers as timm_layers
import torch
from timm.layers.adaptive_avgmax_pool import FastAdaptiveAvgPool
from timm.models import pvt_v2, swin_transformer, vision_transformer
from torch import Tensor, nn

from linvit.errors import refuse
from linvit.layers import block, convolutions, norm_aware, patches
from linvit.layers import mixer as care_layers
from linvit.layers.attention import Attention2d
from linvit.layers.causal import CausalAttention, CausalConv, DecoderBlock
from linvit.layers.operator import Operator
from linvit.layers.recent_mechanisms import NormAwareAttention, ScaledPolarAttention
from linvit.layers.swapped import GlobalSwinBlock, GridPatchEmbed, LocalMlp
from linvit.layers.token_attention import GatedAttention, Hydra, TokenAttention
from linvit.layers.token_mechanisms import MLLAAttention, PolarAttention
from linvit.models import backbone, care, mavit, nalaformer, pyramid, ravlt, sequence
from linvit.ops.state import accumulator_dtype
from linvit.parallel.exchange import Exchange, ProcessShard

KNOWN: set[type[nn.Module]] = {
    *(nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Dropout, nn.Identity),
    *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sequential, nn.ModuleList, nn.Flatten, nn.AdaptiveAvgPool2d),
    *(timm_layers.LayerNorm, timm_layers.LayerNorm2d, timm_layers.DropPath, timm_layers.Mlp, timm_layers.SwiGLU),
    *(timm_layers.PatchEmbed, timm_layers.ClassifierHead, timm_layers.SelectAdaptivePool2d),
    FastAdaptiveAvgPool,
    *(vision_transformer.VisionTransformer, vision_transformer.Block),
    *(swin_transformer.SwinTransformer, swin_transformer.SwinTransformerStage, swin_transformer.PatchMerging),
    *(pvt_v2.PyramidVisionTransformerV2, pvt_v2.PyramidVisionTransformerStage, pvt_v2.OverlapPatchEmbed),
    *(pvt_v2.Block, pvt_v2.MlpWithDepthwiseConv),
    *(ravlt.RAVLT, mavit.MAViT, nalaformer.NaLaFormer, pyramid.PyramidStage),
    *(patches.ConvStem, patches.ConvDownsample, norm_aware.NormAwareBlock, norm_aware.NormAwareAttention2d),
    *(block.AttentionBlock, Attention2d, block.ConvFeedForward, convolutions.PointwiseConv),
    *(care.CARE, care.CareHead, backbone.Stage, patches.PatchStem, patches.PatchDownsample, block.CareBlock),
    *(care_layers.TokenMixer, care_layers.Strips, care_layers.ValueAttention, care_layers.Interaction),
    *(TokenAttention, GatedAttention, Hydra, MLLAAttention, PolarAttention, NormAwareAttention, ScaledPolarAttention),
    *(GlobalSwinBlock, GridPatchEmbed, LocalMlp),
    *(sequence.Decoder, DecoderBlock, CausalAttention, CausalConv, Operator, convolutions.DepthwiseConv),
}
"""The layers that treat every token alike, or that are changed below."""
AVERAGES = ("avg", "fast", "fastavg")
ALTERNATIVES = "choose RAVLT, MAViT, CARE, a decoder, or DeiT, Swin or PVT with a swapped attention without pooling"


def check_layers(network: nn.Module) -> None:
    """Raises ValueError, naming the layer, if a layer cannot have only some rows."""
    for name, module in network.named_modules():
        layer = type(module).__name__
        where = f"`network` has the layer {name} ({layer})" if name else f"`network` is of the class {layer}"
        refuse(
            isinstance(module, Operator)
            and module.options is None
            and f"{where} with softmax attention, which needs all tokens at once: use linear attention in all stages or"
            " blocks, such as `pattern='LLLL'`, or ring attention for softmax",
            isinstance(module, Operator)
            and module.blocks is not None
            and f"{where} with blocks, which need the whole map at once: choose a network without",
            isinstance(module, PolarAttention)
            and module.positional_encoding is not None
            and f"{where} with a table of positions, which cannot be shared: create it with `positions=False`",
            type(module) not in KNOWN and f"{where}, which cannot share its tokens: {ALTERNATIVES}",
            isinstance(module, nn.Conv2d)
            and (
                module.padding_mode != "zeros"
                or isinstance(module.padding, str)
                or module.padding[0] > module.dilation[0] * (module.kernel_size[0] - 1)
            )
            and f"{where} with padding {module.padding} ({module.padding_mode}), expected zeros, fewer than the kernel"
            " has rows: replace it",
        )


def pooling(network: nn.Module) -> str:
    """How a classifier pools its last map, a name of timm's; one in AVERAGES for the mean."""
    pool = getattr(network.head, "global_pool", None) or network
    return str(getattr(pool, "pool_type", None) or getattr(pool, "global_pool", ""))


def halo(conv: nn.Conv2d) -> tuple[int, int]:
    """How many rows of others a convolution needs above and below its own.

    An output row o reads the input rows from o · stride - padding: `padding` rows above, and below the rest of the last
    kernel.
    """
    padding, reach = cast(int, conv.padding[0]), conv.dilation[0] * (conv.kernel_size[0] - 1)
    return padding, max(reach - padding - conv.stride[0] + 1, 0)


@dataclass
class Layout:
    """What the rows of a process have to be.

    stride: product of all strides; every process but the last has a multiple of it.
    halos: name, stride of the input, and rows needed of each layer that reads those of its neighbours.
    places: the layers that know where they are, with the attribute for it and their stride.
    """

    stride: int = 1
    halos: list[tuple[str, int, int]] = field(default_factory=list)
    places: list[tuple[nn.Module, str, int]] = field(default_factory=list)

    def set_place(self, first_row: int) -> None:
        """Tells the layers the number of the first row of this process."""
        for module, attribute, stride in self.places:
            setattr(module, attribute, first_row // stride)


def share_layers(network: nn.Module, exchange: Exchange, num_prefix: int, device: torch.device) -> Layout:
    """Lets the layers of a network reach the rows of other processes, in place; num_prefix: tokens before the grid."""
    layout = Layout()
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            rows = *halo(module), cast(int, module.padding[0])  # from above, from below, and zeros after the last row
            if max(rows):
                module.padding = (0, cast(int, module.padding[1]))
                _set_forward(module, partial(_convolution, module, exchange, rows, name))
            layout.halos.append((name, layout.stride, max(rows)))
            layout.stride *= module.stride[0]
        elif isinstance(module, swin_transformer.PatchMerging):
            layout.stride *= 2
        elif isinstance(module, CausalConv):
            _set_forward(module, partial(_causal_convolution, module, exchange, name))
            layout.halos.append((name, 1, module.size - 1))
        elif isinstance(module, nn.BatchNorm2d):
            _set_forward(module, partial(_batch_norm, module, exchange, name))
        elif isinstance(module, Operator):
            module.shard = ProcessShard(exchange, name, num_prefix, device)
        elif isinstance(module, TokenAttention):
            layout.places.append((module, "first_row", layout.stride))
        elif isinstance(module, sequence.Decoder):
            layout.places.append((module, "first_position", 1))
    if isinstance(network, pyramid.Pyramid):
        for stage, info in zip(network.stages, network.feature_info, strict=True):
            layout.places.append((stage, "first_row", info["reduction"]))
    return layout


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    setattr(module, "forward", forward)  # noqa: B010 - mypy allows no other method


def _convolution(conv: nn.Conv2d, exchange: Exchange, rows: tuple[int, int, int], name: str, x: Tensor) -> Tensor:
    return conv._conv_forward(exchange.with_halo(x, rows, name), conv.weight, conv.bias)


def _causal_convolution(
    conv: CausalConv, exchange: Exchange, name: str, x: Tensor, before: None = None
) -> tuple[Tensor, Tensor]:
    with_earlier = exchange.with_halo(x, (conv.size - 1, 0, 0), name)
    earlier, x = with_earlier.split((conv.size - 1, x.shape[1]), 1)
    return CausalConv.forward(conv, x, earlier)


def _batch_norm(norm: nn.BatchNorm2d, exchange: Exchange, name: str, x: Tensor) -> Tensor:
    """Batch norm with the mean and variance of all rows. SyncBatchNorm would do this, but only on a GPU."""
    if not norm.training and norm.running_mean is not None:
        return nn.BatchNorm2d.forward(norm, x)
    wide = x.to(accumulator_dtype(x.dtype))
    var, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    number = torch.full_like(mean[:1], x.numel() // len(mean))
    numbers, means, variances = exchange.gather(torch.cat((number, mean, var)), name).split((1, *2 * (len(mean),)), 1)
    share = numbers / numbers.sum()
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean).square())).sum(0)
    if norm.training and norm.running_mean is not None:
        _update_running(norm, mean.detach(), var.detach(), numbers.detach().sum())
    y = (wide - mean[:, None, None]) * (var + norm.eps).rsqrt()[:, None, None]
    if norm.affine:
        y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
    return y.to(x.dtype)


@torch.no_grad()
def _update_running(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, number: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean), momentum)
    norm.running_var.lerp_((var * number / (number - 1)).to(norm.running_var), momentum)
