"""Folds for timm's own blocks, swapped or not, and for every convolution followed by a batch norm."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeGuard

from timm.layers import (
    Attention,
    AttentionRope,
    BatchNormAct2d,
    ConvNormAct,
    GluMlp,
    LayerNorm,
    LayerScale,
    Mlp,
    SwiGLU,
)
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.pvt_v2 import Block as PvtBlock
from timm.models.pvt_v2 import MlpWithDepthwiseConv
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import nn

from linvit.fusion import folds
from linvit.layers.recent_mechanisms import RecNeXtAttention
from linvit.layers.swapped import GlobalSwinBlock, LocalBlock, LocalMlp
from linvit.layers.token_attention import TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS


# The layers that read the input of such a module; none if the module also uses it in another way. Swin's windowed
# attention is not here: it pads the output of the norm with zeros.
def _projections(attention: Any) -> list[nn.Module]:
    """The layers that read the input of one of timm's attentions; none if it adds biases of its own."""
    if getattr(attention, "q_bias", None) is not None:
        return []
    names = ("qkv", "q_proj", "k_proj", "v_proj", "gate")
    return [layer for layer in (getattr(attention, name, None) for name in names) if layer is not None]


INPUT_LAYERS: dict[type[nn.Module], Callable[[Any], list[nn.Module]]] = {
    **dict.fromkeys((Attention, AttentionRope, EvaAttention), _projections),
    **{layer: layer.input_layers for layer in TOKEN_LAYERS.values()},
    **dict.fromkeys((Mlp, GluMlp, LocalMlp, MlpWithDepthwiseConv), lambda mlp: [mlp.fc1]),
    SwiGLU: lambda mlp: [mlp.fc1_g, mlp.fc1_x],
}


def folded_block(block: Any) -> Any:
    """A block of two halves x + scale(layer(norm(x))): norms go into the next layers, scales into the last one."""
    for norm, layer, scale, final in (("norm1", block.attn, "ls1", "proj"), ("norm2", block.mlp, "ls2", "fc2")):
        if type(layer) not in INPUT_LAYERS:
            continue
        readers = INPUT_LAYERS[type(layer)](layer)
        if type(getattr(block, norm)) in (nn.LayerNorm, LayerNorm) and _plain(readers):
            setattr(block, norm, folds.after_layer_norm(getattr(block, norm), readers))
        outputs = _outputs(layer, final)
        if type(getattr(block, scale, None)) is LayerScale and _plain(outputs):
            for output in outputs:
                folds.scaled(output, getattr(block, scale).gamma)
            setattr(block, scale, nn.Identity())
    return block


def _outputs(layer: Any, final: str) -> list[nn.Module]:
    """The layers whose outputs are added to the result of an attention or a feed-forward."""
    return layer.output_layers() if isinstance(layer, TokenAttention) else [getattr(layer, final)]


def folded_eva_block(block: EvaBlock) -> EvaBlock:
    """As folded_block; the scales are parameters of the block."""
    folded_block(block)
    for name, outputs in (("gamma_1", _outputs(block.attn, "proj")), ("gamma_2", _outputs(block.mlp, "fc2"))):
        gamma = getattr(block, name)
        if gamma is not None and _plain(outputs):
            for output in outputs:
                folds.scaled(output, gamma)
            setattr(block, name, None)
    return block


def folded_merging(merging: PatchMerging) -> PatchMerging:
    """Swin's downsampling, with its norm folded into its linear layer."""
    if type(merging.norm) is nn.LayerNorm and _plain([merging.reduction]):
        merging.norm = folds.after_layer_norm(merging.norm, [merging.reduction])
    return merging


def folded_sequence(sequence: nn.Sequential) -> nn.Sequential:
    """Folds each batch norm into the convolution before it; its activation, or an identity, takes its place."""
    for name, following in pairwise(list(sequence._modules)):
        pair = _folded_pair(sequence.get_submodule(name), sequence.get_submodule(following))
        sequence._modules[name], sequence._modules[following] = pair
    return sequence


def folded_conv_norm(layer: ConvNormAct) -> ConvNormAct:
    """timm's convolution with norm and activation, the norm folded."""
    layer.conv, layer.bn = _folded_pair(layer.conv, layer.bn)
    return layer


def folded_recnext(attention: RecNeXtAttention) -> RecNeXtAttention:
    """The batch norm of queries and keys folded into their projection."""
    norm = attention.qk_norm
    if type(norm) is nn.BatchNorm1d and type(attention.qkv) is nn.Linear:
        folds.before_norm_of_first(attention.qkv, norm)
        attention.qk_norm = nn.Identity()
    return attention


def _folded_pair(conv: nn.Module, norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    if type(norm) not in (nn.BatchNorm2d, BatchNormAct2d) or norm.running_mean is None:
        return conv, norm
    if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
        return conv, norm
    rest = norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity()
    return folds.before_batch_norm(conv, norm), rest


def _plain(layers: list[nn.Module]) -> TypeGuard[list[folds.Affine]]:
    """Whether there are layers and all are of known classes: neither quantized, adapted nor reparametrized."""
    return bool(layers) and all(type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d) for layer in layers)


FOLDS: folds.Folds = {
    Block: folded_block,
    LocalBlock: folded_block,
    EvaBlock: folded_eva_block,
    SwinTransformerBlock: folded_block,
    GlobalSwinBlock: folded_block,
    PvtBlock: folded_block,
    PatchMerging: folded_merging,
    RecNeXtAttention: folded_recnext,
    nn.Sequential: folded_sequence,
    ConvNormAct: folded_conv_norm,
}
