"""The second stage of Mask R-CNN and of its cascade: boxes and masks from regions of the pyramid.

Labels are 0 … num_classes - 1 and the background is num_classes, as in the released heads: the classifier has a last
row for it, boxes and masks do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.ops import box_iou, clip_boxes_to_image, generalized_box_iou_loss, roi_align

from linvit.models.dense.anchors import BoxDeltas, QualityMatcher
from linvit.models.dense.backbone import conv_norm_relu
from linvit.models.dense.inputs import suppressed
from linvit.ranges import lookup

STRIDES = (4, 8, 16, 32)
Sizes = list[tuple[int, int]]
Targets = list[dict[str, Tensor]]


class RegionPool(nn.Module):
    """RoIAlign (aligned, one sample per pixel) of each region from the level that fits its size.

    Args:
        side: cells per side of a region.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, maps: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Boxes (n, 4) of each image to (sum of n, channels, side, side), in float32 or wider."""
        maps = [level.to(torch.promote_types(level.dtype, torch.float32)) for level in maps[: len(STRIDES)]]
        index = torch.cat([box.new_full((box.shape[0], 1), i) for i, box in enumerate(boxes)])
        regions = torch.cat((index, torch.cat(list(boxes))), dim=1).to(maps[0].dtype)
        sizes = ((regions[:, 3] - regions[:, 1]) * (regions[:, 4] - regions[:, 2])).clamp(min=0).sqrt()
        levels = torch.log2(sizes / 56 + 1e-6).floor().clamp(0, len(STRIDES) - 1).long()
        out = maps[0].new_zeros(regions.shape[0], maps[0].shape[1], self.side, self.side)
        for i, (level, stride) in enumerate(zip(maps, STRIDES, strict=True)):
            here = torch.where((levels == i) & (sizes > 0))[0]  # empty regions stay zeros, in every runtime
            cut = roi_align(level, regions[here], self.side, 1 / stride, sampling_ratio=0, aligned=True)
            out = out.index_copy(0, here, cut)
        return out


class BoxHead(nn.Module):
    """Regions (n, width, 7, 7) to class logits (n, num_classes + 1) and box codes (n, 4·num_classes).

    Args:
        num_classes: classes without the background.
        num_convs: 3×3 convolutions with batch norm before the linear layers.
        num_linear: linear layers.
        width: channels of the regions.
        hidden: channels of the linear layers.
    """

    def __init__(self, num_classes: int, num_convs: int, num_linear: int, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.convs = nn.Sequential(*(conv_norm_relu(width, width) for _ in range(num_convs)))
        widths = (width * 7 * 7, *(hidden,) * num_linear)
        self.linear = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.classifier = nn.Linear(hidden, num_classes + 1)
        self.boxes = nn.Linear(hidden, 4 * num_classes)
        for layer in self.linear:
            nn.init.xavier_uniform_(cast(nn.Linear, layer).weight)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.normal_(self.boxes.weight, std=0.001)
        for layer in (*self.linear, self.classifier, self.boxes):
            nn.init.zeros_(layer.bias)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convs(regions).flatten(1)
        for layer in self.linear:
            x = F.relu(layer(x))
        logits, codes = self.classifier(x), self.boxes(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide), codes.to(wide)


class MaskHead(nn.Module):
    """Regions (n, width, 14, 14) to mask logits (n, num_classes, 28, 28)."""

    def __init__(self, num_classes: int, width: int = 256) -> None:
        super().__init__()
        self.convs = nn.Sequential(*(nn.Conv2d(width, width, 3, 1, 1) for _ in range(4)))
        self.upsample = nn.ConvTranspose2d(width, width, 2, 2)
        self.logits = nn.Conv2d(width, num_classes, 1)
        for layer in (*self.convs, self.upsample, self.logits):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, regions: Tensor) -> Tensor:
        for layer in self.convs:
            regions = F.relu(layer(regions))
        logits = self.logits(F.relu(self.upsample(regions)))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Step:
    """One step of a cascade.

    overlap: IoU from which a region is an object. weight: of the losses of the step. deviations: of the box codes.
    low_quality: also assign each object the regions that overlap it most, from that IoU on.
    """

    overlap: float
    weight: float
    deviations: tuple[float, float, float, float]
    low_quality: bool


@dataclass(frozen=True)
class Samples:
    """The regions of one image on which a step is trained, with boxes (n, 4) and indices (n,) of their objects."""

    boxes: Tensor
    labels: Tensor
    objects: Tensor
    index: Tensor


class RegionHeads(nn.Module):
    """One or more steps, each with a box head and a mask head; each step starts from the boxes of the one before.

    Args:
        num_classes, num_convs, num_linear, width, hidden: of every box head, see BoxHead.
        steps: settings of the steps.
        box_loss: "l1" on codes, or "giou" (weight 10) on decoded boxes.
        num_regions: regions per image on which each step is trained, at most a quarter of them objects.

    In evaluation the class logits (unnormalized, as released) and mask probabilities of the steps are averaged.
    """

    def __init__(
        self,
        num_classes: int,
        steps: Sequence[Step],
        num_convs: int,
        num_linear: int,
        box_loss: str,
        width: int = 256,
        hidden: int = 1024,
        num_regions: int = 512,
    ) -> None:
        super().__init__()
        self.num_classes, self.steps, self.width = num_classes, tuple(steps), width
        self.box_pool, self.mask_pool = RegionPool(7), RegionPool(14)
        self.box_heads = nn.ModuleList(BoxHead(num_classes, num_convs, num_linear, width, hidden) for _ in steps)
        self.mask_heads = nn.ModuleList(MaskHead(num_classes, width) for _ in steps)
        self.coders = [BoxDeltas(step.deviations) for step in steps]
        self.matchers = [
            QualityMatcher(step.overlap, step.overlap, step.overlap if step.low_quality else None) for step in steps
        ]
        self.sampler = BalancedPositiveNegativeSampler(num_regions, 0.25)
        self.box_loss = lookup("box_loss", box_loss, _BOX_LOSSES)
        self.score_thresh, self.nms_thresh, self.detections_per_img = 0.05, 0.5, 100

    def forward(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: Sizes, targets: Targets | None = None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections (empty in training) and losses (empty in evaluation)."""
        maps = list(features.values())
        if self.training:
            return [], self._losses(maps, proposals, image_shapes, targets or [])
        return self._detections(maps, proposals, image_shapes), {}

    def _losses(self, maps: list[Tensor], boxes: list[Tensor], shapes: Sizes, targets: Targets) -> dict[str, Tensor]:
        losses = {}
        for i, step in enumerate(self.steps):
            samples = [self._sampled(i, *pair) for pair in zip(boxes, targets, strict=True)]
            regions = [sample.boxes for sample in samples]
            logits, codes = self.box_heads[i](self.box_pool(maps, regions))
            labels = torch.cat([sample.labels for sample in samples])
            suffix = f"_{i + 1}" if len(self.steps) > 1 else ""
            losses[f"loss_classifier{suffix}"] = step.weight * F.cross_entropy(logits, labels)
            losses[f"loss_box_reg{suffix}"] = step.weight * self._box_loss(i, codes, labels, samples)
            losses[f"loss_mask{suffix}"] = step.weight * self._mask_loss(i, maps, samples, targets)
            if i + 1 < len(self.steps):
                foreground = torch.where(labels < self.num_classes, labels, logits[:, :-1].argmax(1))
                boxes = self._refined(i, codes.detach(), foreground, regions, shapes)
                # Drop the objects themselves: the next step adds them again.
                boxes = [
                    refined[(sample.boxes != sample.objects).any(1)]
                    for refined, sample in zip(boxes, samples, strict=True)
                ]
        return losses

    def _sampled(self, i: int, proposals: Tensor, target: dict[str, Tensor]) -> Samples:
        objects = target["boxes"].to(proposals.dtype)
        boxes = torch.cat((proposals, objects))
        if len(objects) == 0:
            matches = torch.full((len(boxes),), -1, device=boxes.device)
            objects = boxes.new_zeros(1, 4)
        else:
            matches = self.matchers[i](box_iou(objects, boxes))
        positive, negative = self.sampler([(matches >= 0).long()])
        chosen = torch.where((positive[0] | negative[0]).bool())[0]
        matches = matches[chosen]
        index = matches.clamp(min=0)
        labels = torch.full_like(matches, self.num_classes)
        labels[matches >= 0] = target["labels"][matches[matches >= 0]]
        return Samples(boxes[chosen], labels, objects[index], index)

    def _box_loss(self, i: int, codes: Tensor, labels: Tensor, samples: list[Samples]) -> Tensor:
        boxes = torch.cat([sample.boxes for sample in samples])
        objects = torch.cat([sample.objects for sample in samples])
        positive = torch.where(labels < self.num_classes)[0]
        chosen = codes.unflatten(1, (-1, 4))[positive, labels[positive]]
        return self.box_loss(chosen, boxes[positive], objects[positive], self.coders[i]) / max(len(labels), 1)

    def _mask_loss(self, i: int, maps: list[Tensor], samples: list[Samples], targets: Targets) -> Tensor:
        positive = [torch.where(sample.labels < self.num_classes)[0] for sample in samples]
        boxes = [sample.boxes[kept] for sample, kept in zip(samples, positive, strict=True)]
        logits: Tensor = self.mask_heads[i](self.mask_pool(maps, boxes))
        if len(logits) == 0:
            return logits.sum()
        labels = torch.cat([sample.labels[kept] for sample, kept in zip(samples, positive, strict=True)])
        wanted = []
        for target, box, sample, kept in zip(targets, boxes, samples, positive, strict=True):
            masks = target["masks"].to(box.dtype)[:, None]
            regions = torch.cat((sample.index[kept, None].to(box.dtype), box), dim=1)
            wanted.append(roi_align(masks, regions, logits.shape[-1], 1.0, 0, aligned=True)[:, 0] >= 0.5)
        chosen = logits[torch.arange(len(labels), device=labels.device), labels]
        return F.binary_cross_entropy_with_logits(chosen, torch.cat(wanted).to(chosen.dtype))

    def _refined(self, i: int, codes: Tensor, labels: Tensor, boxes: list[Tensor], shapes: Sizes) -> list[Tensor]:
        """The regions moved by the codes of their classes and clipped to their images."""
        chosen = codes.unflatten(1, (-1, 4))[torch.arange(labels.shape[0], device=labels.device), labels]
        moved = self.coders[i].decode_single(chosen, torch.cat(boxes)).split([box.shape[0] for box in boxes])
        return [clip_boxes_to_image(box, shape) for box, shape in zip(moved, shapes, strict=True)]

    def _detections(self, maps: list[Tensor], boxes: list[Tensor], shapes: Sizes) -> list[dict[str, Tensor]]:
        total = maps[0].new_zeros(())
        for i, head in enumerate(self.box_heads):
            logits, codes = head(self.box_pool(maps, boxes))
            total = total + logits
            if i + 1 < len(self.box_heads):
                boxes = self._refined(i, codes, logits[:, :-1].argmax(1), boxes, shapes)
        scores = (total / len(self.box_heads)).softmax(1)[:, :-1]
        decoded = self.coders[-1].decode_single(codes, torch.cat(boxes)).unflatten(1, (-1, 4))
        counts = [box.shape[0] for box in boxes]
        detections = [
            suppressed(
                clip_boxes_to_image(box, shape), score, self.score_thresh, self.nms_thresh, self.detections_per_img
            )
            for box, score, shape in zip(decoded.split(counts), scores.split(counts), shapes, strict=True)
        ]
        masks = self._masks(maps, detections)
        counts = [image["labels"].shape[0] for image in detections]
        for image, mask in zip(detections, masks.split(counts), strict=True):
            image["masks"] = mask
        return detections

    def _masks(self, maps: list[Tensor], detections: list[dict[str, Tensor]]) -> Tensor:
        """Probabilities (all detections, 28, 28) of the detected classes."""
        regions = self.mask_pool(maps, [image["boxes"] for image in detections])
        labels = torch.cat([image["labels"] for image in detections])
        probabilities = sum(head(regions).sigmoid() for head in self.mask_heads) / len(self.mask_heads)
        return probabilities[torch.arange(labels.shape[0], device=labels.device), labels]


def _l1(codes: Tensor, boxes: Tensor, objects: Tensor, coder: BoxDeltas) -> Tensor:
    return F.l1_loss(codes, coder.encode_single(objects, boxes), reduction="sum")


def _giou(codes: Tensor, boxes: Tensor, objects: Tensor, coder: BoxDeltas) -> Tensor:
    return 10 * generalized_box_iou_loss(coder.decode_single(codes, boxes), objects, reduction="sum")


_BOX_LOSSES = {"l1": _l1, "giou": _giou}
