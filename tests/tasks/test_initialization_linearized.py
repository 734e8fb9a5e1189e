"""A linearized network starts from its own weights, and from those of the network that it was made from."""

import pytest
import timm
import torch
from linearize_teachers import SMALL, body, image

import linvit
from linvit.tasks.initialization import initialize

DINOV3 = ("vit_small_patch16_dinov3", SMALL)
DINOV2 = ("vit_small_patch14_reg4_dinov2", SMALL)


def network(name, **kwargs):
    """As a recipe builds it, with random weights."""
    torch.manual_seed(1)
    model, base = name
    return timm.create_model("linearized", base={**base, "name": model}, **kwargs).eval()


def saved(model, path):
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("name", [DINOV2, DINOV3], ids=["ViT", "Eva"])
def test_weights_of_the_softmax_network_become_those_of_its_student(name, tmp_path):
    teacher, student = body(name[0], **name[1]), network(name, mechanism="mala")
    line = initialize(student, saved(teacher, tmp_path / "teacher.pth"))
    assert line == f"Starting from {tmp_path / 'teacher.pth'}, classifier included."
    assert torch.equal(student(image()), linvit.linearize(teacher, "mala")(image()))


def test_its_own_weights_are_taken_as_they_are(tmp_path):
    trained, student = network(DINOV2, mechanism="mala"), network(DINOV2, mechanism="mala")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1)
    initialize(student, saved(trained, tmp_path / "student.pth"))
    assert torch.equal(student(image()), trained(image()))


@pytest.mark.parametrize(
    ("copied", "attention", "others"), [("attention", 1, 0), ("feed_forward", 0, 1), ("nothing", 0, 0)]
)
@pytest.mark.parametrize("source", ["teacher", "student"])
def test_only_the_chosen_weights_are_copied(copied, attention, others, source, tmp_path):
    teacher = body(DINOV2[0], **DINOV2[1])
    given = teacher if source == "teacher" else linvit.linearize(teacher, "mala")
    student, fresh = network(DINOV2, mechanism="mala", pattern="LS"), network(DINOV2, mechanism="mala", pattern="LS")
    if source == "student":
        given = linvit.linearize(teacher, "mala", "LS")
    initialize(student, saved(given, tmp_path / "given.pth"), copied=copied)
    expected = linvit.linearize(teacher, "mala", "LS").state_dict()
    for key, value in student.state_dict().items():
        taken = attention if ".attn." in key else others
        assert torch.equal(value, (expected if taken else fresh.state_dict())[key]), key


def test_a_network_that_is_not_linearized_copies_everything_or_refuses(tmp_path):
    teacher = body(DINOV2[0], **DINOV2[1])
    path = saved(teacher, tmp_path / "teacher.pth")
    with pytest.raises(ValueError, match="`copied` is 'attention', but VisionTransformer was not made by linearizing"):
        initialize(body(DINOV2[0], **DINOV2[1]), path, copied="attention")


def test_names_that_fit_both_are_refused_where_the_channels_have_another_order(tmp_path):
    """DINOv3's rotation pairs other channels of a head than ours."""
    student = network(DINOV3, mechanism="linear")
    teacher = body(DINOV3[0], **DINOV3[1])
    path = saved(teacher, tmp_path / "teacher.pth")
    with pytest.raises(ValueError, match=r"fit both the softmax network and the linear one.*give a run"):
        initialize(student, path)
    recorded = {"linvit": {"recipe": {"model": {"name": DINOV3[0]}}}}
    torch.save({**recorded, "state_dict": {f"network.{key}": v for key, v in teacher.state_dict().items()}}, path)
    initialize(student, path)
    assert torch.equal(student(image()), linvit.linearize(teacher, "linear")(image()))


def test_weights_without_a_classifier(tmp_path):
    name, base = DINOV2
    headless = body(name, **{**base, "num_classes": 0})
    student = network((name, {**base, "num_classes": 3}), mechanism="mala")
    before = student.head.weight.clone()
    line = initialize(student, saved(headless, tmp_path / "headless.pth"))
    assert line.endswith("headless.pth: its backbone; the classifier keeps its initial weights.")
    expected = linvit.linearize(headless, "mala")
    assert torch.equal(student.forward_features(image()), expected.forward_features(image()))
    assert student.head.weight.shape == before.shape
    other = network((name, {**base, "num_classes": 0}), mechanism="mala")
    initialize(student, saved(other, tmp_path / "other.pth"))
    assert torch.equal(student.forward_features(image()), other.forward_features(image()))


def test_a_base_keeps_its_own_arguments_under_those_of_the_network():
    model = timm.create_model("linearized", base={"name": "deit_tiny_patch16_224", "img_size": 32, "depth": 1})
    assert model.patch_embed.img_size == (32, 32)
    assert model.origin.teacher().pos_embed.shape == model.pos_embed.shape == (1, 5, 192)
    wider = timm.create_model(
        "linearized", base={"name": "deit_tiny_patch16_224", "img_size": 32, "depth": 1}, img_size=64, num_classes=3
    )
    assert wider.patch_embed.img_size == (64, 64)
    assert wider.head.out_features == 3
