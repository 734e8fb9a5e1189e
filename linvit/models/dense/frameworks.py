"""The five dense frameworks of the papers by name."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from linvit.layers.checks import Device
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.mask_rcnn import CascadeMaskRCNN, MaskRCNN
from linvit.models.dense.retinanet import RetinaNet
from linvit.models.dense.segmentors import SemanticFPN, UperNet
from linvit.ranges import Count, check, check_keys, lookup

DETECTORS: dict[str, Callable[..., nn.Module]] = {
    "retinanet": RetinaNet,
    "mask_rcnn": MaskRCNN,
    "cascade_mask_rcnn": CascadeMaskRCNN,
}
SEGMENTORS: dict[str, Callable[..., nn.Module]] = {"semantic_fpn": SemanticFPN, "upernet": UperNet}
FRAMEWORKS = DETECTORS | SEGMENTORS
ARGUMENTS = {"heads": dict[str, Any] | None, "num_classes": Count, "device": Device}


def build_dense(
    framework: str,
    backbone: str,
    num_classes: int,
    heads: dict[str, Any] | None = None,
    device: torch.device | str | int | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A detector or segmentor on a backbone.

    Args:
        framework: a name of FRAMEWORKS.
        backbone: a model that timm knows.
        num_classes: number of classes without a background.
        heads: further arguments of the framework: width, …
        device: where the network is created.
        kwargs: arguments of the backbone: pretrained, pattern, drop_path_rate, …

    Raises ValueError for an unknown framework, argument or backbone, a value outside its range, and a backbone without
    four stages.
    """
    check(ARGUMENTS, {"heads": heads, "num_classes": num_classes, "device": device})
    build = lookup("framework", framework, FRAMEWORKS)
    takes = list(inspect.signature(build).parameters)[2:]
    check_keys("heads", heads or {}, takes)
    body = DenseBackbone(backbone, device=device, **kwargs) if device else DenseBackbone(backbone, **kwargs)
    with torch.device(device or "cpu"):
        return build(body, num_classes, **heads or {})
