"""All five frameworks learn from tiny images and answer in the agreed form."""

import pytest
import torch
from tiers import quick, slow

from linvit.models.dense.frameworks import DETECTORS, FRAMEWORKS, SEGMENTORS, build_dense

CLASSES = 3
FEW_DETECTORS = quick(DETECTORS, ("retinanet", "mask_rcnn"))  # the cascade has the heads of Mask R-CNN, three times
SHAPES = [(70, 90), (96, 64)]


def detector(framework: str, backbone: str = "ravlt_nano"):
    """A detector that samples few regions, so that a step takes a second."""
    torch.manual_seed(0)
    network = build_dense(framework, backbone, CLASSES)
    if framework != "retinanet":
        network.roi_heads.sampler.batch_size_per_image = 12
        network.roi_heads.detections_per_img = 5
        network.rpn._post_nms_top_n = {"training": 20, "testing": 20}
    return network


def objects(count: int, height: int, width: int) -> dict:
    torch.manual_seed(count)
    corner = torch.rand(count, 2) * 20
    boxes = torch.cat((corner, corner + 15 + torch.rand(count, 2) * 20), dim=1)
    masks = torch.zeros(count, height, width, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    return {
        "boxes": boxes,
        "labels": torch.arange(count) % CLASSES,
        "masks": masks,
        "image_id": count,
        "iscrowd": torch.zeros(count, dtype=torch.int64),
        "area": masks.sum((1, 2)).float(),
    }


def batch(*counts: int):
    pairs = list(zip(counts, SHAPES, strict=False))
    return [torch.rand(3, *shape) for _, shape in pairs], [objects(count, *shape) for count, shape in pairs]


def check_gradients(network):
    without = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("counts", [(3, 0), (0,)])
@pytest.mark.parametrize("framework", FEW_DETECTORS)
def test_every_parameter_of_a_detector_learns(framework, counts):
    network = detector(framework)
    losses = network(*batch(*counts))
    assert all(torch.isfinite(loss) and loss >= 0 for loss in losses.values())
    sum(losses.values()).backward()
    check_gradients(network)
    if sum(counts):
        assert all(loss > 0 for loss in losses.values())


@pytest.mark.parametrize("framework", FEW_DETECTORS)
def test_detections_are_well_formed(framework):
    network = detector(framework).eval()
    parts = network if framework == "retinanet" else network.roi_heads
    parts.score_thresh = 0.0
    parts.detections_per_img = 5
    images, _ = batch(0, 0)
    with torch.no_grad():
        found = network(images)
    for one, (height, width) in zip(found, SHAPES, strict=True):
        assert len(one["boxes"]) == len(one["labels"]) == len(one["scores"]) == 5
        assert one["labels"].dtype == torch.int64
        assert ((one["labels"] >= 0) & (one["labels"] < CLASSES)).all()
        assert (one["boxes"] >= 0).all()
        assert (one["boxes"][:, 2] <= width).all()
        assert (one["boxes"][:, 3] <= height).all()
        assert (one["scores"].diff() <= 0).all()
        if framework != "retinanet":
            assert one["masks"].shape == (5, height, width)
            assert one["masks"].dtype == torch.bool


@pytest.mark.parametrize("framework", FEW_DETECTORS)
def test_no_detection_is_an_empty_answer(framework):
    network = detector(framework).eval()
    (network if framework == "retinanet" else network.roi_heads).score_thresh = 1.0
    with torch.no_grad():
        found = network([torch.rand(3, 64, 64)])[0]
    assert found["boxes"].shape == (0, 4)
    if framework != "retinanet":
        assert found["masks"].shape == (0, 64, 64)


@pytest.mark.parametrize("framework", FEW_DETECTORS)
def test_crowds_teach_nothing(framework):
    images, targets = batch(3)
    crowd = {key: value.clone() if torch.is_tensor(value) else value for key, value in targets[0].items()}
    crowd["iscrowd"][:] = 1
    losses = []
    for target in (crowd, objects(0, *SHAPES[0])):
        network = detector(framework)
        torch.manual_seed(1)
        losses.append(network(images, [target]))
    assert losses[0].keys() == losses[1].keys()
    for key, loss in losses[0].items():
        torch.testing.assert_close(loss, losses[1][key])


@pytest.mark.parametrize("size", [(70, 91), *slow((64, 64), (33, 130))])
@pytest.mark.parametrize("framework", SEGMENTORS)
def test_a_segmentor_answers_at_the_images_size(framework, size):
    torch.manual_seed(0)
    network = build_dense(framework, "mavit_nano", CLASSES)
    out = network(torch.rand(2, 3, *size))
    maps = out if framework == "upernet" else {"out": out}
    assert list(maps) == (["out", "aux"] if framework == "upernet" else ["out"])
    assert all(logits.shape == (2, CLASSES, *size) for logits in maps.values())
    sum(logits.square().mean() for logits in maps.values()).backward()
    check_gradients(network)
    with torch.no_grad():
        assert network.eval()(torch.rand(1, 3, *size)).shape == (1, CLASSES, *size)


def test_upernet_says_that_one_image_is_too_few_to_train_on():
    network = build_dense("upernet", "mavit_nano", CLASSES)
    with pytest.raises(ValueError, match="set `batch_size` higher"):
        network(torch.rand(1, 3, 64, 64))


@pytest.mark.parametrize("framework", quick(FRAMEWORKS, ("mask_rcnn", "semantic_fpn")))  # 512 channels in bfloat16
def test_bfloat16_autocast(framework):
    if framework in DETECTORS:
        network = detector(framework)
        with torch.autocast("cpu", torch.bfloat16):
            losses = network(*batch(3))
        assert all(torch.isfinite(loss) and loss.dtype == torch.float32 for loss in losses.values())
        sum(losses.values()).backward()
        check_gradients(network)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = network.eval()([torch.rand(3, 64, 64)])[0]
        assert found["boxes"].dtype == torch.float32
    else:
        network = build_dense(framework, "ravlt_nano", CLASSES)
        with torch.autocast("cpu", torch.bfloat16):
            out = network(torch.rand(2, 3, 32, 32))
        out = out["out"] if framework == "upernet" else out
        assert torch.isfinite(out).all()
        out.float().mean().backward()


def test_an_unknown_framework_lists_the_known_ones():
    with pytest.raises(ValueError, match="retinanet, mask_rcnn, cascade_mask_rcnn, semantic_fpn, upernet"):
        build_dense("faster_rcnn", "ravlt_nano", 3)


def test_anchors_can_be_smaller_than_the_papers():
    maps = [torch.zeros(1, 1, 64 // 2**level, 64 // 2**level) for level in range(5)]
    usual, small = (
        build_dense("retinanet", "ravlt_nano", CLASSES, heads).anchor_generator.per_level(maps)
        for heads in (None, {"anchor_scale": 2})
    )
    for one, other in zip(usual, small, strict=True):
        sides, halved = one[:, 2:] - one[:, :2], other[:, 2:] - other[:, :2]
        torch.testing.assert_close(halved, sides / 2)
    assert (usual[0][3, 2:] - usual[0][3, :2]).tolist() == [32, 32]


def test_the_signal_does_not_fade_in_a_narrow_head_of_retinanet():
    torch.manual_seed(0)
    spread = {}
    for width in (64, 256):
        head = build_dense("retinanet", "ravlt_nano", CLASSES, {"width": width}).head
        maps = torch.randn(2, width, 16, 16)
        spread[width] = [branch.conv(maps).std().item() for branch in (head.classification_head, head.regression_head)]
        first = head.classification_head.conv[0][0].weight.std().item()
        assert first == pytest.approx(0.01 * (256 / width) ** 0.5, rel=0.02)
    assert spread[64] == pytest.approx(spread[256], rel=0.5)
