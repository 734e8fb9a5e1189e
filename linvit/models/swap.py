"""timm's DeiT, ViT, Swin and PVT with another attention; weights of qkv and proj are kept."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.layers import Attention, Mlp
from timm.models.pvt_v2 import Attention as ReducedAttention
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from linvit.layers.checks import known
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.swapped import GlobalSwinBlock, GridPatchEmbed, LocalMlp
from linvit.layers.token_attention import CurrentGrid, TokenAttention
from linvit.layers.token_mechanisms import AgentAttention

AGENTS = ((3, 3), (4, 4), (7, 7), (7, 7))
"""Agents of the four stages of a pyramid, as released; a ViT has those of the last."""


def swap_attention(
    model: nn.Module, mechanism: str, pattern: str | None = None, attention: Mapping[str, Any] | None = None
) -> nn.Module:
    """Exchange the attention of a timm model, in place.

    In Swin a stage with another attention sees its whole map at once: no windows, no shift, no relative positions. In
    PVT keys and values are no longer taken from a reduced map. What a mechanism brings of its own (convolutions,
    tables, gates) begins untrained; everything else keeps its weights. Dropout of scores goes, having no matrix to act
    on. Tables of positions are made for the model's image size and interpolated for others; whether the model takes
    others is its own `dynamic_img_size`.

    Args:
        model: a VisionTransformer (DeiT, ViT), SwinTransformer or PyramidVisionTransformerV2.
        mechanism: a name in MECHANISMS, such as "rala".
        pattern: one letter a stage, L for the mechanism and S for what is there, such as "LLSS"; in a ViT one letter a
            block, or fewer for equal runs of blocks. Everywhere by default.
        attention: arguments of the mechanism, such as {"weighting": "uniform"}; {"mechanism": "softmax"} puts another
            operator into the mechanism's surroundings.

    Returns:
        The same model, with `pattern` and `mechanism` as attributes; in the pattern every softmax attention is an S.

    Raises:
        ValueError: for an unknown mechanism or pattern, a model or attention of another kind, or a width that the
            mechanism cannot take. The model is then unchanged.
    """
    options = {"mechanism": mechanism, **(attention or {})}
    softmax = known("mechanism", options["mechanism"], MECHANISMS).axes is None
    known("mechanism", mechanism, MECHANISMS)
    for kind, swap in SWAPS.items():
        if isinstance(model, kind):
            letters, changes = swap(model, mechanism, pattern, options)
            break
    else:
        kinds = ", ".join(kind.__name__ for kind in SWAPS)
        raise ValueError(f"the model is a {type(model).__name__}, expected one of {kinds}")
    for change in changes:
        change()
    model.mechanism, model.pattern = mechanism, letters.replace("L", "S") if softmax else letters
    return model


Change = Callable[[], None]
Swapped = tuple[str, list[Change]]  # the pattern, and what is to be done


def _swap_vit(model: VisionTransformer, mechanism: str, pattern: str | None, options: dict) -> Swapped:
    letters = _letters(pattern, len(model.blocks))
    if "L" in letters and not isinstance(model.patch_drop, nn.Identity):
        raise ValueError(
            "the model drops patches in training, and what is left has no grid: create it with patch_drop_rate=0"
        )
    source = CurrentGrid()
    embed = GridPatchEmbed.watching(model.patch_embed, source)
    shared = {"num_prefix": model.num_prefix_tokens, "source": source, **options}
    changes: list[Change] = [lambda: setattr(model, "patch_embed", embed)]
    for letter, block in zip(letters, model.blocks, strict=True):
        if letter == "L":
            _require(block, Block)
            _require(block.attn, Attention)
            _require_plain(block.attn)
            new = _attention(block.attn, mechanism, model.patch_embed.grid_size, AGENTS[-1], shared)
            changes += _placed(block, new, mechanism)
    return pattern or "L", changes


def _swap_swin(model: SwinTransformer, mechanism: str, pattern: str | None, options: dict) -> Swapped:
    letters = _letters(pattern, len(model.layers), exact=True)
    changes: list[Change] = []
    for i, (letter, stage) in enumerate(zip(letters, model.layers, strict=True)):
        for j, block in enumerate(stage.blocks if letter == "L" else ()):
            _require(block, SwinTransformerBlock)
            _require(block.attn, WindowAttention)
            new = _attention(block.attn, mechanism, block.input_resolution, AGENTS[min(i, 3)], options)
            whole = GlobalSwinBlock(block, new)
            changes.append(lambda blocks=stage.blocks, j=j, whole=whole: blocks.__setitem__(j, whole))
            changes += _placed(whole, new, mechanism)
    return letters, changes


def _swap_pvt(model: PyramidVisionTransformerV2, mechanism: str, pattern: str | None, options: dict) -> Swapped:
    letters = _letters(pattern, len(model.stages), exact=True)
    image = model.pretrained_cfg["input_size"][1:] if hasattr(model, "pretrained_cfg") else (224, 224)
    changes: list[Change] = []
    for i, (letter, stage, info) in enumerate(zip(letters, model.stages, model.feature_info, strict=True)):
        grid = tuple(-(-side // info["reduction"]) for side in image)
        for block in stage.blocks if letter == "L" else ():
            _require(block.attn, ReducedAttention)
            if MECHANISMS[mechanism].local_feed_forward:
                raise ValueError(
                    f"`mechanism` {mechanism!r} brings a local feed-forward, which PVT has already: use 'linear_relu'"
                )
            new = _attention(block.attn, mechanism, grid, AGENTS[min(i, 3)], options)
            changes += _placed(block, new, mechanism)
    return letters, changes


SWAPS = {VisionTransformer: _swap_vit, SwinTransformer: _swap_swin, PyramidVisionTransformerV2: _swap_pvt}


def _attention(old: nn.Module, mechanism: str, grid: tuple[int, int], agents: tuple[int, int], options: dict):
    """The mechanism with the projections of an attention that is there."""
    weight = old.proj.weight
    qkv = old.qkv if hasattr(old, "qkv") else _joined(old.q, old.kv)
    width = qkv.in_features
    if (qkv.out_features, old.proj.in_features, old.proj.out_features) != (3 * width, width, width):
        raise ValueError(f"the attention maps {width} channels to heads of another width in all: it cannot be swapped")
    kind = MECHANISMS[mechanism].tokens
    if issubclass(kind, AgentAttention):
        options = {"agents": agents, **options}
    new = kind(width, old.num_heads, grid=grid, device=weight.device, dtype=weight.dtype, **options)
    new.qkv, new.proj, new.proj_drop = qkv, old.proj, old.proj_drop
    return new.train(old.training)


def _placed(block: nn.Module, new: TokenAttention, mechanism: str) -> list[Change]:
    changes: list[Change] = [lambda: setattr(block, "attn", new)]
    if MECHANISMS[mechanism].local_feed_forward:
        _require(block.mlp, Mlp)
        weight = block.mlp.fc1.weight
        mlp = LocalMlp(block.mlp, new, device=weight.device, dtype=weight.dtype).train(block.training)
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


def _letters(pattern: str | None, count: int, exact: bool = False) -> str:
    if pattern is None:
        return "L" * count
    if not pattern or set(pattern) - set("LS") or count % len(pattern) or (exact and len(pattern) != count):
        expected = f"{count} letters" if exact else f"{count} letters or a number that divides it"
        raise ValueError(f"`pattern` is {pattern!r}, expected {expected}, L for the mechanism or S for what is there")
    return "".join(letter * (count // len(pattern)) for letter in pattern)


def _require(module: nn.Module, kind: type) -> None:
    if not isinstance(module, kind):
        raise ValueError(
            f"a block has a {type(module).__name__}, expected timm's {kind.__name__}: it cannot be swapped"
        )


def _require_plain(attention: Attention) -> None:
    extra = [
        name
        for name in ("q_norm", "k_norm", "norm", "gate")
        if not isinstance(getattr(attention, name, None), nn.Identity | None)
    ]
    if extra:
        raise ValueError(
            f"the attention has {', '.join(extra)}, which the mechanisms here have not: it cannot be swapped"
        )
