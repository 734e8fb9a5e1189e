"""Inputs that a network cannot read end in a TypeError or ValueError of one sentence; NaN passes through."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

from linvit.models.by_name import create
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.frameworks import FRAMEWORKS
from linvit.models.sequence import DecoderCache, generate

NETWORKS = ("ravlt_nano", "mavit_nano", "care_nano")
IMAGES = torch.zeros(1, 3, 32, 32)
NO_IMAGES = [
    None,
    "image",
    [[0.0]],
    np.zeros((1, 3, 32, 32), dtype=np.float32),
    torch.zeros(3, 32, 32),
    torch.zeros(1, 1, 32, 32),
    torch.zeros(1, 32, 32, 3),
    torch.zeros(1, 3, 31, 32),
    torch.zeros(1, 3, 0, 32),
    torch.zeros(()),
    IMAGES.long(),
    IMAGES.to(torch.uint8),
    IMAGES.bool(),
    IMAGES.to(torch.complex64),
    IMAGES.to("meta"),
    IMAGES[:0],
]


@pytest.fixture(scope="module", params=NETWORKS)
def network(request):
    return timm.create_model(request.param, num_classes=3).eval()


@pytest.fixture(scope="module")
def networks():
    return {
        "decoder": create("sequence_nano", 7).eval(),
        "conformer": create("conformer_nano", 7).eval(),
        "transducer": create("conformer_nano", 7, head="transducer", predictor_width=8).eval(),
        "dit": create("dit_nano_patch2", 3).eval(),
    }


@pytest.mark.parametrize("images", NO_IMAGES, ids=range(len(NO_IMAGES)))
def test_no_images(network, images):
    with pytest.raises((TypeError, ValueError), match=r"`input` .*(expected|but the network)"):
        network(images)


def test_nan_passes_through(network):
    assert network(torch.full_like(IMAGES, torch.nan)).isnan().all()


FEATURES, LENGTHS = torch.zeros(2, 9, 40), torch.tensor([9, 5])
LATENTS, TIMES, LABELS = torch.zeros(2, 1, 8, 8), torch.tensor([0, 999]), torch.tensor([0, 3])
WRONG = {
    ("decoder", "tokens"): [
        (tokens,)
        for tokens in (
            None,
            [[1]],
            torch.tensor([1]),
            torch.tensor([[1.0]]),
            torch.tensor([[7]]),
            torch.tensor([[-1]]),
            torch.tensor([[True]]),
            torch.zeros(0, 4).long(),
            np.ones((1, 1), dtype=np.int64),
        )
    ],
    ("decoder", "documents"): [
        (torch.tensor([[1, 2]]), documents) for documents in (torch.zeros(1, 3).long(), torch.zeros(1, 2), [[0, 0]])
    ],
    ("conformer", "features"): [
        (features, LENGTHS) for features in (None, FEATURES[0], FEATURES[..., :3], FEATURES.long(), [1])
    ],
    ("conformer", "lengths"): [
        (FEATURES, lengths)
        for lengths in ([9, 5], LENGTHS[:1], LENGTHS.float(), torch.tensor([0, 9]), torch.tensor([10, 9]), 9)
    ],
    ("transducer", "tokens"): [
        (FEATURES, LENGTHS, pieces)
        for pieces in (torch.tensor([[1]]), torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [7]]), [[1], [1]])
    ],
    ("dit", "images"): [
        (images, TIMES, LABELS)
        for images in (None, LATENTS[0], LATENTS[..., :4], LATENTS.long(), torch.zeros(0, 1, 8, 8))
    ],
    ("dit", "times"): [
        (LATENTS, times, LABELS)
        for times in (None, 3, TIMES[:1], TIMES.float(), torch.tensor([-1, 0]), torch.tensor([0, 1000]), [0, 1])
    ],
    ("dit", "labels"): [
        (LATENTS, TIMES, labels)
        for labels in (None, 3, LABELS[:1], LABELS.float(), torch.tensor([4, 0]), torch.tensor([0, -1]))
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "inputs"),
    [(kind, name, inputs) for (kind, name), cases in WRONG.items() for inputs in cases],
    ids=[f"{kind}-{name}-{i}" for (kind, name), cases in WRONG.items() for i in range(len(cases))],
)
def test_wrong_inputs_are_named(networks, kind, name, inputs):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` .*expected"):
        networks[kind](*inputs)


def test_right_inputs_are_read(networks):
    assert networks["decoder"](torch.zeros(2, 4).int()).shape == (2, 4, 7)
    assert networks["transducer"](FEATURES, LENGTHS, torch.zeros(2, 0).long())[0].shape == (2, 3, 1, 7)
    assert networks["conformer"](FEATURES, LENGTHS)[1].tolist() == [3, 2]
    assert networks["dit"](LATENTS, TIMES, LABELS).shape == LATENTS.shape


def test_a_decoder_that_reads_piece_by_piece_checks_too(networks):
    with pytest.raises(ValueError, match="`tokens` contains 9, expected whole numbers from 0 to 6"):
        networks["decoder"].read(torch.tensor([[9]]), DecoderCache())
    with pytest.raises(ValueError, match="`prompt` contains -2"):
        generate(networks["decoder"], torch.tensor([-2]), 3)
    with pytest.raises(ValueError, match="`tokens` is -3"):
        generate(networks["decoder"], torch.tensor([2]), -3)


@pytest.mark.slow
def test_decoders_can_be_exported(networks):
    batch = torch.export.Dim("batch")
    program = torch.export.export(networks["decoder"], (torch.zeros(2, 4).long(),), dynamic_shapes=({0: batch},))
    assert program.module()(torch.ones(3, 4).long()).shape == (3, 4, 7)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_values_inside_vmap_are_not_read(networks):
    per_sample = torch.func.vmap(lambda *inputs: networks["dit"](*(x[None] for x in inputs))[0])(LATENTS, TIMES, LABELS)
    assert torch.allclose(per_sample, networks["dit"](LATENTS, TIMES, LABELS), atol=1e-5)


BOXES = torch.tensor([[1.0, 1.0, 20.0, 20.0]])
TARGET = {"boxes": BOXES, "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64, dtype=torch.bool)}
WRONG_TARGETS = [
    (None, "`targets` is null, expected a dict for each of 1 images"),
    ([], "expected a dict for each of 1 images"),
    ([{"boxes": BOXES}], "has no labels"),
    *(
        ([{**TARGET, "boxes": boxes}], "boxes")
        for boxes in (BOXES[:, :3], BOXES[0], BOXES.long(), [[1, 1, 2, 2]], None)
    ),
    ([{**TARGET, "boxes": BOXES.flip(1)}], "boxes should have positive height and width"),
    *(([{**TARGET, "labels": torch.tensor(labels)}], "labels") for labels in ([2], [-1], [1, 1], 1, [1.0], [True])),
    ([{**TARGET, "masks": TARGET["masks"][..., :63]}], r"masks.* has shape \(1, 64, 63\), expected .*\(1, 64, 64\)"),
]


@pytest.fixture(scope="module")
def detectors():
    torch.manual_seed(0)
    frameworks = ("retinanet", "mask_rcnn")
    return {name: FRAMEWORKS[name](DenseBackbone("ravlt_nano"), 2, width=8).train() for name in frameworks}


@pytest.mark.parametrize("framework", ["retinanet", "mask_rcnn"])
@pytest.mark.parametrize(("targets", "message"), WRONG_TARGETS, ids=range(len(WRONG_TARGETS)))
def test_wrong_targets(detectors, framework, targets, message):
    with pytest.raises((TypeError, ValueError, AssertionError), match=message):
        detectors[framework].train()([torch.zeros(3, 64, 64)], targets)


@pytest.mark.parametrize("framework", ["retinanet", "mask_rcnn"])
def test_right_targets_and_wrong_images(detectors, framework):
    detector, two = detectors[framework].train(), [torch.zeros(3, 64, 64)] * 2
    assert all(loss.isfinite() for loss in detector(two, [TARGET] * 2).values())
    none = {"boxes": BOXES[:0], "labels": TARGET["labels"][:0], "masks": TARGET["masks"][:0]}
    assert all(loss.isfinite() for loss in detector(two, [none, TARGET]).values())
    for images in (None, [], [IMAGES], [IMAGES[0].long()], [np.zeros((3, 32, 32))], [torch.zeros(1, 32, 32)]):
        with pytest.raises((TypeError, ValueError), match="`images"):
            detector.eval()(images)
    assert len(detector.eval()(IMAGES)) == 1


def test_mask_detectors_need_masks(detectors):
    with pytest.raises(ValueError, match="has no masks"):
        detectors["mask_rcnn"].train()([IMAGES[0]], [{"boxes": BOXES, "labels": TARGET["labels"]}])


@pytest.mark.parametrize("framework", ["semantic_fpn", "upernet"])
def test_segmentors(framework):
    network: nn.Module = FRAMEWORKS[framework](DenseBackbone("ravlt_nano"), 2, width=8).eval()
    for images in (None, [IMAGES[0]], IMAGES[0], IMAGES.long(), torch.zeros(2, 3, 16, 16)):
        with pytest.raises((TypeError, ValueError), match=r"`(images|input)` "):
            network(images)
