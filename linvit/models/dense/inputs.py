"""Checks of a detector's images and targets: each wrong one is a TypeError or ValueError of one sentence."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.arguments import is_traced, kind
from linvit.errors import SettingError
from linvit.layers.checks import check_floats, check_whole_numbers, has_values

Target = Mapping[str, Tensor]


class CheckedInputs:
    """A base class, listed before torchvision's, that checks images and targets before the detector reads them.

    num_classes: classes without a background. has_masks: whether targets need masks.
    """

    num_classes: int
    has_masks: bool

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Losses in training, detections in evaluation.

        Args:
            images: each (3, height, width), floating point and normalized.
            targets: in training one dict per image: boxes (n, 4), left, top, right and bottom in pixels; labels int64
                (n,), 0 … num_classes - 1; for a network with masks also masks (n, height, width), bool or uint8.
                iscrowd (n,) marks crowds, which are not learned.

        Raises TypeError or ValueError for images or targets of the wrong type, shape or range.
        """
        network = cast(nn.Module, self)
        if not is_traced():
            check_images(images)
            if network.training:
                check_targets(targets, images, self.num_classes, self.has_masks)
        return super().forward(images, targets)  # type: ignore[misc]


def check_images(images: Sequence[Tensor]) -> None:
    """Raises unless there are images, each a floating-point tensor (3, height, width)."""
    if not isinstance(images, list | tuple | Tensor):
        raise TypeError(f"`images` is {kind(images)}, expected a list of tensors: convert it")
    if len(images) == 0:
        raise SettingError("`images` is empty, expected one image or more")
    for number, image in enumerate(images):
        check_floats(f"images[{number}]", image, (3, "height", "width"), "convert the image to RGB")


def check_targets(targets: Any, images: Sequence[Tensor], num_classes: int, masks: bool) -> None:
    """Raises unless each image has a valid target."""
    if not isinstance(targets, list | tuple):
        raise TypeError(
            f"`targets` is {kind(targets)}, expected a list of dicts in training mode: pass them, or call `eval()`"
        )
    if len(targets) != len(images):
        raise SettingError(f"`targets` has {len(targets)} entries for {len(images)} images, expected one per image")
    needed = ("boxes", "labels", "masks") if masks else ("boxes", "labels")
    for number, (target, image) in enumerate(zip(targets, images, strict=True)):
        missing = [key for key in needed if not isinstance(target, Mapping) or key not in target]
        if missing:
            raise ValueError(
                f"`targets[{number}]` has no {' and no '.join(missing)}, expected a dict of {', '.join(needed)}"
            )
        _check_objects(f"targets[{number}]", target, image, num_classes)


def _check_objects(name: str, target: Target, image: Tensor, num_classes: int) -> None:
    boxes = target["boxes"]
    remedy = "pass left, top, right and bottom of each box"
    check_floats(f"{name}['boxes']", boxes, ("objects", 4), remedy, cast="convert it to float32")
    count = len(boxes)
    check_whole_numbers(f"{name}['labels']", target["labels"], (count,), 0, num_classes - 1)
    if has_values(boxes) and not (boxes.isfinite().all() and (boxes[:, 2:] > boxes[:, :2]).all()):
        raise SettingError(f"`{name}['boxes']` has a box without area or with NaN: correct or drop it")
    height, width = image.shape[-2:]
    for key, shape in (("masks", (count, height, width)), ("iscrowd", (count,))):
        x = target.get(key)
        if key in target and (not isinstance(x, Tensor) or tuple(x.shape) != shape):
            got = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {kind(x)}"
            raise SettingError(f"`{name}['{key}']` {got}, expected a tensor of shape {shape}, an entry per box")
    if "masks" in target and target["masks"].dtype not in (torch.bool, torch.uint8):
        raise SettingError(f"`{name}['masks']` is {target['masks'].dtype}, expected bool or uint8: convert it")
