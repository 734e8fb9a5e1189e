"""Transfer by hand: the features, their errors, and what is trained."""

import pytest
import torch
from linearize_teachers import SMALL, body, image
from torch.testing import assert_close

import linvit
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
