"""RetinaNet (Focal Loss for Dense Object Detection, https://arxiv.org/abs/1708.02002) as the papers train it."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_iou, clip_boxes_to_image, sigmoid_focal_loss

from linvit.models.dense.anchors import Anchors, BoxDeltas, QualityMatcher
from linvit.models.dense.backbone import DenseBackbone, Neck
from linvit.models.dense.inputs import CheckedInputs, ImageBatch, padded, suppressed
from linvit.models.dense.released_names import ReleasedNames
from linvit.ranges import Checked, Count, IsA, Range

CHOICE: dict[str, Any] = {
    "score_thresh": 0.05,
    "nms_thresh": 0.5,
    "detections_per_img": 100,
    "topk_candidates": 1000,
}
"""torchvision's names of the rules by which detections are chosen, as released; candidates are those of one level."""

PUBLISHED_WIDTH = 256  # channels


class PyramidBackbone(nn.Module):
    """A dense backbone whose maps from number `first` on feed a neck, all of whose levels have one width."""

    def __init__(self, body: DenseBackbone, first: int, extra: str, width: int) -> None:
        super().__init__()
        self.body, self.first = body, first
        self.neck = Neck(body.channels[first:], width, extra)
        self.out_channels = width
        # The norms of unused maps get no gradient, and distributed training refuses such parameters.
        for norm in body.norms[:first]:
            norm.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.neck(self.body(x)[self.first :])


def _head(width: int, num_classes: int) -> RetinaNetHead:
    """Torchvision's, with initial weights that keep the size of the signal at any width."""
    head = RetinaNetHead(width, 9, num_classes)
    for name, weight in head.named_parameters():
        if name.endswith("weight"):
            weight.data *= math.sqrt(PUBLISHED_WIDTH / width)
    return head


class RetinaNet(Checked, CheckedInputs, ReleasedNames, TorchvisionRetinaNet):
    """A one-stage detector on strides 8 to 128.

    Follows the released configuration: 9 anchors per position, focal loss (γ 2, α 0.25) and L1 loss, both divided by
    the number of positive anchors of the batch, 1000 candidates per level. The map of stage 1 is unused and its norm
    frozen.

    Args:
        backbone: returns four maps.
        num_classes: number of classes without a background.
        width: channels of neck and heads. The deviation of the heads' initial weights is 0.01 at 256 channels, as
            published, and grows with the root of 256 / width: otherwise the signal fades in a narrow head.
        anchor_scale: side of the smallest anchor of each level over its stride; the papers' 4 fits objects of 32 px and
            more. Each level has anchors of 1, 1.26 and 1.59 times that side.

    In training, images and targets (see CheckedInputs) to a dict of losses; in evaluation, images to a list of
    dicts of boxes (n, 4) in pixels, labels 0 … num_classes - 1 and scores.
    """

    framework = "retinanet"
    backbone_prefix = "backbone.body."
    has_masks = False

    def __init__(
        self,
        backbone: Annotated[DenseBackbone, IsA(DenseBackbone)],
        num_classes: Count,
        width: Count = 256,
        anchor_scale: Annotated[float, Range(0.5, 32)] = 4.0,
    ) -> None:
        anchors = Anchors((8, 16, 32, 64, 128), [anchor_scale * 2 ** (i / 3) for i in range(3)])
        super().__init__(
            PyramidBackbone(backbone, 1, "convolutions", width),
            num_classes,
            anchor_generator=anchors,
            head=_head(width, num_classes),
            proposal_matcher=QualityMatcher(0.5, 0.4, 0.0),
            **CHOICE,
        )
        self.num_classes = num_classes
        self.transform = ImageBatch()
        self.box_coder = BoxDeltas()

    def compute_loss(
        self, targets: list[dict[str, Tensor]], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        """Focal loss of all anchors except those between the thresholds, and L1 loss of the positive ones."""
        logits, codes = head_outputs["cls_logits"].float(), head_outputs["bbox_regression"].float()
        classification, regression, positives = [], [], 0
        for target, scores, deltas, boxes in zip(targets, logits, codes, anchors, strict=True):
            if len(target["boxes"]) == 0:
                index = torch.full((len(boxes),), -1, device=boxes.device)
            else:
                index = self.proposal_matcher(box_iou(target["boxes"], boxes))
            positive = torch.where(index >= 0)[0]
            truth = torch.zeros_like(scores)
            truth[positive, target["labels"][index[positive]]] = 1
            counted = index != self.proposal_matcher.BETWEEN_THRESHOLDS
            classification.append(sigmoid_focal_loss(scores[counted], truth[counted], reduction="sum"))
            wanted = self.box_coder.encode_single(target["boxes"][index[positive]], boxes[positive])
            regression.append(F.l1_loss(deltas[positive], wanted, reduction="sum"))
            positives += max(len(positive), 1)
        return {
            "loss_classifier": torch.stack(classification).sum() / positives,
            "loss_box_reg": torch.stack(regression).sum() / positives,
        }

    def postprocess_detections(
        self, head_outputs: dict[str, Any], anchors: list[list[Tensor]], image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """The 1000 best anchors of each level, then threshold and non-maximum suppression within each class."""
        detections = []
        for i, shape in enumerate(image_shapes):
            boxes, scores = [], []
            levels = zip(head_outputs["cls_logits"], head_outputs["bbox_regression"], anchors[i], strict=True)
            for logits, codes, level in levels:
                probabilities = logits[i].float().sigmoid()
                best = most_likely(probabilities, self.topk_candidates)
                boxes.append(self.box_coder.decode_single(codes[i].float()[best], level[best]))
                scores.append(probabilities[best])
            clipped, limits = clip_boxes_to_image(torch.cat(boxes), shape), (self.score_thresh, self.nms_thresh)
            detections.append(suppressed(clipped, torch.cat(scores), *limits, self.detections_per_img))
        return detections

    def candidates(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What detections are chosen from, for exported files, which leave the choice to their reader.

        Normalized images (batch, 3, height, width) to boxes (batch, anchors, 4) in pixels, not clipped to the image,
        and scores (batch, anchors, num_classes) in 0..1, level after level.
        """
        maps = list(self.backbone(padded(images)).values())
        outputs = self.head(maps)
        codes = outputs["bbox_regression"]
        anchors = torch.cat(self.anchor_generator.per_level(maps)).repeat(images.shape[0], 1)
        boxes = self.box_coder.decode_single(codes.flatten(0, 1), anchors).view_as(codes)
        return boxes, outputs["cls_logits"].sigmoid()


def most_likely(scores: Tensor, most: int) -> Tensor:
    """The places of the rows of scores (n, num_classes) with the highest entries, at most that many."""
    return scores.amax(1).topk(min(most, len(scores))).indices
