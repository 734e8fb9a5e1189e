"""Mask R-CNN (https://arxiv.org/abs/1703.06870) and Cascade Mask R-CNN (https://arxiv.org/abs/1906.09756)."""

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import clip_boxes_to_image, nms

from linvit.models.dense.anchors import Anchors, BoxDeltas, QualityMatcher
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.inputs import CheckedInputs, ImageBatch, padded
from linvit.models.dense.released_names import ReleasedNames
from linvit.models.dense.retinanet import PyramidBackbone
from linvit.models.dense.roi_heads import RegionHeads, Sizes, Step
from linvit.ranges import Checked, Count, IsA

Targets = list[dict[str, Tensor]]


class WideRPNHead(RPNHead):
    """torchvision's head with outputs in float32 or wider, because boxes are decoded from them."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, codes = super().forward(x)
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        return [level.to(wide) for level in logits], [level.to(wide) for level in codes]


class Proposals(RegionProposalNetwork):
    """Region proposals from 3 anchors per position on strides 4 to 64.

    Args:
        width: channels of the levels.
        num_training: proposals per image in training (1000 in evaluation).
        beta: where the smooth L1 loss changes from quadratic to linear; 0 for L1.
        inside: leave anchors that cross the border of the image out of the losses.
    """

    def __init__(self, width: int, num_training: int, beta: float, inside: bool) -> None:
        super().__init__(
            Anchors((4, 8, 16, 32, 64), (8,)),
            WideRPNHead(width, 3),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2000, "testing": 1000},
            post_nms_top_n={"training": num_training, "testing": 1000},
            nms_thresh=0.7,
        )
        self.proposal_matcher = QualityMatcher(0.7, 0.3, 0.3)
        self.box_coder = BoxDeltas()
        self.min_size = 0.0
        self.beta, self.inside = beta, inside

    def forward(self, images: ImageList, features: dict[str, Tensor], targets: Targets | None = None) -> Any:
        self._sizes = images.image_sizes
        return super().forward(images, features, targets)

    def filter_proposals(
        self, proposals: Tensor, objectness: Tensor, image_shapes: Sizes, num_anchors_per_level: list[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The regions (n, 4) of each image and their scores (n,), best first; to be exported, of one image only."""
        if not torch.compiler.is_exporting():
            return super().filter_proposals(proposals, objectness, image_shapes, num_anchors_per_level)
        # torchvision branches on the number of boxes, which has no graph. Logits instead of scores, because ONNX
        # Runtime computes a sigmoid to 1e-7 only.
        boxes, scores = [], []
        clipped = clip_boxes_to_image(proposals[0], image_shapes[0]).split(num_anchors_per_level)
        for level, logits in zip(clipped, objectness.flatten().split(num_anchors_per_level), strict=True):
            score, best = logits.topk(min(self.pre_nms_top_n(), logits.shape[0]))
            kept = nms(level[best], score, self.nms_thresh)
            boxes.append(level[best][kept])
            scores.append(score[kept])
        score, best = torch.cat(scores).sort(descending=True)
        most = self.post_nms_top_n()
        return [torch.cat(boxes)[best[:most]]], [score[:most].sigmoid()]

    def assign_targets_to_anchors(self, anchors: list[Tensor], targets: Targets) -> tuple[list[Tensor], list[Tensor]]:
        """Labels (1 object, 0 background, -1 neither) and boxes of the objects for the anchors of each image."""
        if not self.inside:
            return super().assign_targets_to_anchors(anchors, targets)
        labels, objects = [], []
        for boxes, target, (height, width) in zip(anchors, targets, self._sizes, strict=True):
            within = (boxes[:, :2] >= 0).all(1) & (boxes[:, 2] < width) & (boxes[:, 3] < height)
            labelled, matched = super().assign_targets_to_anchors([boxes[within]], [target])
            label, box = boxes.new_full((len(boxes),), -1.0), boxes.clone()
            label[within], box[within] = labelled[0], matched[0].to(boxes.dtype)
            labels.append(label)
            objects.append(box)
        return labels, objects

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Binary cross entropy and smooth L1 over the sampled anchors of the batch."""
        positive, negative = (torch.cat(masks).bool() for masks in self.fg_bg_sampler(labels))
        sampled = positive | negative
        wanted = torch.cat(regression_targets)[positive]
        total = F.smooth_l1_loss(pred_bbox_deltas[positive], wanted, beta=self.beta, reduction="sum")
        logits = objectness.flatten()[sampled]
        score = F.binary_cross_entropy_with_logits(logits, torch.cat(labels)[sampled], reduction="sum")
        count = max(int(sampled.sum()), 1)
        return score / count, total / count


_DEVIATIONS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))


class RegionDetector(Checked, CheckedInputs, ReleasedNames, GeneralizedRCNN):
    """A detector of two or more stages; inputs and detections as in RetinaNet, and bool masks (n, height, width).

    Args:
        backbone: returns four maps.
        num_classes: number of classes without a background.
        width: channels of neck and heads.
        hidden: channels of the linear layers in the box heads.
        num_regions: regions per image on which the heads are trained.
    """

    proposals: tuple[int, float, bool]  # num_training, beta and inside of Proposals
    steps: tuple[Step, ...]
    box_head: tuple[int, int, str]  # num_convs, num_linear and box_loss of RegionHeads
    backbone_prefix = "backbone.body."
    has_masks = True

    def __init__(
        self,
        backbone: Annotated[DenseBackbone, IsA(DenseBackbone)],
        num_classes: Count,
        width: Count = 256,
        hidden: Count = 1024,
        num_regions: Count = 512,
    ) -> None:
        proposals = Proposals(width, *self.proposals)
        heads = RegionHeads(num_classes, self.steps, *self.box_head, width, hidden, num_regions)
        super().__init__(PyramidBackbone(backbone, 0, "pool", width), proposals, heads, ImageBatch())
        self.num_classes = num_classes

    def detections(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What exported files return, which have no masks of the image's size.

        A normalized image (1, 3, height, width) to boxes (n, 4) in pixels, scores (n,), labels (n,) and mask
        probabilities (n, 28, 28) within the boxes, best score first.
        """
        images, sizes = padded(image), [(image.shape[-2], image.shape[-1])]
        maps = self.backbone(images)
        proposals, _ = self.rpn(ImageList(images, sizes), maps)
        (detected,), _ = self.roi_heads(maps, proposals, sizes)
        return detected["boxes"], detected["scores"], detected["labels"], detected["masks"]


class MaskRCNN(RegionDetector):
    """Mask R-CNN in the released configuration: a box head of two linear layers, L1 losses."""

    framework = "mask_rcnn"
    proposals = (1000, 0.0, False)
    steps = (Step(0.5, 1.0, _DEVIATIONS[0], low_quality=True),)
    box_head = (0, 2, "l1")


class CascadeMaskRCNN(RegionDetector):
    """Cascade Mask R-CNN in the released configuration.

    Three steps; box heads of four convolutions and one linear layer; GIoU loss on decoded boxes.
    """

    framework = "cascade_mask_rcnn"
    proposals = (2000, 1 / 9, True)
    steps = tuple(
        Step(*triple, low_quality=False) for triple in zip((0.5, 0.6, 0.7), (1.0, 0.5, 0.25), _DEVIATIONS, strict=True)
    )
    box_head = (4, 1, "giou")
