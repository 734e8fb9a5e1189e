"""What each attention of a student has to learn, for every class of networks that can be linearized."""

import copy

import pytest
import torch
from linearize_teachers import SMALL, body, image
from test_linearize import TEACHERS, teacher
from torch.testing import assert_close

import linvit
from linvit.models.linearizing import lessons, share
from linvit.models.slots import slots_of

PLAIN = {key: SMALL[key] for key in ("embed_dim", "depth", "num_heads", "num_classes", "patch_size")}
EVERY = {
    **TEACHERS,
    "NaFlex": ("naflexvit_base_patch16_gap", PLAIN),
    "Hiera": (
        "hiera_tiny_224",
        {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": (1, 2, 2, 1), "num_classes": 5},
    ),
}


def network(name):
    model, kwargs = EVERY[name]
    return body(model, **kwargs)


def answered(student, given, x):
    """What the student computes if each new attention hands on what the present one computes."""
    for lesson in given:
        vars(student.get_submodule(lesson.layer))["forward"] = lesson.present
    with torch.no_grad():
        return student(x)


@pytest.mark.parametrize("name", EVERY)
def test_the_path_through_the_present_attention_is_the_teacher(name):
    original, x = network(name), image(64, 64) if name == "Hiera" else image()
    student = linvit.linearize(original, "mala")
    given = lessons(student, original)
    assert len(given) == len({lesson.layer for lesson in given}) > 0
    share(student, original, given)
    with torch.no_grad():
        expected = original(x)
        assert not torch.allclose(student(x), expected)
    assert torch.equal(answered(student, given, x), expected)


def test_only_the_new_attention_can_be_trained_and_nothing_else_is_copied():
    original = network("Eva")
    before = copy.deepcopy(original.state_dict())
    student = linvit.linearize(original, "mala", "LS")
    given = lessons(student, original)
    assert [lesson.layer for lesson in given] == ["blocks.0.attn"]
    share(student, original, given)
    theirs = {id(parameter) for parameter in original.parameters()}
    for name, parameter in student.named_parameters():
        new = name.startswith("blocks.0.attn.")
        assert parameter.requires_grad == new
        assert (id(parameter) in theirs) != new, name
    assert not any(parameter.requires_grad for parameter in original.parameters())
    with torch.no_grad():
        for parameter in student.blocks[0].attn.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())


@pytest.mark.parametrize("name", ["ViT", "Eva", "NaFlex"])
def test_the_attention_for_scores_computes_what_the_present_attention_computes(name):
    original = network(name)
    student = linvit.linearize(original, "rala")
    for slot, lesson in zip(slots_of(original).slots, lessons(student, original, scores=True), strict=True):
        tokens = torch.randn(2, slot.num_prefix + slot.grid[0] * slot.grid[1], 32)
        assert_close(lesson.scoring(tokens), slot.block.attn(tokens))


def test_scores_that_cannot_be_matched_are_one_sentence():
    with pytest.raises(ValueError, match=r"layers\.0\.blocks\.0\.attn of the teacher does not see all tokens, or"):
        lessons(linvit.linearize(teacher("Swin"), "mala"), teacher("Swin"), scores=True)
    with pytest.raises(ValueError, match="has another number of heads, so its scores"):
        lessons(linvit.linearize(teacher("ViT"), "hydra"), teacher("ViT"), scores=True)


def test_a_student_that_kept_everything_has_nothing_to_learn():
    with pytest.raises(ValueError, match="kept softmax attention in all blocks: set an L in its `pattern`"):
        lessons(linvit.linearize(teacher("ViT"), "mala", "S"), teacher("ViT"))
    with pytest.raises(ValueError, match="kept softmax attention in all blocks"):
        lessons(linvit.linearize(teacher("RAVLT"), "mala", "SSSS"), teacher("RAVLT"))


def test_an_origin_makes_the_teacher_and_another_student():
    student = linvit.linearize(teacher("Swin"), "rala", "LS")
    again = student.origin.student(student.origin.teacher())
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in student.state_dict().items()
    }
    assert again.pattern == "LS"
