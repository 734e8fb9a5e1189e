"""timm's model "linearized": any softmax network that `linearize` takes, with linear attention in its place.

    timm.create_model("linearized", base="vit_small_patch14_dinov2", mechanism="mala", pattern="LLLLLLSSSSSS")

It has no weights of its own. To start from a trained network, use `linvit.linearize` on it, or `linvit linearize`; both
store weights that fit this name.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import timm
from timm.models import PretrainedCfg, generate_default_cfgs
from torch import nn

from linvit.models.by_name import check_model
from linvit.models.family import imagenet_cfg, register
from linvit.models.linearizing import create_base, linearize
from linvit.models.pretrained import create
from linvit.models.swap import NAME, NO_WEIGHTS, swap_attention
from linvit.ranges import check

KEPT = {"name", "base", "mechanism", "pattern", "attention", "swapped"}
"""Arguments of the base with names that "linearized" has too."""
default_cfgs = generate_default_cfgs({f"{NAME}.untrained": imagenet_cfg()})


def _build(
    base: Mapping[str, Any],
    mechanism: str,
    pattern: str | None,
    attention: dict[str, Any] | None,
    swapped: bool,
    **arguments: Any,
) -> nn.Module:
    change = swap_attention if swapped else linearize
    return change(create_base(base, **arguments), mechanism, pattern, attention)


def _create(
    name: str,
    pretrained: bool,
    base: str | Mapping[str, Any] = "deit_tiny_patch16_224",
    mechanism: str = "mala",
    pattern: str | None = None,
    attention: dict[str, Any] | None = None,
    swapped: bool = False,
    pretrained_cfg: Any = None,
    **arguments: Any,
) -> nn.Module:
    """base: a model of timm by name, or with its own arguments, {"name": …}; further arguments are passed on to it.

    swapped: replace its attention with `swap_attention` instead of `linearize`.
    """
    check({"base": str | dict[str, Any], "swapped": bool}, {"base": base, "swapped": swapped})
    given = {"name": base} if isinstance(base, str) else dict(base)
    check_model(given.get("name", ""))
    cfg = pretrained_cfg or timm.get_pretrained_cfg(given["name"]) or PretrainedCfg(**imagenet_cfg())
    if pretrained_cfg is None:
        cfg = replace(cfg, **NO_WEIGHTS, architecture=NAME)
    if arguments.get("features_only") and arguments.get("out_indices") is None:
        features: Any = create_base(given, features_only=True)
        arguments["out_indices"] = features.feature_info.out_indices  # those of the base
    build = partial(_build, given, mechanism, pattern, attention, swapped)
    # the base's own arguments too, or timm would put those of its configuration, such as the image size, over them
    arguments = {**{name: value for name, value in given.items() if name not in KEPT}, **arguments}
    return create(build, name, pretrained, {"feature_cls": "getter"}, pretrained_cfg=cfg, **arguments)


register(_create, [NAME])
