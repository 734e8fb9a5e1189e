"""Replacing the attention of a network; the weights of its projections are kept.

Here are also timm's DeiT-T, Swin-T and Swin-S with every mechanism, as in RALA's Table 8 and MALA's Table 9, and DeiT-S
with those of which papers since then compare it.

| base        | pattern                                                    |
|-------------|------------------------------------------------------------|
| deit_tiny   | every block; class token and table of positions kept       |
| deit_small  | the same; mhla has no class token in either                |
| swin_tiny   | LLSS; inline and agent LLLS, as their authors released     |
| swin_small  | LLSS                                                       |

deit_tiny_mhla_256 and deit_small_mhla_256 are as MHLA's authors released them: 16 px of zeros on each side of an image.
`softmax` is timm's unchanged network. InLine's and ViT³'s DeiT-T have 6 heads, as released. No weights are published
under these names; to start from pretrained weights, use `linvit.swap_attention` on a pretrained model.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from timm.layers import Mlp, to_2tuple
from timm.models import generate_default_cfgs, get_model_args
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import pad

from linvit.arguments import kind
from linvit.errors import SettingError, refuse
from linvit.formulas.feature_map import FeatureMap
from linvit.formulas.normalizer import Normalizer
from linvit.layers.checks import Depth, Device, Dtype, Rate, Ratio
from linvit.layers.mechanisms import DEIT_AND_SWIN, LINEAR_AXES, MECHANISMS, PREFIX, Mechanism
from linvit.layers.operator import Operator
from linvit.layers.swapped import LocalMlp
from linvit.layers.token_attention import Hydra, TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS, AgentAttention
from linvit.models.family import imagenet_cfg, register
from linvit.models.hugging_face import attention_layers, of_transformers, set_attention
from linvit.models.pretrained import create
from linvit.models.slots import ADAPTERS, Change, Slot, required, slots_of
from linvit.ops.state import Weighting
from linvit.ranges import Amount, Count, check, check_keys, declared, lookup

NAME = "linearized"
"""timm's name of a network that linearize or swap_attention returned, see linvit.models.linearizing."""
NO_WEIGHTS: Mapping[str, None] = dict.fromkeys(("url", "hf_hub_id", "hf_hub_filename", "file", "state_dict", "tag"))
"""Settings of timm's configuration of a network whose weights are nowhere yet."""
ARGUMENTS: Mapping[str, Any] = {"mechanism": str, "pattern": str | None, "attention": dict[str, Any] | None}
GIVEN = {"width", "heads", "grid", "num_prefix", "source", "operator_size", "device", "dtype"}
"""Arguments of a mechanism that come from the model."""
SWIN = {"patch_size": 4, "window_size": 7, "embed_dim": 96, "num_heads": (3, 6, 12, 24)}
BASES: dict[str, dict[str, Any]] = {
    "deit_tiny": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "deit_small": {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
    "swin_tiny": {**SWIN, "depths": (2, 2, 6, 2)},
    "swin_small": {**SWIN, "depths": (2, 2, 18, 2)},
}
PerStage = tuple[Count, Count, Count, Count]

TIMM: dict[str, Any] = {
    **ARGUMENTS,
    **dict.fromkeys(("img_size", "patch_size", "window_size"), Count | tuple[Count, Count]),
    **{"in_chans": Count, "num_classes": Amount, "embed_dim": Count, "mlp_ratio": Ratio, "global_pool": str},
    **{"depth": Depth, "depths": tuple[Depth, Depth, Depth, Depth], "num_heads": Count | PerStage},
    **dict.fromkeys(("drop_rate", "drop_path_rate", "proj_drop_rate", "pos_drop_rate", "attn_drop_rate"), Rate),
    **{"patch_drop_rate": Rate, "qkv_bias": bool, "class_token": bool, "device": Device, "dtype": Dtype},
}
"""Ranges of the arguments of timm's networks, which timm itself does not check."""
BUILT_IN = frozenset(MECHANISMS)
PADDED = "_256"
"""Ends the names of the networks that enlarge their images by zeros."""
NAMES = [f"{base}_{name}" for base in BASES for name, entry in MECHANISMS.items() if base in entry.networks]
NAMES += [f"{base}_mhla{PADDED}" for base in BASES if base.startswith("deit")]


class PaddedVisionTransformer(VisionTransformer):
    """A ViT that surrounds its images, of size `img_size`, by one patch of zeros."""

    def __init__(self, img_size: Any = 224, patch_size: Any = 16, **options: Any) -> None:
        sides = zip(to_2tuple(img_size), to_2tuple(patch_size), strict=True)
        super().__init__(tuple(side + 2 * patch for side, patch in sides), patch_size, **options)

    def forward_features(self, x: Tensor, *given: Any, **options: Any) -> Tensor:
        """Images (batch, channels, height, width) to tokens."""
        return super().forward_features(self._padded(x), *given, **options)

    def forward_intermediates(self, x: Tensor, *given: Any, **options: Any) -> Any:
        """As timm's, of the padded images."""
        return super().forward_intermediates(self._padded(x), *given, **options)

    def _padded(self, x: Tensor) -> Tensor:
        height, width = self.patch_embed.patch_size
        return pad(x, (width, width, height, height))


def swap_attention(
    model: nn.Module, mechanism: str, pattern: str | None = None, attention: Mapping[str, Any] | None = None
) -> nn.Module:
    """Replace the attention of a model of timm or transformers, in place.

    In Swin and SAM a stage or block with another attention sees its whole map at once: no windows, no shift, no
    relative positions. In PVT keys and values no longer come from a reduced map. In Hiera only the blocks that do not
    pool their queries are replaced, without local terms. Norms of queries and keys, gates, registers and the rotation
    of Eva (DINOv3, EVA-02) are kept. Layers that a mechanism adds (convolutions, tables, gates) start untrained;
    everything else keeps its weights. Dropout of the scores is removed: there is no score matrix. Position tables are
    made for the model's image size and interpolated for other sizes, which the model must accept (timm's
    `dynamic_img_size`).

    A model of transformers keeps its layers; their attention function is replaced, as by its name
    (`linvit.register_with_transformers`).

    Args:
        model: a VisionTransformer (DeiT, ViT, DINOv2, CLIP, SigLIP), Eva, NaFlexVit, VisionTransformerSAM,
            Hiera, SwinTransformer or PyramidVisionTransformerV2, or a network with an adapter of its own
            (`linvit.models.slots.adapter`); or a model of transformers whose tokens all see each other.
        mechanism: a name in MECHANISMS, such as "rala".
        pattern: one letter per stage, such as "LLSS": L for the mechanism, S to keep the present attention. In networks
            without stages one letter per block, or fewer for runs of equal length. By default all attention is
            replaced.
        attention: options of the mechanism, such as {"weighting": "uniform"}; {"mechanism": "softmax"} puts the
            operator of another mechanism into its layer.

    Returns:
        The same model, with the attributes `mechanism` and `pattern`, which has an S for every softmax attention. If
        timm created it, `timm.models.save_for_hf` stores what rebuilds it, timm's model "linearized".

    Raises ValueError for an unknown mechanism, option or pattern, a model or attention of another class, or a width
    that the mechanism does not support. The model is then unchanged.
    """
    check(ARGUMENTS, {"mechanism": mechanism, "pattern": pattern, "attention": attention})
    if of_transformers(model):
        return _swap_by_name(model, mechanism, pattern, attention)
    layer: type = lookup("mechanism", mechanism, TOKEN_LAYERS)
    takes = sorted({"mechanism", "feature_map", "weighting", "normalizer", *declared(layer)} - GIVEN)
    check_keys("attention", attention or {}, takes)
    check(layer, attention or {})
    options = {"mechanism": mechanism, **(attention or {})}
    softmax = lookup("mechanism", options["mechanism"], MECHANISMS).softmax
    base = rebuilt_from(model)
    slots = slots_of(model)
    if slots is None:
        names = ", ".join(swappable.__name__ for swappable in ADAPTERS)
        raise SettingError(f"`model` is {kind(model)}, expected one of {names}: choose another model")
    letters = each_letter(pattern, slots.letters, slots.exact)
    chosen = [slot for slot in slots.slots if letters[slot.letter] == "L"]
    changes = [change for slot in chosen for change in _changes(slot, mechanism, options)]
    for change in (*(slots.changes if chosen else ()), *changes):
        change()
    letters = letters if slots.exact else pattern or "L"
    vars(model).update(mechanism=mechanism, pattern=letters.replace("L", "S") if softmax else letters)
    if base is not None and chosen:
        given = {"mechanism": mechanism, "pattern": pattern, "attention": dict(attention or {}) or None}
        arguments = {name: value for name, value in given.items() if value is not None}
        record(model, model.pretrained_cfg, {"base": base, **arguments, "swapped": True})
    return model


def _swap_by_name(
    model: nn.Module, mechanism: str, pattern: str | None, attention: Mapping[str, Any] | None
) -> nn.Module:
    count = len(attention_layers(model))
    refuse(
        attention
        and f"`attention` has {next(iter(attention))!r}, but the layers of {type(model).__name__} stay those of "
        "transformers: leave it out.",
        not count
        and f"`model` is a {type(model).__name__}, expected a network whose own attention uses the interface of "
        "transformers: choose another, or one of its towers, such as its `vision_tower`.",
    )
    letters = each_letter(pattern, count)
    if "L" in letters:
        set_attention(model, mechanism, letters)
    vars(model).update(mechanism=mechanism, pattern=letters)
    return model


def rebuilt_from(model: nn.Module) -> dict[str, Any] | None:
    """The model's name in timm as "name" and its arguments; None if timm did not make it."""
    cfg: Any = getattr(model, "pretrained_cfg", None)
    return {"name": cfg["architecture"], **get_model_args(model)} if cfg and cfg.get("architecture") else None


def record(model: nn.Module, cfg: Any, arguments: dict[str, Any]) -> None:
    """Stores in a changed model how timm rebuilds it, so that `timm.models.save_for_hf` saves that."""
    vars(model).update(pretrained_cfg={**cfg, **NO_WEIGHTS, "architecture": NAME}, _model_args=arguments)


def _changes(slot: Slot, mechanism: str, options: dict[str, Any]) -> list[Change]:
    """What puts the mechanism into a slot; nothing is changed yet, so that an error leaves the model as it was."""
    new = attention_for(slot, mechanism, options)
    put: Callable[[TokenAttention], None] = slot.put or (lambda new: setattr(slot.block, "attn", new))
    changes: list[Change] = [lambda: put(new)]
    if MECHANISMS[mechanism].local_feed_forward:
        if slot.local:
            raise SettingError(
                f"`mechanism` {mechanism!r} adds a local feed-forward, which PVT has already: use 'linear_relu'"
            )
        old = required(slot.block.mlp, Mlp)
        weight = cast(nn.Linear, old.fc1).weight
        mlp = LocalMlp(old, new, device=weight.device, dtype=weight.dtype).train(slot.block.training)
        changes.insert(0, lambda: setattr(slot.block, "mlp", mlp))
    return changes


def attention_for(slot: Slot, mechanism: str, options: dict[str, Any]) -> TokenAttention:
    """The mechanism with the layers that it takes over."""
    qkv, weight = slot.qkv(), slot.proj.weight
    width = qkv.in_features
    if (qkv.out_features, slot.proj.in_features, slot.proj.out_features) != (3 * width, width, width):
        raise ValueError(f"the heads of the attention are not {width} channels wide in total: it cannot be swapped")
    layer = TOKEN_LAYERS[mechanism]
    if issubclass(layer, AgentAttention):
        options = {"agents": slot.agents, **options}
    new = layer(
        width,
        slot.heads,
        grid=slot.grid,
        num_prefix=slot.num_prefix,
        source=slot.source,
        device=weight.device,
        dtype=weight.dtype,
        **_fitting(slot, mechanism, layer, options),
    )
    new.qkv, new.proj, new.proj_drop, new.half_table = qkv, slot.proj, slot.proj_drop, slot.half_table
    for name, kept in (slot.kept or {}).items():
        setattr(new, name, kept)
    return new.train(slot.block.training)


def _fitting(slot: Slot, mechanism: str, layer: type[TokenAttention], options: dict[str, Any]) -> dict[str, Any]:
    """The options without what the place forbids: a second rotation, and what needs the grid where there is none."""
    takes = declared(cast(type, layer))
    if slot.rotated:
        if not layer.rotates:
            raise SettingError(
                f"`mechanism` {mechanism!r} cannot keep the rotation of the model, because it attends to other channels"
                " than the heads': choose another mechanism, such as 'linear', 'rala' or 'mala'"
            )
        return {**options, **({"rope": False} if "rope" in takes else {})}
    if slot.ordered:
        return options
    without = {name: False for name in ("lepe", "rope", "positions") if name in takes}
    asked = [name for name in without if options.get(name)]
    if asked or not ("lepe" in without or layer in (TokenAttention, Hydra)) or MECHANISMS[mechanism].local_feed_forward:
        named = f"`attention` has {asked[0]!r}" if asked else f"`mechanism` {mechanism!r} has local terms"
        raise ValueError(
            f"{named}, but the tokens of the model are not in the order of the grid:"
            " choose 'linear', 'rala' or 'mala' without it"
        )
    return {**options, **without}


def each_letter(pattern: str | None, count: int, exact: bool = False) -> str:
    """The pattern with one letter for each of `count` blocks or stages; raises ValueError for any other text."""
    if pattern is None:
        return "L" * count
    if not pattern or set(pattern) - set("LS") or count % len(pattern) or (exact and len(pattern) != count):
        expected = f"{count} letters" if exact else f"{count} letters or a number that divides it"
        raise SettingError(
            f"`pattern` is {pattern!r}, expected {expected}, L for the mechanism or S for the present attention: "
            "correct it"
        )
    return "".join(letter * (count // len(pattern)) for letter in pattern)


CFG = imagenet_cfg(fixed_input_size=True, crop_pct=0.9, first_conv="patch_embed.proj")
OF_DEIT = {"pool_size": None, "classifier": "head"}
default_cfgs = generate_default_cfgs(
    {f"{name}.untrained": {**CFG, **(OF_DEIT if name.startswith("deit") else {})} for name in NAMES}
)


def build_swapped(
    body: Callable[..., VisionTransformer | SwinTransformer],
    mechanism: str,
    pattern: str | None,
    attention: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A network of timm, made by `body` of these arguments, with the mechanism."""
    check(TIMM, {"pattern": pattern, "attention": attention, **kwargs})
    if mechanism == "softmax" and attention:
        raise SettingError(f"`attention` is {attention}, expected nothing: softmax attention has no axes to change")
    model = body(**kwargs)
    if mechanism == "softmax":
        is_vit = isinstance(model, VisionTransformer)
        each_letter(pattern, len(cast(nn.Sequential, model.blocks if is_vit else model.layers)), exact=not is_vit)
        vars(model).update(pattern="S" * len(pattern or "S"), mechanism=mechanism)
        return model
    return swap_attention(model, mechanism, pattern, attention)


def _create(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    base = next(base for base in BASES if name.startswith(f"{base}_"))
    mechanism = name.removeprefix(f"{base}_").removesuffix(PADDED)
    is_vit = base.startswith("deit")
    body: type[VisionTransformer] | type[SwinTransformer] = VisionTransformer if is_vit else SwinTransformer
    pattern = None if is_vit else "LLSS"
    arguments = {"pattern": pattern, **BASES[base], **MECHANISMS[mechanism].networks[base], **kwargs}
    if name.endswith(PADDED):
        body = PaddedVisionTransformer
    feature_cfg = {"feature_cls": "getter", "out_indices": 3} if is_vit else None
    return create(partial(build_swapped, body, mechanism), name, pretrained, feature_cfg, **arguments)


register(_create, NAMES, __name__)


def register_mechanism(
    name: str,
    *,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] = "elu1",
    weighting: str | Weighting = "uniform",
    normalizer: str | Normalizer = "divide",
    layer: type[TokenAttention] = TokenAttention,
    colour: str = "#000000",
) -> None:
    """Give a mechanism of your own a name, until the process ends.

    Then `swap_attention` and whatever else takes a mechanism knows it: timm's models deit_tiny_NAME, swin_tiny_NAME
    and swin_small_NAME, stages of pyramids, and if its weighting has a causal form decoders and Conformers; recipes,
    analyses, comparisons, benchmarks and exports. Weights of it can be loaded once it is registered. The same name may
    be registered again, with other functions.

    Args:
        name: a Python identifier.
        feature_map, weighting, normalizer: as in `linvit.ops.linear_attention`: names or functions.
        layer: what `swap_attention` puts into a network.
        colour: in figures, as matplotlib takes it.

    Raises:
        TypeError, ValueError: for a name that linvit uses itself, or an axis or layer that cannot be used.
    """
    refuse(
        not (isinstance(name, str) and name.isidentifier())
        and f"`name` is {name!r}, expected a Python identifier, such as 'mine'",
        name in BUILT_IN and f"`name` is {name!r}, which is a mechanism of linvit: choose another",
        not (isinstance(layer, type) and issubclass(layer, TokenAttention))
        and f"`layer` is {layer!r}, expected a subclass of linvit.layers.token_attention.TokenAttention",
    )
    given = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
    Operator("linear", 1, 8, **given)  # type: ignore[arg-type]  # raises for what it cannot use
    usual = {"feature_map": "elu1", "weighting": "uniform", "normalizer": "divide"}
    axes = {axis: choice for axis, choice in given.items() if choice != usual[axis]}
    places = ("maps", "images") if callable(weighting) else ("maps", "sequences", "images")
    causal = PREFIX if weighting == "query_mean" else {}
    names = [f"{base}_{name}" for base in DEIT_AND_SWIN if name not in MECHANISMS]
    MECHANISMS[name] = Mechanism(colour, axes, causal, places, DEIT_AND_SWIN)
    TOKEN_LAYERS[name], LINEAR_AXES[name] = layer, axes
    default_cfgs.update({each: default_cfgs[f"{each.removesuffix(name)}linear"] for each in names})
    register(_create, names, __name__)
