"""Where the attention of a network sits, and what another mechanism takes over from it, for each class of networks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.hiera import Hiera, HieraBlock, MaskUnitAttention
from timm.models.naflexvit import NaFlexVit
from timm.models.pvt_v2 import Attention as ReducedAttention
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer_sam import Attention as SamAttention
from timm.models.vision_transformer_sam import Block as SamBlock
from timm.models.vision_transformer_sam import VisionTransformerSAM, window_partition, window_unpartition
from torch import Tensor, nn

from linvit.errors import refuse
from linvit.layers.grid import CurrentGrid
from linvit.layers.swapped import FlatAttention, GlobalSwinBlock, GridNaFlexEmbeds, GridPatchEmbed
from linvit.layers.token_attention import TokenAttention

AGENTS = ((3, 3), (4, 4), (7, 7), (7, 7))
"""Grids of agents of the four stages of a pyramid, as released; a ViT uses the last."""
Change = Callable[[], None]
Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One attention of a network: where it sits, and what a mechanism in its place takes over.

    block: holds the attention as `attn`, and its feed-forward as `mlp`.
    qkv: gives the joined projection to the queries, keys and values of all heads.
    proj, proj_drop: output projection and its dropout.
    heads: number of heads.
    grid: (height, width) in tokens for which position tables are made.
    num_prefix: tokens before the grid. source: where the grid of the latest images is noted, if the block does not pass
        it on.
    letter: which letter of the pattern decides about it.
    kept: further layers that stay, by their name in TokenAttention.
    rotated: whether the block passes a rotation, which then replaces that of the mechanism.
    half_table: whether that rotation repeats its angles after half of the channels; see TokenAttention.
    ordered: whether the tokens are the rows of a grid, one after the other, which local terms and rotations need.
    local: whether the feed-forward has a depthwise convolution.
    put: puts the new attention into its place; None sets block.attn.
    present: what the present attention computes from the arguments that the block passes to a new one; None calls
        block.attn as it is.
    whole: whether the present attention is softmax attention of all tokens without a bias, so that the mechanism
        softmax in its place computes the same.
    """

    block: nn.Module
    qkv: Callable[[], nn.Linear]
    proj: nn.Linear
    proj_drop: nn.Module
    heads: int
    grid: tuple[int, int]
    letter: int
    num_prefix: int = 0
    source: CurrentGrid | None = None
    agents: tuple[int, int] = AGENTS[-1]
    kept: Mapping[str, nn.Module] | None = None
    rotated: bool = False
    half_table: bool = False
    ordered: bool = True
    local: bool = False
    put: Callable[[TokenAttention], None] | None = None
    present: Callable[..., Tensor] | None = None
    whole: bool = False


class Slots(NamedTuple):
    """All slots of a network; one letter per stage or block; what else changes if any of them is used."""

    slots: Sequence[Slot]
    letters: int
    exact: bool = False
    changes: Sequence[Change] = ()


Adapter = Callable[[Any], Slots]
ADAPTERS: dict[type[nn.Module], Adapter] = {}
"""The adapter of each class of networks; a subclass has that of its base."""


def adapter(network: type[nn.Module]) -> Callable[[Adapter], Adapter]:
    """Decorator that makes a function from a network to its Slots the adapter of its class.

    The function must not change the network, and raises ValueError for one that it cannot take.
    """

    def registered(function: Adapter) -> Adapter:
        ADAPTERS[network] = function
        return function

    return registered


def slots_of(network: nn.Module) -> Slots | None:
    """The slots of a network by the adapter of its class; None if there is none."""
    chosen = next((ADAPTERS[base] for base in type(network).__mro__ if base in ADAPTERS), None)
    return None if chosen is None else chosen(network)


@adapter(Eva)
@adapter(VisionTransformer)
def _vit_slots(model: VisionTransformer | Eva) -> Slots:
    return _plain_slots(model, "patch_embed", GridPatchEmbed.watching, model.patch_embed.grid_size)


@adapter(NaFlexVit)
def _naflex_slots(model: NaFlexVit) -> Slots:
    return _plain_slots(model, "embeds", GridNaFlexEmbeds.watching, model.embeds.pos_embed_grid_size or (14, 14))


