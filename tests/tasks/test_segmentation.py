import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassConfusionMatrix

from linvit.tasks.segmentation import IGNORED, Segmentation, overlaps, pixel_loss


def test_overlaps_are_those_of_all_pixels_together():
    generator = torch.Generator().manual_seed(1)
    truth = torch.randint(0, 4, (3, 20, 30), generator=generator)
    answer = torch.where(torch.rand(truth.shape, generator=generator) < 0.6, truth, truth.roll(1))
    truth[:, :3] = IGNORED
    confusion = MulticlassConfusionMatrix(6, ignore_index=IGNORED)  # classes 4 and 5 occur nowhere
    for one, other in zip(answer, truth, strict=True):
        confusion.update(one[None], other[None])
    measured = overlaps(confusion.compute())
    counted = (truth != IGNORED).numpy()
    a, t = answer.numpy()[counted], truth.numpy()[counted]
    unions = [np.mean([((a == c) & (t == c)).sum() / ((a == c) | (t == c)).sum() for c in range(4)])]
    assert measured["miou"].item() == pytest.approx(unions[0], rel=1e-6)
    assert measured["pixel_accuracy"].item() == pytest.approx((a == t).mean(), rel=1e-6)
    assert measured["class_accuracy"].item() == pytest.approx(
        np.mean([(a[t == c] == c).mean() for c in range(4)]), rel=1e-6
    )


def test_a_class_that_is_only_answered_counts_as_wrong():
    confusion = torch.tensor([[8, 2, 0], [0, 0, 0], [0, 0, 0]])
    measured = overlaps(confusion)
    assert measured["miou"].item() == pytest.approx((0.8 + 0) / 2)
    assert measured["class_accuracy"].item() == pytest.approx(0.8)


def test_the_loss_is_divided_by_all_pixels():
    torch.manual_seed(0)
    logits, maps = torch.randn(2, 5, 4, 4), torch.randint(0, 5, (2, 4, 4))
    maps[0] = IGNORED
    by_hand = -logits.log_softmax(1).gather(1, maps.clamp(max=4)[:, None])[1].sum() / 32
    assert pixel_loss(logits, maps).item() == pytest.approx(by_hand.item(), rel=1e-6)
    maps[:] = IGNORED
    assert pixel_loss(logits, maps).item() == 0.0


def test_weights_of_classes_scale_their_pixels():
    torch.manual_seed(0)
    logits, maps = torch.randn(1, 3, 4, 4), torch.randint(0, 3, (1, 4, 4))
    each = -logits.log_softmax(1).gather(1, maps[:, None])[:, 0]
    weights = torch.tensor([0.5, 1.0, 2.0])
    assert pixel_loss(logits, maps, weights).item() == pytest.approx((each * weights[maps]).mean().item(), rel=1e-6)


def test_the_overlap_of_each_class_is_a_measure_on_request():
    task = Segmentation(torch.nn.Conv2d(3, 3, 1), 3, class_names=["road", "sky", "car"])
    assert list(task.measures)[-3:] == ["iou_road", "iou_sky", "iou_car"]
    truth = torch.tensor([[[0, 0, 1, 1]]])
    with torch.no_grad():
        task.network.weight.copy_(torch.eye(3)[..., None, None])
        task.network.bias.zero_()
    guessed = torch.nn.functional.one_hot(torch.tensor([[[0, 1, 1, 1]]]), 3).movedim(-1, 1).float()
    task.validation_step((guessed, truth), 0)
    measured = task.measured("raw")
    assert [measured[name].item() for name in ("iou_road", "iou_sky")] == pytest.approx([1 / 2, 2 / 3])
    assert measured["iou_car"].isnan(), "there is none"
    with pytest.raises(ValueError, match=r"`class_names` has 1 entries, but the data has 3 classes"):
        Segmentation(torch.nn.Conv2d(3, 3, 1), 3, class_names=["road"])
