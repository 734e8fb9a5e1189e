"""Steps that all detectors share: batching of images, targets, and non-maximum suppression."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import batched_nms, nms


class ImageBatch(GeneralizedRCNNTransform):
    """Batches images of different sizes, already normalized and resized, padded to multiples of 32."""

    def __init__(self) -> None:
        super().__init__(32, 1 << 20, [0.0] * 3, [1.0] * 3, size_divisible=32, _skip_resize=True)

    def resize(
        self, image: Tensor, target: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor] | None]:
        """The unchanged image, which the data has resized, and its target without crowds."""
        return image, None if target is None else known_objects(target)

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


def known_objects(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target without crowds, which the losses ignore."""
    if "iscrowd" not in target:
        return target
    per_object = ("boxes", "labels", "masks", "area", "iscrowd")
    single = ~target["iscrowd"].bool()
    return {key: value[single] if key in per_object else value for key, value in target.items()}


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
    keep: Tensor = nms(boxes + (labels.to(boxes) * (largest + 1))[:, None], scores, overlap)
    return keep


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
