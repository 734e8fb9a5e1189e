"""What is folded inside timm's own blocks, swapped or not, and in every convolution with a batch norm behind it."""

from collections.abc import Callable
from itertools import pairwise

from timm.layers import Attention, BatchNormAct2d, ConvNormAct, LayerNorm, LayerScale, Mlp
from timm.models.pvt_v2 import Block as PvtBlock
from timm.models.pvt_v2 import MlpWithDepthwiseConv
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import nn

from linvit.fusion import folds
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.swapped import GlobalSwinBlock, LocalMlp

# Every layer that reads what such a module is given; none where the module uses it in another way as well. Swin's
# windowed attention is not here: it pads with zeros behind the norm.
INPUT_LAYERS: dict[type[nn.Module], Callable[[nn.Module], list[nn.Module]]] = {
    Attention: lambda attention: [attention.qkv] if attention.gate is None else [attention.qkv, attention.gate],
    **{mechanism.tokens: mechanism.tokens.input_layers for mechanism in MECHANISMS.values()},
    **dict.fromkeys((Mlp, LocalMlp, MlpWithDepthwiseConv), lambda mlp: [mlp.fc1]),
}


def folded_block(block: nn.Module) -> nn.Module:
    """A block of two halves, each x + scale(layer(norm(x))): norms into what reads them, scales into the last layer."""
    for norm, layer, scale, final in (("norm1", block.attn, "ls1", "proj"), ("norm2", block.mlp, "ls2", "fc2")):
        if type(layer) not in INPUT_LAYERS:
            continue
        readers = INPUT_LAYERS[type(layer)](layer)
        if type(getattr(block, norm)) in (nn.LayerNorm, LayerNorm) and _plain(readers):
            setattr(block, norm, folds.behind_layer_norm(getattr(block, norm), readers))
        if type(getattr(block, scale, None)) is LayerScale and _plain([getattr(layer, final)]):
            folds.scaled(getattr(layer, final), getattr(block, scale).gamma)
            setattr(block, scale, nn.Identity())
    return block


def folded_merging(merging: PatchMerging) -> PatchMerging:
    """Swin's downsampling: its norm into its linear layer."""
    if type(merging.norm) is nn.LayerNorm and _plain([merging.reduction]):
        merging.norm = folds.behind_layer_norm(merging.norm, [merging.reduction])
    return merging


def folded_sequence(sequence: nn.Sequential) -> nn.Sequential:
    """Every convolution with a batch norm right behind it; an identity, or the activation, keeps the norm's place."""
    names = list(sequence._modules)
    for name, following in pairwise(names):
        conv, rest = _folded_pair(sequence._modules[name], sequence._modules[following])
        sequence._modules[name], sequence._modules[following] = conv, rest
    return sequence


def folded_conv_norm(layer: ConvNormAct) -> ConvNormAct:
    """timm's convolution with norm and activation."""
    layer.conv, layer.bn = _folded_pair(layer.conv, layer.bn)
    return layer


def _folded_pair(conv: nn.Module, norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    known = isinstance(conv, nn.Conv2d) and type(norm) in (nn.BatchNorm2d, BatchNormAct2d)
    if not known or norm.running_mean is None:
        return conv, norm
    rest = norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity()
    return folds.before_batch_norm(conv, norm), rest


def _plain(layers: list[nn.Module]) -> bool:
    """Whether there are layers and all are known ones: neither quantized, nor adapted, nor reparametrized."""
    return bool(layers) and all(type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d) for layer in layers)


FOLDS: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {
    Block: folded_block,
    SwinTransformerBlock: folded_block,
    GlobalSwinBlock: folded_block,
    PvtBlock: folded_block,
    PatchMerging: folded_merging,
    nn.Sequential: folded_sequence,
    ConvNormAct: folded_conv_norm,
}
