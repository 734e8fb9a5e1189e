"""Replacing the attention of timm's DeiT, ViT, Swin and PVT; the weights of qkv and proj are kept."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from timm.layers import Attention, Mlp
from timm.models.pvt_v2 import Attention as ReducedAttention
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from linvit.arguments import kind
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.swapped import GlobalSwinBlock, GridPatchEmbed, LocalMlp
from linvit.layers.token_attention import CurrentGrid, TokenAttention
from linvit.layers.token_mechanisms import AgentAttention
from linvit.ranges import check, declared, known, nearest

AGENTS = ((3, 3), (4, 4), (7, 7), (7, 7))
"""Grids of agents of the four stages of a pyramid, as released; a ViT uses the last."""
ARGUMENTS: Mapping[str, Any] = {"mechanism": str, "pattern": str | None, "attention": dict[str, Any] | None}
GIVEN = {"width", "heads", "grid", "num_prefix", "source", "operator_size", "device", "dtype"}
"""Arguments of a mechanism that come from the model."""
Kind = TypeVar("Kind")


def swap_attention(
    model: nn.Module, mechanism: str, pattern: str | None = None, attention: Mapping[str, Any] | None = None
) -> nn.Module:
    """Replace the attention of a timm model, in place.

    In Swin a stage with another attention sees its whole map at once: no windows, no shift, no relative positions. In
    PVT keys and values no longer come from a reduced map. Layers that a mechanism adds (convolutions, tables, gates)
    start untrained; everything else keeps its weights. Dropout of the scores is removed: there is no score matrix.
    Position tables are made for the model's image size and interpolated for other sizes, which the model must accept
    (timm's `dynamic_img_size`).

    Args:
        model: a VisionTransformer (DeiT, ViT), SwinTransformer or PyramidVisionTransformerV2.
        mechanism: a name in MECHANISMS, such as "rala".
        pattern: one letter per stage, such as "LLSS": L for the mechanism, S to keep the present attention. In a ViT
            one letter per block, or fewer for runs of equal length. By default all attention is replaced.
        attention: options of the mechanism, such as {"weighting": "uniform"}; {"mechanism": "softmax"} puts the
            operator of another mechanism into its layer.

    Returns:
        The same model, with the attributes `mechanism` and `pattern`, which has an S for every softmax attention.

    Raises:
        ValueError: for an unknown mechanism, option or pattern, a model or attention of another class, or a width that
            the mechanism does not support. The model is then unchanged.
    """
    check(ARGUMENTS, {"mechanism": mechanism, "pattern": pattern, "attention": attention})
    layer = known("mechanism", mechanism, MECHANISMS).tokens
    _check_options(mechanism, layer, attention or {})
    options = {"mechanism": mechanism, **(attention or {})}
    softmax = known("mechanism", options["mechanism"], MECHANISMS).axes is None
    for swappable, swap in SWAPS.items():
        if isinstance(model, swappable):
            letters, changes = swap(model, mechanism, pattern, options)
            break
    else:
        names = ", ".join(swappable.__name__ for swappable in SWAPS)
        raise ValueError(f"`model` is {kind(model)}, expected one of {names}: choose another model")
    for change in changes:
        change()
    vars(model).update(mechanism=mechanism, pattern=letters.replace("L", "S") if softmax else letters)
    return model


def _check_options(mechanism: str, layer: type, attention: Mapping[str, Any]) -> None:
    takes = sorted({"mechanism", "feature_map", "weighting", "normalizer", *declared(layer)} - GIVEN)
    for key in attention:
        if key not in takes:
            raise ValueError(
                f"`attention` has the key {key!r}, expected options of {mechanism}: {', '.join(takes)}."
                f"{nearest(key, takes)}"
            )


Change = Callable[[], None]
Swapped = tuple[str, list[Change]]  # the pattern, and the changes to make


def _swap_vit(model: VisionTransformer, mechanism: str, pattern: str | None, options: dict[str, Any]) -> Swapped:
    letters = each_letter(pattern, len(model.blocks))
    if "L" in letters and not isinstance(model.patch_drop, nn.Identity):
        raise ValueError(
            "the model drops patches in training, so the others form no grid: create it with patch_drop_rate=0"
        )
    source = CurrentGrid()
    embed = GridPatchEmbed.watching(model.patch_embed, source)
    shared = {"num_prefix": model.num_prefix_tokens, "source": source, **options}
    changes: list[Change] = [lambda: setattr(model, "patch_embed", embed)]
    for letter, module in zip(letters, model.blocks, strict=True):
        if letter == "L":
            block = _required(module, Block)
            old = _required(block.attn, Attention)
            _require_plain(old)
            new = _attention(old, mechanism, embed.grid_size, AGENTS[-1], shared)
            changes += _placed(block, new, mechanism)
    return pattern or "L", changes


def _swap_swin(model: SwinTransformer, mechanism: str, pattern: str | None, options: dict[str, Any]) -> Swapped:
    letters = each_letter(pattern, len(model.layers), exact=True)
    changes: list[Change] = []
    for i, (letter, stage) in enumerate(zip(letters, model.layers, strict=True)):
        blocks = cast(nn.Sequential, stage.blocks)
        for j, module in enumerate(blocks if letter == "L" else ()):
            block = _required(module, SwinTransformerBlock)
            old = _required(block.attn, WindowAttention)
            grid = cast(tuple[int, int], block.input_resolution)
            new = _attention(old, mechanism, grid, AGENTS[min(i, 3)], options)
            whole = GlobalSwinBlock(block, new)
            changes.append(partial(blocks.__setitem__, j, whole))
            changes += _placed(whole, new, mechanism)
    return letters, changes


def _swap_pvt(
    model: PyramidVisionTransformerV2, mechanism: str, pattern: str | None, options: dict[str, Any]
) -> Swapped:
    letters = each_letter(pattern, len(model.stages), exact=True)
    cfg: Mapping[str, Any] = getattr(model, "pretrained_cfg", {"input_size": (3, 224, 224)})
    height, width = cfg["input_size"][1:]
    changes: list[Change] = []
    for i, (letter, stage, info) in enumerate(zip(letters, model.stages, model.feature_info, strict=True)):
        grid = (-(-height // info["reduction"]), -(-width // info["reduction"]))
        for block in cast(nn.ModuleList, stage.blocks) if letter == "L" else ():
            old = _required(block.attn, ReducedAttention)
            if MECHANISMS[mechanism].local_feed_forward:
                raise ValueError(
                    f"`mechanism` {mechanism!r} adds a local feed-forward, which PVT has already: use 'linear_relu'"
                )
            new = _attention(old, mechanism, grid, AGENTS[min(i, 3)], options)
            changes += _placed(block, new, mechanism)
    return letters, changes


SWAPS: dict[type[nn.Module], Callable[..., Swapped]] = {
    VisionTransformer: _swap_vit,
    SwinTransformer: _swap_swin,
    PyramidVisionTransformerV2: _swap_pvt,
}


def _attention(
    old: Attention | WindowAttention | ReducedAttention,
    mechanism: str,
    grid: tuple[int, int],
    agents: tuple[int, int],
    options: dict[str, Any],
) -> TokenAttention:
    """The mechanism with the projections of the present attention."""
    proj = old.proj
    weight = proj.weight
    qkv = _joined(old.q, old.kv) if isinstance(old, ReducedAttention) else old.qkv
    width = qkv.in_features
    if (qkv.out_features, proj.in_features, proj.out_features) != (3 * width, width, width):
        raise ValueError(f"the heads of the attention are not {width} channels wide in total: it cannot be swapped")
    layer = MECHANISMS[mechanism].tokens
    if issubclass(layer, AgentAttention):
        options = {"agents": agents, **options}
    new = layer(width, old.num_heads, grid=grid, device=weight.device, dtype=weight.dtype, **options)
    new.qkv, new.proj, new.proj_drop = qkv, proj, old.proj_drop
    return new.train(old.training)


def _placed(block: nn.Module, new: TokenAttention, mechanism: str) -> list[Change]:
    changes: list[Change] = [lambda: setattr(block, "attn", new)]
    if MECHANISMS[mechanism].local_feed_forward:
        old = _required(block.mlp, Mlp)
        weight = cast(nn.Linear, old.fc1).weight
        mlp = LocalMlp(old, new, device=weight.device, dtype=weight.dtype).train(block.training)
        changes.append(lambda: setattr(block, "mlp", mlp))
    return changes


def _joined(q: nn.Linear, kv: nn.Linear) -> nn.Linear:
    width = q.in_features
    joined = nn.Linear(width, 3 * width, bias=q.bias is not None, device=q.weight.device, dtype=q.weight.dtype)
    with torch.no_grad():
        joined.weight.copy_(torch.cat((q.weight, kv.weight)))
        if q.bias is not None:
            joined.bias.copy_(torch.cat((q.bias, kv.bias)))
    return joined


def each_letter(pattern: str | None, count: int, exact: bool = False) -> str:
    """The pattern with one letter for each of `count` blocks or stages; raises ValueError for any other text."""
    if pattern is None:
        return "L" * count
    if not pattern or set(pattern) - set("LS") or count % len(pattern) or (exact and len(pattern) != count):
        expected = f"{count} letters" if exact else f"{count} letters or a number that divides it"
        raise ValueError(
            f"`pattern` is {pattern!r}, expected {expected}, L for the mechanism or S for the present attention: "
            "correct it"
        )
    return "".join(letter * (count // len(pattern)) for letter in pattern)


def _required(module: object, layer: type[Kind]) -> Kind:
    if isinstance(module, TokenAttention | GlobalSwinBlock):
        raise ValueError("the attention of the model has been swapped already: create the model again")
    if not isinstance(module, layer):
        raise ValueError(
            f"a block has a {type(module).__name__}, expected timm's {layer.__name__}: it cannot be swapped"
        )
    return module


def _require_plain(attention: Attention) -> None:
    extra = [
        name
        for name in ("q_norm", "k_norm", "norm", "gate")
        if not isinstance(getattr(attention, name, None), nn.Identity | None)
    ]
    if extra:
        raise ValueError(
            f"the attention has {', '.join(extra)}, which our mechanisms do not have: it cannot be swapped"
        )