def _plain_slots(
    model: Any, name: str, watching: Callable[[Any, CurrentGrid], nn.Module], grid: tuple[int, int]
) -> Slots:
    """One letter per block; the embedding of that name notes the grid of the images."""
    if not isinstance(model.patch_drop, nn.Identity | None):
        raise ValueError(
            "the model drops patches in training, so the others form no grid: create it with patch_drop_rate=0"
        )
    source = CurrentGrid()
    embed = watching(getattr(model, name), source)
    rotated = getattr(model, "rope", None) is not None
    slots = []
    for letter, module in enumerate(model.blocks):
        block = required(module, Block | EvaBlock | EvaBlockPostNorm, "Block")
        slots.append(
            Slot(
                block=block,
                grid=grid,
                letter=letter,
                num_prefix=model.num_prefix_tokens,
                source=source,
                rotated=rotated,
                whole=True,
                **_taken_over(required(block.attn, Attention | AttentionRope | EvaAttention, "Attention")),
            )
        )
    return Slots(slots, len(slots), changes=[partial(setattr, model, name, embed)])


@adapter(VisionTransformerSAM)
def _sam_slots(model: VisionTransformerSAM) -> Slots:
    """A block with another attention sees its whole map: no windows, and no positions relative to them."""
    slots = []
    for letter, module in enumerate(model.blocks):
        block = required(module, SamBlock)
        attention = required(block.attn, SamAttention)
        if attention.rope is not None:
            raise ValueError("the attention of this VisionTransformerSAM has its own rotation: it cannot be swapped")
        put, present = partial(_put_flat, block), partial(_in_sam_windows, block)
        grid = cast(tuple[int, int], model.patch_embed.grid_size)
        about = _taken_over(attention)
        slots.append(Slot(block=block, grid=grid, letter=letter, put=put, present=present, **about))
    return Slots(slots, len(slots))


def _put_flat(block: SamBlock | HieraBlock, new: TokenAttention) -> None:
    setattr(block, "attn", FlatAttention(new).train(block.training))  # noqa: B010 - mypy knows another class
    if isinstance(block, SamBlock):
        block.window_size = 0


def _in_sam_windows(block: SamBlock, x: Tensor) -> Tensor:
    """The block's attention of a map (batch, height, width, channels), in windows if it has them."""
    if not block.window_size:
        return block.attn(x)
    windows, padded = window_partition(x, block.window_size)
    return window_unpartition(block.attn(windows), block.window_size, (x.shape[1], x.shape[2]), padded)


@adapter(Hiera)
def _hiera_slots(model: Hiera) -> Slots:
    """The blocks that do not pool their queries; one with another attention sees all tokens, not only its mask unit."""
    slots = []
    for index, module in enumerate(model.blocks):
        block = required(module, HieraBlock)
        old = required(block.attn, MaskUnitAttention)
        if old.q_stride == 1 and old.dim == old.dim_out:
            stage = next(i for i, end in enumerate(model.stage_ends) if index <= end)
            slots.append(
                Slot(
                    block=block,
                    qkv=partial(getattr, old, "qkv"),
                    proj=old.proj,
                    proj_drop=nn.Identity(),
                    heads=old.heads,
                    grid=(1, 1),
                    letter=stage,
                    ordered=False,
                    put=partial(_put_flat, block),
                )
            )
    return Slots(slots, len(model.stage_ends), exact=True)


@adapter(SwinTransformer)
def _swin_slots(model: SwinTransformer) -> Slots:
    slots = []
    for stage, layers in enumerate(model.layers):
        blocks = cast(nn.Sequential, layers.blocks)
        for index, module in enumerate(blocks):
            block = required(module, SwinTransformerBlock)
            grid = cast(tuple[int, int], block.input_resolution)
            slots.append(
                Slot(
                    block=block,
                    grid=grid,
                    letter=stage,
                    agents=AGENTS[min(stage, 3)],
                    put=partial(_put_globally, blocks, index, block),
                    present=partial(_in_shifted_windows, block),
                    **_taken_over(required(block.attn, WindowAttention)),
                )
            )
    return Slots(slots, len(model.layers), exact=True)


def _put_globally(blocks: nn.Sequential, index: int, block: SwinTransformerBlock, new: TokenAttention) -> None:
    blocks[index] = GlobalSwinBlock(block, new).train(block.training)


def _in_shifted_windows(block: SwinTransformerBlock, x: Tensor, grid: Sequence[int]) -> Tensor:
    """The block's attention of tokens (batch, height × width, channels), in its windows."""
    y: Tensor = block._attn(x.unflatten(1, (grid[0], grid[1])))
    return y.flatten(1, 2)


