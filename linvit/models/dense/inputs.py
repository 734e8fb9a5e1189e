"""Images and targets of all detectors: their checks, batches, and non-maximum suppression."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import batched_nms, nms

from linvit.arguments import is_traced
from linvit.errors import SettingError, quoted
from linvit.layers.checks import check_floats, check_whole_numbers

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
        """
        if not is_traced():
            self._check(images, targets)
        return super().forward(images, targets)  # type: ignore[misc]

    def _check(self, images: Sequence[Tensor], targets: Sequence[Target] | None) -> None:
        """Raises unless there are images and, in training, a target of each; torchvision refuses boxes without area."""
        if not isinstance(images, list | tuple | Tensor) or len(images) == 0:
            raise SettingError(f"`images` is {quoted(images)}, expected a list of one tensor or more: pass images")
        for number, image in enumerate(images):
            check_floats(f"images[{number}]", image, (3, "height", "width"), "convert the image to RGB")
        if not cast(nn.Module, self).training:
            return
        if targets is None or len(targets) != len(images):
            raise SettingError(f"`targets` is {quoted(targets)}, expected a dict for each of {len(images)} images")
        needed = ("boxes", "labels", "masks") if self.has_masks else ("boxes", "labels")
        for number, (target, image) in enumerate(zip(targets, images, strict=True)):
            missing = [key for key in needed if not isinstance(target.get(key), Tensor)]
            if missing:
                raise SettingError(
                    f"`targets[{number}]` has no {' and no '.join(missing)}, expected tensors {', '.join(needed)}"
                )
            remedy = "pass left, top, right and bottom of each box"
            check_floats(f"targets[{number}]['boxes']", target["boxes"], ("objects", 4), remedy, cast="convert it")
            count, given = len(target["boxes"]), target.get("masks")
            check_whole_numbers(f"targets[{number}]['labels']", target["labels"], (count,), 0, self.num_classes - 1)
            if given is not None and tuple(given.shape) != (count, *image.shape[-2:]):
                wanted = (count, *image.shape[-2:])
                raise SettingError(f"`targets[{number}]['masks']` has shape {tuple(given.shape)}, expected {wanted}")


class ImageBatch(GeneralizedRCNNTransform):
    """Batches images of different sizes, already normalized and resized, padded to multiples of 32."""

    def __init__(self) -> None:
        super().__init__(32, 1 << 20, [0.0] * 3, [1.0] * 3, size_divisible=32, _skip_resize=True)

    def resize(
        self, image: Tensor, target: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor] | None]:
        """The unchanged image, which the data has resized, and its target without crowds, which losses ignore."""
        if target is None or "iscrowd" not in target:
            return image, target
        per_object = ("boxes", "labels", "masks", "area", "iscrowd")
        single = ~target["iscrowd"].bool()
        return image, {key: value[single] if key in per_object else value for key, value in target.items()}

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: Sequence[tuple[int, int]],
        original_image_sizes: Sequence[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Detections; their masks, if any, become bool (n, height, width) in the image."""
        for detections, (height, width) in zip(result, image_shapes, strict=False):  # none in training
            if "masks" in detections:
                detections["masks"] = pasted(detections["masks"], detections["boxes"], height, width)
        return result


def padded(images: Tensor) -> Tensor:
    """Images (batch, channels, height, width) padded as by ImageBatch."""
    bottom, right = ((side + 31) // 32 * 32 - side for side in images.shape[-2:])
    return F.pad(images, (0, right, 0, bottom))


def suppressed(boxes: Tensor, scores: Tensor, least: float, overlap: float, most: int) -> dict[str, Tensor]:
    """Detections of one image: non-maximum suppression within each class.

    Args:
        boxes: (n, 4), or (n, num_classes, 4) if each class has its own.
        scores: (n, num_classes) without a background.
        least: minimum score of a detection.
        overlap: IoU above which the box with the lower score is removed.
        most: maximum number of detections.
    """
    rows, labels = torch.where(scores > least)
    chosen = boxes[rows] if boxes.ndim == 2 else boxes[rows, labels]
    scores = scores[rows, labels]
    suppress = _nms_on_shifted if torch.compiler.is_exporting() else batched_nms
    keep = suppress(chosen, scores, labels, overlap)[:most]
    return {"boxes": chosen[keep], "labels": labels[keep], "scores": scores[keep]}


def _nms_on_shifted(boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float) -> Tensor:
    """torchvision's batched_nms of up to 1,000 boxes, without its branches on their number, which has no graph."""
    largest = F.pad(boxes.flatten(), (0, 1)).amax(0)  # also of no boxes
    return nms(boxes + (labels.to(boxes) * (largest + 1))[:, None], scores, overlap)


def pasted(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Probabilities (n, side, side) within boxes (n, 4) to masks (n, height, width), true from 0.5."""
    out = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    for mask, target, (left, top, right, bottom) in zip(masks, out, boxes.tolist(), strict=True):
        first_row, first_column = max(math.floor(top), 0), max(math.floor(left), 0)
        window = target[first_row : math.ceil(bottom), first_column : math.ceil(right)]
        if window.numel() == 0:
            continue
        rows = torch.arange(window.shape[0], device=masks.device, dtype=masks.dtype) + first_row + 0.5
        columns = torch.arange(window.shape[1], device=masks.device, dtype=masks.dtype) + first_column + 0.5
        y = (rows - top) / max(bottom - top, 1e-6) * 2 - 1
        x = (columns - left) / max(right - left, 1e-6) * 2 - 1
        grid = torch.stack((x.expand(window.shape), y[:, None].expand(window.shape)), dim=-1)
        window.copy_(F.grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0] >= 0.5)
    return out
