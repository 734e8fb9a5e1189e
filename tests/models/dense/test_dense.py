"""The dense backbones equal the released ones in float64, and any four-stage model serves."""

import numpy as np
import pytest
import timm
import torch
from golden_networks import golden, probe, released_input, released_state_dict

import linvit
from linvit.models.dense.backbone import DenseBackbone

TOLERANCE = 1e-8
NAMES = {"RAVLT_T": "ravlt_tiny", "MALA_T": "mavit_tiny", "RAVLT_S": "ravlt_small", "MALA_S": "mavit_small"}


@pytest.mark.parametrize(
    ("released", "prefix"),
    [
        ("RAVLT_T", ""),
        ("MALA_T", "backbone."),
        pytest.param("RAVLT_S", "backbone.", marks=pytest.mark.slow),
        pytest.param("MALA_S", "", marks=pytest.mark.slow),
    ],
)
def test_equals_released_backbone(released, prefix):
    record = golden(f"{released}_dense")
    backbone = DenseBackbone(NAMES[released], dtype=torch.float64).eval()
    checkpoint = {prefix + key: value for key, value in released_state_dict(record).items()}
    if prefix:
        checkpoint["neck.lateral_convs.0.conv.weight"] = torch.zeros(1)
    linvit.load_released(backbone, {"state_dict": checkpoint})
    with torch.no_grad():
        maps = backbone(released_input(record))
    assert sum(parameter.numel() for parameter in backbone.parameters()) == record["parameters"]
    for ours, theirs in zip(maps, record["stages"], strict=True):
        assert list(ours.shape) == theirs["shape"]
        error = np.abs(probe(ours) - theirs["value"]).max() / np.abs(theirs["value"]).max()
        assert error < TOLERANCE
        assert abs(ours.mean().item() - theirs["mean"]) < TOLERANCE
        assert abs(ours.std(correction=0).item() - theirs["std"]) < TOLERANCE


def test_a_classifier_initialises_all_but_the_output_norms():
    classifier = timm.create_model("ravlt_nano")
    backbone = DenseBackbone("ravlt_nano", pattern="LLLL")
    linvit.load_released(backbone, classifier.state_dict())
    own = backbone.state_dict()
    shared = [key for key in classifier.state_dict() if key.startswith(("stem.", "stages."))]
    assert len(shared) + 8 == len(own)
    assert all(torch.equal(own[f"body.{key}"], classifier.state_dict()[key]) for key in shared)


def test_a_released_classifier_initialises_the_backbone():
    backbone = DenseBackbone("ravlt_tiny", device="meta")
    keys = released_state_dict(golden("RAVLT_T"))
    assert set(backbone.native_state_dict(keys)) == set(backbone.state_dict())


def test_a_checkpoint_with_a_missing_norm_is_refused():
    backbone = DenseBackbone("ravlt_tiny")
    checkpoint = released_state_dict(golden("RAVLT_T_dense"))
    del checkpoint["extra_norms.2.norm.bias"]
    with pytest.raises(ValueError, match=r"missing norms\.2\.bias"):
        linvit.load_released(backbone, checkpoint)


@pytest.mark.parametrize("pattern", ["LLSS", "LLLL"])
@pytest.mark.parametrize("name", ["ravlt_nano", "mavit_nano"])
def test_norms_stand_on_the_outputs_alone(name, pattern):
    torch.manual_seed(0)
    backbone = DenseBackbone(name, pattern=pattern).eval()
    images = torch.randn(2, 3, 65, 98)
    with torch.no_grad():
        before = backbone(images)
        backbone.norms[0].weight.fill_(2.0)
        after = backbone(images)
    assert [tuple(tensor.shape[-2:]) for tensor in before] == [(17, 25), (9, 13), (5, 7), (3, 4)]
    torch.testing.assert_close(after[0], 2 * before[0])
    assert all(torch.equal(*pair) for pair in zip(before[1:], after[1:], strict=True))


def test_recomputing_is_that_of_the_body():
    backbone = DenseBackbone("mavit_nano", device="meta")
    for enable, recomputed in ((True, "blocks"), (False, "nothing")):
        backbone.set_grad_checkpointing(enable)
        assert {stage.recomputed for stage in backbone.body.stages} == {recomputed}


@pytest.mark.parametrize(
    ("name", "channels", "kwargs"),
    [
        ("care_nano", (32, 48, 64, 384), {}),
        ("resnet10t", (64, 128, 256, 512), {}),
        ("swin_tiny_patch4_window7_224", (96, 192, 384, 768), {"img_size": 64, "depths": (1, 1, 1, 1)}),
    ],
)
def test_other_models_serve(name, channels, kwargs):
    backbone = DenseBackbone(name, **kwargs).eval()
    with torch.no_grad():
        maps = backbone(torch.randn(1, 3, 64, 64))
    assert backbone.channels == channels
    assert [tuple(tensor.shape) for tensor in maps] == [
        (1, width, side, side) for width, side in zip(channels, (16, 8, 4, 2), strict=True)
    ]


def test_a_model_of_one_stride_is_refused():
    with pytest.raises(ValueError, match=r"strides .* expected"):
        DenseBackbone("vit_tiny_patch16_224")
