"""timm's DeiT-T, Swin-T and Swin-S with every compared mechanism, as in RALA's Table 8 and MALA's Table 9.

| base        | pattern                                                    |
|-------------|------------------------------------------------------------|
| deit_tiny   | every block; class token and table of positions kept       |
| swin_tiny   | LLSS; inline and agent LLLS, as their authors released     |
| swin_small  | LLSS                                                       |

`softmax` is timm's network as it is. InLine's DeiT has 6 heads, as released. There are no published weights in these
names; `linvit.swap_attention` works on pretrained models.
"""

from functools import partial
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from linvit.layers.mechanisms import MECHANISMS
from linvit.models.family import imagenet_cfg, register
from linvit.models.pretrained import create
from linvit.models.swap import swap_attention

SWIN = {"patch_size": 4, "window_size": 7, "embed_dim": 96, "num_heads": (3, 6, 12, 24)}
BASES: dict[str, dict[str, Any]] = {
    "deit_tiny": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "swin_tiny": {**SWIN, "depths": (2, 2, 6, 2)},
    "swin_small": {**SWIN, "depths": (2, 2, 18, 2)},
}
NAMES = [f"{base}_{name}" for base in BASES for name, entry in MECHANISMS.items() if base in entry.networks]


def _cfg(name: str) -> dict[str, Any]:
    body = {"pool_size": None, "classifier": "head"} if name.startswith("deit") else {}
    return imagenet_cfg(fixed_input_size=True, crop_pct=0.9, first_conv="patch_embed.proj", **body)


default_cfgs = generate_default_cfgs({f"{name}.untrained": _cfg(name) for name in NAMES})


def _build(
    body: type[nn.Module], mechanism: str, pattern: str | None, attention: dict[str, Any] | None = None, **kwargs
) -> nn.Module:
    model = body(**kwargs)
    if mechanism == "softmax":
        if attention:
            raise ValueError(f"`attention` is {attention}, expected nothing: softmax attention has no axes to change")
        model.pattern, model.mechanism = "S" * len(pattern or "S"), mechanism
        return model
    return swap_attention(model, mechanism, pattern, attention)


def _create(name: str, pretrained: bool, **kwargs) -> nn.Module:
    base = next(base for base in BASES if name.startswith(f"{base}_"))
    mechanism = name.removeprefix(f"{base}_")
    body, pattern = (VisionTransformer, None) if base == "deit_tiny" else (SwinTransformer, "LLSS")
    arguments = {"pattern": pattern, **BASES[base], **MECHANISMS[mechanism].networks[base], **kwargs}
    feature_cfg = {"feature_cls": "getter", "out_indices": 3} if body is VisionTransformer else None
    return create(partial(_build, body, mechanism), name, pretrained, feature_cfg, **arguments)


register(_create, NAMES)
