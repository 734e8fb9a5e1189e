"""Whole checkpoints under the released libraries' names load, tensor by tensor, into the right place."""

import pytest
import torch
from torch import nn

import linvit
from linvit.models.dense.frameworks import FRAMEWORKS, build_dense

WIDTHS = (32, 48, 64, 96)
CLASSES = 4


def unit(name: str, out: int, width: int, side: int) -> dict:
    """A convolution with batch norm."""
    norm = {f"{name}.bn.{key}": (out,) for key in ("weight", "bias", "running_mean", "running_var")}
    return {f"{name}.conv.weight": (out, width, side, side)} | norm | {f"{name}.bn.num_batches_tracked": ()}


def layer(name: str, *shape: int) -> dict:
    """A layer with a bias over its first side."""
    return {f"{name}.weight": shape, f"{name}.bias": (shape[0],)}


def neck(widths: tuple[int, ...]) -> dict:
    shapes = {}
    for i, width in enumerate(widths):
        shapes |= layer(f"neck.lateral_convs.{i}.conv", 256, width, 1, 1)
        shapes |= layer(f"neck.fpn_convs.{i}.conv", 256, 256, 3, 3)
    return shapes


def rpn() -> dict:
    return (
        layer("rpn_head.rpn_conv", 256, 256, 3, 3)
        | layer("rpn_head.rpn_cls", 3, 256, 1, 1)
        | layer("rpn_head.rpn_reg", 12, 256, 1, 1)
    )


def mask_head(name: str) -> dict:
    shapes = layer(f"{name}.upsample", 256, 256, 2, 2) | layer(f"{name}.conv_logits", CLASSES, 256, 1, 1)
    for i in range(4):
        shapes |= layer(f"{name}.convs.{i}.conv", 256, 256, 3, 3)
    return shapes


def box_outputs(name: str) -> dict:
    return layer(f"{name}.fc_cls", CLASSES + 1, 1024) | layer(f"{name}.fc_reg", 4 * CLASSES, 1024)


def retinanet() -> dict:
    shapes = neck(WIDTHS[1:])
    shapes |= layer("neck.fpn_convs.3.conv", 256, 96, 3, 3) | layer("neck.fpn_convs.4.conv", 256, 256, 3, 3)
    for i in range(4):
        shapes |= layer(f"bbox_head.cls_convs.{i}.conv", 256, 256, 3, 3)
        shapes |= layer(f"bbox_head.reg_convs.{i}.conv", 256, 256, 3, 3)
    outputs = layer("bbox_head.retina_cls", 9 * CLASSES, 256, 3, 3) | layer("bbox_head.retina_reg", 36, 256, 3, 3)
    return shapes | outputs


def mask_rcnn() -> dict:
    head = "roi_head.bbox_head"
    linear = layer(f"{head}.shared_fcs.0", 1024, 12544) | layer(f"{head}.shared_fcs.1", 1024, 1024)
    return neck(WIDTHS) | rpn() | linear | box_outputs(head) | mask_head("roi_head.mask_head")


def cascade_mask_rcnn() -> dict:
    shapes = neck(WIDTHS) | rpn()
    for step in range(3):
        head = f"roi_head.bbox_head.{step}"
        for i in range(4):
            shapes |= unit(f"{head}.shared_convs.{i}", 256, 256, 3)
        shapes |= layer(f"{head}.shared_fcs.0", 1024, 12544) | box_outputs(head)
        shapes |= mask_head(f"roi_head.mask_head.{step}")
    return shapes


def semantic_fpn() -> dict:
    shapes = neck(WIDTHS) | layer("decode_head.conv_seg", CLASSES, 128, 1, 1)
    for level, places in enumerate(((0,), (0,), (0, 2), (0, 2, 4))):
        for place in places:
            shapes |= unit(f"decode_head.scale_heads.{level}.{place}", 128, 128 if place else 256, 3)
    return shapes


