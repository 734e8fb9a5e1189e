"""Released detectors and segmentors in our key names.

The authors trained with forks of mmdetection 2.11 and mmsegmentation 0.13. Our heads order classes (background last, no
row for it in boxes and masks) and anchors as those libraries do, so only names differ.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from linvit.models.dense.backbone import DenseBackbone
from linvit.models.family import renamed, unwrapped

_UNIT = [(r"\.conv\.(weight|bias)$", r".0.\1"), (r"\.bn\.(\w+)$", r".1.\1")]
_NECK = [
    (r"^neck\.lateral_convs\.(\d+)\.conv\.", r"backbone.neck.inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d+)\.conv\.", r"backbone.neck.layer_blocks.\1.0."),
]
_REGIONS = [
    *_NECK,
    (r"^rpn_head\.rpn_conv\.", "rpn.head.conv.0.0."),
    (r"^rpn_head\.rpn_cls\.", "rpn.head.cls_logits."),
    (r"^rpn_head\.rpn_reg\.", "rpn.head.bbox_pred."),
    (r"^roi_head\.(bbox|mask)_head\.(?!\d)", r"roi_head.\1_head.0."),  # the heads of a cascade are numbered
    (r"^roi_head\.bbox_head\.", "roi_heads.box_heads."),
    (r"^roi_head\.mask_head\.", "roi_heads.mask_heads."),
    (r"\.shared_convs\.(\d+)\.conv\.", r".convs.\1.0."),
    (r"\.shared_convs\.(\d+)\.bn\.", r".convs.\1.1."),
    (r"\.shared_fcs\.", ".linear."),
    (r"\.fc_cls\.", ".classifier."),
    (r"\.fc_reg\.", ".boxes."),
    (r"^(roi_heads\.mask_heads\.\d+\.convs\.\d+)\.conv\.", r"\1."),
    (r"\.conv_logits\.", ".logits."),
]
_RULES = {
    "retinanet": [
        (r"^neck\.fpn_convs\.3\.conv\.", "backbone.neck.extra_blocks.p6."),
        (r"^neck\.fpn_convs\.4\.conv\.", "backbone.neck.extra_blocks.p7."),
        *_NECK,
        (r"^bbox_head\.cls_convs\.(\d+)\.conv\.", r"head.classification_head.conv.\1.0."),
        (r"^bbox_head\.reg_convs\.(\d+)\.conv\.", r"head.regression_head.conv.\1.0."),
        (r"^bbox_head\.retina_cls\.", "head.classification_head.cls_logits."),
        (r"^bbox_head\.retina_reg\.", "head.regression_head.bbox_reg."),
    ],
    "mask_rcnn": _REGIONS,
    "cascade_mask_rcnn": _REGIONS,
    "semantic_fpn": [
        (r"^neck\.lateral_convs\.(\d+)\.conv\.", r"neck.inner_blocks.\1.0."),
        (r"^neck\.fpn_convs\.(\d+)\.conv\.", r"neck.layer_blocks.\1.0."),
        (r"^decode_head\.scale_heads\.(\d)\.0\.", r"head.levels.\1.0."),
        (r"^decode_head\.scale_heads\.(\d)\.2\.", r"head.levels.\1.1."),
        (r"^decode_head\.scale_heads\.(\d)\.4\.", r"head.levels.\1.2."),
        (r"^decode_head\.conv_seg\.", "head.classifier.1."),
        *_UNIT,
    ],
    "upernet": [
        (r"^decode_head\.psp_modules\.(\d)\.1\.", r"head.pooling.pooled.\1."),
        (r"^decode_head\.bottleneck\.", "head.pooling.fuse."),
        (r"^decode_head\.lateral_convs\.", "head.inner."),
        (r"^decode_head\.fpn_convs\.", "head.outer."),
        (r"^decode_head\.fpn_bottleneck\.", "head.fuse."),
        (r"^decode_head\.conv_seg\.", "head.classifier.1."),
        (r"^auxiliary_head\.convs\.0\.", "aux.0."),
        (r"^auxiliary_head\.conv_seg\.", "aux.1.1."),
        *_UNIT,
    ],
}
_HEADS = ("neck.lateral_convs.", "rpn_head.", "roi_head.", "bbox_head.", "decode_head.")


class ReleasedNames:
    """A detector or segmentor that can read the released checkpoints of its framework.

    framework: its name in FRAMEWORKS. backbone_prefix: prefix of the keys of its DenseBackbone.
    """

    framework: str
    backbone_prefix: str

    def native_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """A checkpoint in our key names: a complete one, released or ours, or that of a backbone or classifier.

        From the latter two come only the keys of the backbone, without neck and heads.
        """
        network, weights, prefix = cast(nn.Module, self), unwrapped(state_dict), self.backbone_prefix
        if any(key in weights for key in network.state_dict() if not key.startswith(prefix)):
            return weights
        heads = any(key.startswith(_HEADS) for key in weights)
        inner = {key: value for key, value in weights.items() if key.startswith("backbone.")} if heads else weights
        backbone = cast(DenseBackbone, network.get_submodule(prefix.removesuffix(".")))
        native = {prefix + key: value for key, value in backbone.native_state_dict(inner).items()}
        rules = _RULES[self.framework]
        return native | {renamed(key, rules): value for key, value in weights.items() if key not in inner}
