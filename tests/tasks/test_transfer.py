"""Transfer by hand: the features, their errors, and what is trained."""

import pytest
import torch
from linearize_teachers import SMALL, body, image
from torch.testing import assert_close

import linvit
from linvit.errors import SettingError
from linvit.tasks.students import Transfer

TEACHERS = {
    "ViT": ("vit_small_patch14_reg4_dinov2", SMALL),
    "RAVLT": ("ravlt_nano", {"pattern": "SSSS", "num_classes": 5}),
}


def transfer(name="ViT", pattern=None, **options):
    model, kwargs = TEACHERS[name]
    original = body(model, **kwargs)
    return Transfer(linvit.linearize(original, "mala", pattern), original, **options)


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("features", [None, [0], [-1, 0]])
def test_with_softmax_in_all_blocks_the_student_is_the_teacher(name, features):
    task = transfer(name, "S" if name == "ViT" else "SSSS", features=features).eval()
    with torch.no_grad():  # with gradients, other kernels round differently
        assert not task.errors(task.network, image()).any()
        assert torch.equal(task.network(image()), task.original(image()))


def test_errors_by_hand():
    task = transfer(features=[1, 0]).eval()
    theirs, ours = (
        network.forward_intermediates(image(), indices=[0, 1], intermediates_only=True)
        for network in (task.original, task.network)
    )
    expected = [
        (mine - its).square().sum((1, 2, 3)) / its.square().sum((1, 2, 3))
        for mine, its in zip(ours, theirs, strict=True)
    ]
    assert_close(task.errors(task.network, image()), torch.stack(expected[::-1]))
    last = transfer().eval()
    ours, theirs = last.network.forward_features(image()), last.original.forward_features(image())
    error = (ours - theirs).square().sum((1, 2)) / theirs.square().sum((1, 2))
    assert_close(last.errors(last.network, image()), error[None])


def test_only_the_student_learns():
    task = transfer().train()
    assert not task.original.training
    assert task.network.training
    task.errors(task.network, image()).mean().backward()
    assert not any(parameter.requires_grad for parameter in task.original.parameters())
    without = {name for name, parameter in task.network.named_parameters() if parameter.grad is None}
    assert without == {"head.weight", "head.bias"}


STUDENTS = {
    "pyramid": ("mavit_nano", {"num_classes": 0}),
    "CARE": ("care_nano", {"num_classes": 0}),
    "NHWC": (
        "swin_tiny_patch4_window7_224",
        {"img_size": (32, 48), "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1), "num_classes": 0},
    ),
    "tokens": ("vit_small_patch14_reg4_dinov2", {**SMALL, "patch_size": 16, "embed_dim": 24, "num_classes": 0}),
}


def of_another_shape(name):
    """A task whose teacher is a DeiT with 4 × 6 patches and two more tokens."""
    model, kwargs = STUDENTS[name]
    original = body("deit_tiny_distilled_patch16_224", **{**SMALL, "num_classes": 0})
    torch.manual_seed(1)
    return Transfer(body(model, **kwargs), original, teacher_model="deit_tiny_distilled_patch16_224")


def last_map(name, network):
    """The features before pooling, (batch, channels, rows, columns)."""
    features = network.forward_features(image())
    if name == "NHWC":
        return features.permute(0, 3, 1, 2)
    if name == "tokens":  # 2 × 3 patches behind a class token and four registers
        return features[:, 5:].transpose(1, 2).unflatten(2, (2, 3))
    return features


@pytest.mark.parametrize("name", STUDENTS)
def test_errors_of_another_shape_by_hand(name):
    task = of_another_shape(name).eval()
    with torch.no_grad():
        expected = task.original.forward_features(image())[:, 2:]  # normalized, without the class tokens
        given = torch.nn.functional.interpolate(last_map(name, task.network), (4, 6), mode="bilinear")
        given = given.flatten(2).transpose(1, 2) @ task.projection.weight[:, :, 0, 0].T + task.projection.bias
        error = (given - expected).square().sum((1, 2)) / expected.square().sum((1, 2))
        assert_close(task.errors(task.network, image()), error[None])


@pytest.mark.parametrize("name", STUDENTS)
def test_all_of_another_shape_learns_but_what_follows_its_features(name):
    task = of_another_shape(name).train()
    task.errors(task.network, image()).mean().backward()
    assert not any(parameter.requires_grad for parameter in task.original.parameters())
    missing = {key for key, parameter in task.network.named_parameters() if parameter.grad is None}
    assert all("head.norm" in key for key in missing)
    assert bool(missing) == (name == "CARE")
    assert all(parameter.grad.any() for parameter in task.beside())
    reached = [parameter.grad for parameter in task.network.parameters() if parameter.grad is not None]
    assert all(gradient.any() for gradient in reached)
    assert not any("projection" in key for key in task.network.state_dict())


def test_what_has_no_map_or_asks_for_several_is_refused():
    original, student = body("deit_tiny_patch16_224", **SMALL), torch.nn.Flatten()
    with pytest.raises(SettingError, match="timm gives no map of features of Flatten: choose another network"):
        Transfer(student, original, teacher_model="deit_tiny_patch16_224")
    with pytest.raises(SettingError, match="`features` is set, but only maps of a linearized student fit"):
        Transfer(body("mavit_nano"), original, teacher_model="deit_tiny_patch16_224", features=[-1])