def upernet() -> dict:
    head = "decode_head"
    shapes = layer(f"{head}.conv_seg", CLASSES, 512, 1, 1) | layer("auxiliary_head.conv_seg", CLASSES, 256, 1, 1)
    for i in range(4):
        shapes |= unit(f"{head}.psp_modules.{i}.1", 512, 96, 1)
    for i in range(3):
        shapes |= unit(f"{head}.lateral_convs.{i}", 512, WIDTHS[i], 1) | unit(f"{head}.fpn_convs.{i}", 512, 512, 3)
    shapes |= unit(f"{head}.bottleneck", 512, 96 + 2048, 3) | unit(f"{head}.fpn_bottleneck", 512, 2048, 3)
    return shapes | unit("auxiliary_head.convs.0", 256, 64, 3)


SHAPES = {
    "retinanet": retinanet,
    "mask_rcnn": mask_rcnn,
    "cascade_mask_rcnn": cascade_mask_rcnn,
    "semantic_fpn": semantic_fpn,
    "upernet": upernet,
}
PLACES = {
    "retinanet": {
        "neck.fpn_convs.4.conv.weight": "backbone.neck.extra_blocks.p7.weight",
        "bbox_head.reg_convs.2.conv.bias": "head.regression_head.conv.2.0.bias",
    },
    "mask_rcnn": {
        "roi_head.mask_head.convs.3.conv.weight": "roi_heads.mask_heads.0.convs.3.weight",
        "roi_head.bbox_head.fc_reg.bias": "roi_heads.box_heads.0.boxes.bias",
    },
    "cascade_mask_rcnn": {
        "roi_head.bbox_head.2.shared_convs.1.bn.running_var": "roi_heads.box_heads.2.convs.1.1.running_var",
        "roi_head.mask_head.1.conv_logits.bias": "roi_heads.mask_heads.1.logits.bias",
    },
    "semantic_fpn": {"decode_head.scale_heads.3.4.bn.weight": "head.levels.3.2.1.weight"},
    "upernet": {
        "decode_head.fpn_convs.0.conv.weight": "head.outer.0.0.weight",
        "decode_head.psp_modules.3.1.conv.weight": "head.pooling.pooled.3.0.weight",
        "auxiliary_head.conv_seg.weight": "aux.1.1.weight",
    },
}


def backbone(network: nn.Module) -> dict:
    """The network's own backbone, behind `backbone.` as in a released file."""
    body = network.backbone.body if hasattr(network, "transform") else network.backbone
    return {f"backbone.{key}": value.clone() for key, value in body.state_dict().items()}


def checkpoint(framework: str, network: nn.Module) -> dict:
    """Seeded values under the released names; the backbone as it is."""
    torch.manual_seed(1)
    heads = {
        key: torch.tensor(3) if key.endswith("tracked") else 0.01 * torch.rand(shape)
        for key, shape in SHAPES[framework]().items()
    }
    return heads | backbone(network)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_whole_checkpoint_loads(framework):
    network = build_dense(framework, "ravlt_nano", CLASSES)
    weights = checkpoint(framework, network)
    linvit.load_released(network, {"state_dict": weights, "meta": {}})
    own = network.state_dict()
    for released, ours in PLACES[framework].items():
        assert torch.equal(own[ours], weights[released]), released
    linvit.load_released(network, network.state_dict())


def test_a_mismatch_is_one_error_that_lists_it():
    network = build_dense("semantic_fpn", "ravlt_nano", CLASSES)
    weights = checkpoint("semantic_fpn", network)
    weights["decode_head.conv_seg.weight"] = torch.zeros(7, 128, 1, 1)
    del weights["neck.fpn_convs.2.conv.bias"]
    before = network.head.classifier[1].weight.clone()
    with pytest.raises(ValueError, match=r"in 2 keys") as caught:
        linvit.load_released(network, weights)
    assert "missing neck.layer_blocks.2.0.bias" in str(caught.value)
    assert "misshapen head.classifier.1.weight: checkpoint (7, 128, 1, 1)" in str(caught.value)
    assert torch.equal(before, network.head.classifier[1].weight)