@adapter(PyramidVisionTransformerV2)
def _pvt_slots(model: PyramidVisionTransformerV2) -> Slots:
    cfg: Mapping[str, Any] = getattr(model, "pretrained_cfg", {"input_size": (3, 224, 224)})
    height, width = cfg["input_size"][1:]
    slots = []
    for stage, (layers, info) in enumerate(zip(model.stages, model.feature_info, strict=True)):
        grid = (-(-height // info["reduction"]), -(-width // info["reduction"]))
        for block in cast(nn.ModuleList, layers.blocks):
            old = required(block.attn, ReducedAttention)
            slots.append(
                Slot(
                    block=block,
                    qkv=partial(_joined, [old.q, old.kv]),
                    proj=old.proj,
                    proj_drop=old.proj_drop,
                    heads=old.num_heads,
                    grid=grid,
                    letter=stage,
                    agents=AGENTS[min(stage, 3)],
                    local=True,
                )
            )
    return Slots(slots, len(model.stages), exact=True)


def required(module: object, layer: Any, name: str | None = None) -> Any:
    """The module, if it is one of these layers; ValueError if not, also for one that was swapped already."""
    refuse(
        isinstance(module, TokenAttention | GlobalSwinBlock | FlatAttention)
        and "the attention of the model has been swapped already: create the model again",
        not isinstance(module, layer)
        and f"a block has a {type(module).__name__}, expected timm's {name or layer.__name__}: it cannot be swapped",
    )
    return module


def _taken_over(old: Any) -> dict[str, Any]:
    """What a slot takes over from one of timm's attentions."""
    half = getattr(old, "rotate_half", False)
    names = {"q_norm": "q_norm", "k_norm": "k_norm", "norm": "norm", "sigmoid_gate": "gate"}
    layers = {name: getattr(old, theirs, nn.Identity()) for name, theirs in names.items()}
    kept = {name: layer for name, layer in layers.items() if layer is not None and type(layer) is not nn.Identity}
    if half:
        kept |= {name: _paired(kept[name]) for name in ("q_norm", "k_norm") if name in kept}
    return {
        "qkv": partial(_projection, old, half),
        "proj": old.proj,
        "proj_drop": old.proj_drop,
        "heads": old.num_heads,
        "kept": kept,
        "half_table": half,
    }


def _projection(old: Any, half: bool) -> nn.Linear:
    """The joined projection, its pairs of rotated channels side by side."""
    if old.qkv is None:
        groups = getattr(old, "num_kv_groups", 1)
        qkv = _joined([old.q_proj, *(_repeated(layer, groups, old.head_dim) for layer in (old.k_proj, old.v_proj))])
    elif getattr(old, "q_bias", None) is not None:
        qkv = _linear(old.qkv.weight, torch.cat((old.q_bias, old.k_bias, old.v_bias)))
    else:
        qkv = cast(nn.Linear, old.qkv)
    if not half:
        return qkv
    order = _neighbours(old.head_dim)

    def in_pairs(rows: Tensor) -> Tensor:
        query, key, value = rows.unflatten(0, (3, old.num_heads, old.head_dim)).unbind()
        return torch.stack((query[:, order], key[:, order], value)).flatten(0, 2)

    return _linear(in_pairs(qkv.weight), None if qkv.bias is None else in_pairs(qkv.bias))


def _neighbours(width: int) -> Tensor:
    """The order of channels that brings each i and i + width / 2 together."""
    halves: Tensor = torch.arange(width).unflatten(0, (2, -1))
    return halves.T.flatten()


def _paired(norm: nn.Module) -> nn.Module:
    """A copy of a norm of heads whose channels have the order of _neighbours."""
    norm = copy.deepcopy(norm)
    for parameter in norm.parameters():
        parameter.data = parameter.data[_neighbours(len(parameter))]
    return norm


def _repeated(layer: nn.Linear, groups: int, width: int) -> nn.Linear:
    """A projection to fewer heads, with each head as often as queries share it."""
    if groups == 1:
        return layer

    rows = torch.arange(layer.out_features).unflatten(0, (-1, width)).repeat_interleave(groups, 0).flatten()
    return _linear(layer.weight[rows], None if layer.bias is None else layer.bias[rows])


def _joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Several projections of one input as one; a missing bias is 0 if another layer has one."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return _linear(torch.cat(weights), None)
    filled = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
    return _linear(torch.cat(weights), torch.cat(filled))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer
