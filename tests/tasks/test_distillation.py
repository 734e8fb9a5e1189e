import pytest
import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch.nn.functional import cross_entropy, one_hot

from linvit.tasks import Classification
from linvit.tasks.distillation import Distillation


@pytest.fixture
def teacher(tmp_path):
    network = timm.create_model("ravlt_nano", num_classes=10).eval()
    torch.save({"model": network.state_dict()}, tmp_path / "teacher.pth")
    return network, Distillation("ravlt_nano", str(tmp_path / "teacher.pth"))


def student(classes=10):
    return timm.create_model("care_nano", num_classes=classes)


def test_loss_is_half_mixed_targets_and_half_what_the_teacher_names(teacher):
    network, distillation = teacher
    task = Classification(student(), 10, mixup=0.8, distillation=distillation).train()
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    targets = 0.7 * one_hot(labels, 10) + 0.3 * one_hot(labels.flip(0), 10)
    torch.manual_seed(0)
    loss = task._loss(images, targets)
    torch.manual_seed(0)
    logits, distilled = task.network(images)
    named = network(images).argmax(1)
    expected = 0.5 * SoftTargetCrossEntropy()(logits, targets) + 0.5 * cross_entropy(distilled, named)
    torch.testing.assert_close(loss, expected)


def test_teacher_is_frozen_and_no_part_of_the_student(teacher):
    task = Classification(student(), 10, ema_decay=0.9, distillation=teacher[1]).train()
    assert not task.teacher.network.training
    assert not any(parameter.requires_grad for parameter in task.teacher.network.parameters())
    plain = Classification(student(), 10, ema_decay=0.9)
    assert task.state_dict().keys() == plain.state_dict().keys()
    assert len(list(task.parameters())) == len(list(plain.parameters()))
    task.network.eval()
    assert task(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def refused(distillation, sentence, network=None, classes=10):
    with pytest.raises(ValueError, match=sentence) as caught:
        distillation.build(network or student(classes), classes, 3)
    assert len(str(caught.value).splitlines()) == 1


def test_what_cannot_be_distilled_is_one_sentence(teacher):
    distillation = teacher[1]
    refused(distillation, "RAVLT has one head", timm.create_model("ravlt_nano", num_classes=10))
    refused(distillation, "CARE has one head", timm.create_model("care_nano", num_classes=10, distillation=False))
    refused(Distillation("regnety_161"), "timm does not know the `teacher` 'regnety_161'")
    refused(Distillation("care_nano"), "no pretrained weights for the teacher care_nano: set `checkpoint`")
    refused(Distillation("resnet18"), "have 1000 classes, but the data has 10: set `checkpoint`")
    with pytest.raises(ValueError, match="`weight` is 2, expected a number from 0 to 1: change it"):
        Distillation("resnet18", weight=2)
    refused(distillation, "do not fit this RAVLT: only 156 of its 158 tensors .*, and head.fc.weight", classes=7)


def test_a_teacher_that_cannot_be_downloaded_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sentence = r"could not be downloaded \(.*\): fetch timm/regnety_160\.deit_in1k by hand and set `checkpoint`"
    refused(Distillation("regnety_160.deit_in1k"), sentence, classes=1000)


def test_soft_distillation_is_the_divergence_of_the_probabilities(teacher):
    network, hard = teacher
    distillation = Distillation("ravlt_nano", hard.checkpoint, weight=0.3, kind="soft", temperature=2.0)
    student = timm.create_model("mavit_nano", num_classes=10)
    torch.nn.init.normal_(student.get_classifier().weight)  # as it is, both are nearly uniform, and the divergence 0
    task = Classification(student, 10, distillation=distillation).eval()
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    logits = student(images)
    ours, its = (logits / 2).softmax(1), (network(images) / 2).softmax(1)
    divergence = (its * (its / ours).log()).sum(1).mean()
    expected = 0.7 * cross_entropy(logits, labels) + 0.3 * 4 * divergence
    torch.testing.assert_close(task._loss(images, labels), expected)


def test_a_teacher_may_have_arguments(tmp_path):
    arguments = {"name": "deit_tiny_patch16_224", "img_size": 32, "patch_size": 8, "depth": 1}
    network = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=10)
    torch.save(network.state_dict(), tmp_path / "teacher.pth")
    distillation = Distillation(arguments, str(tmp_path / "teacher.pth"), kind="soft")
    one_head = timm.create_model("ravlt_nano", num_classes=10)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(distillation.build(one_head, 10, 3).logits(images), network.eval()(images))
    refused(distillation, "'soft', but CARE has two heads: set it to 'hard'")
    wrong = Distillation({**arguments, "depht": 2}, distillation.checkpoint, kind="soft")
    refused(wrong, r"The `teacher` deit_tiny_patch16_224 cannot be built with .*depht", one_head)
    refused(Distillation({"depth": 2}, kind="soft"), "timm does not know the `teacher` null", one_head)
