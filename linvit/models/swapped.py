"""timm's DeiT-T, Swin-T and Swin-S with every mechanism, as in RALA's Table 8 and MALA's Table 9.

| base        | pattern                                                    |
|-------------|------------------------------------------------------------|
| deit_tiny   | every block; class token and table of positions kept       |
| swin_tiny   | LLSS; inline and agent LLLS, as their authors released     |
| swin_small  | LLSS                                                       |

`softmax` is timm's unchanged network. InLine's DeiT has 6 heads, as released. No weights are published under these
names; to start from pretrained weights, use `linvit.swap_attention` on a pretrained model.
"""

from functools import partial
from typing import Annotated, Any, cast

from timm.models import generate_default_cfgs
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from linvit.errors import SettingError
from linvit.layers.checks import Channels, Classes, Depth, Device, Dtype, Heads, Kernel, Rate, Ratio, Width
from linvit.layers.mechanisms import MECHANISMS
from linvit.models.family import imagenet_cfg, register
from linvit.models.pretrained import create
from linvit.models.swap import ARGUMENTS, each_letter, swap_attention
from linvit.ranges import Range, check

SWIN = {"patch_size": 4, "window_size": 7, "embed_dim": 96, "num_heads": (3, 6, 12, 24)}
BASES: dict[str, dict[str, Any]] = {
    "deit_tiny": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "swin_tiny": {**SWIN, "depths": (2, 2, 6, 2)},
    "swin_small": {**SWIN, "depths": (2, 2, 18, 2)},
}
PerStage = tuple[Heads, Heads, Heads, Heads]
Side = Annotated[int, Range(1, 65_536)]
TIMM: dict[str, Any] = {
    **ARGUMENTS,
    "img_size": Side | tuple[Side, Side],
    **dict.fromkeys(("patch_size", "window_size"), Kernel | tuple[Kernel, Kernel]),
    **{"in_chans": Channels, "num_classes": Classes, "embed_dim": Width, "mlp_ratio": Ratio, "global_pool": str},
    **{"depth": Depth, "depths": tuple[Depth, Depth, Depth, Depth], "num_heads": Heads | PerStage},
    **dict.fromkeys(("drop_rate", "drop_path_rate", "proj_drop_rate", "pos_drop_rate", "attn_drop_rate"), Rate),
    **{"patch_drop_rate": Rate, "qkv_bias": bool, "class_token": bool, "device": Device, "dtype": Dtype},
}
"""Ranges of the arguments of timm's networks, which timm itself does not check."""
NAMES = [f"{base}_{name}" for base in BASES for name, entry in MECHANISMS.items() if base in entry.networks]


def _cfg(name: str) -> dict[str, Any]:
    body: dict[str, Any] = {"pool_size": None, "classifier": "head"} if name.startswith("deit") else {}
    return imagenet_cfg(fixed_input_size=True, crop_pct=0.9, first_conv="patch_embed.proj", **body)


default_cfgs = generate_default_cfgs({f"{name}.untrained": _cfg(name) for name in NAMES})


def _build(
    body: type[VisionTransformer | SwinTransformer],
    mechanism: str,
    pattern: str | None,
    attention: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    check(TIMM, {"pattern": pattern, "attention": attention, **kwargs})
    if mechanism == "softmax" and attention:
        raise SettingError(f"`attention` is {attention}, expected nothing: softmax attention has no axes to change")
    model = body(**kwargs)
    if mechanism == "softmax":
        is_vit = body is VisionTransformer
        each_letter(pattern, len(cast(nn.Sequential, model.blocks if is_vit else model.layers)), exact=not is_vit)
        vars(model).update(pattern="S" * len(pattern or "S"), mechanism=mechanism)
        return model
    return swap_attention(model, mechanism, pattern, attention)


def _create(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    base = next(base for base in BASES if name.startswith(f"{base}_"))
    mechanism = name.removeprefix(f"{base}_")
    body, pattern = (VisionTransformer, None) if base == "deit_tiny" else (SwinTransformer, "LLSS")
    arguments = {"pattern": pattern, **BASES[base], **MECHANISMS[mechanism].networks[base], **kwargs}
    feature_cfg = {"feature_cls": "getter", "out_indices": 3} if body is VisionTransformer else None
    return create(partial(_build, body, mechanism), name, pretrained, feature_cfg, **arguments)


register(_create, NAMES)
