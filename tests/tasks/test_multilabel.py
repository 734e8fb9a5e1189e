import math

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from torch import nn

from linvit.tasks.classification import MultiLabel


def measured(logits, targets, **options):
    """What the task logs of a network that answers with these logits, in two batches."""
    task = MultiLabel(nn.Flatten(), targets.shape[1], **options)
    logged = {}
    task.log = lambda name, value, **_: logged.update({name.removeprefix("val/"): float(value)})
    half = len(logits) // 2
    for rows in (slice(None, half), slice(half, None)):
        task.validation_step((logits[rows, :, None, None], targets[rows]), 0)
    task.on_validation_epoch_end()
    return logged


def test_measures_are_those_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    logits, targets = (torch.randn(41, 6, generator=generator), (torch.rand(41, 6, generator=generator) < 0.3).float())
    ours = measured(logits, targets)
    assert ours["map"] == pytest.approx(average_precision_score(targets, logits, average="macro"), abs=1e-6)
    assert ours["f1"] == pytest.approx(f1_score(targets, logits > 0, average="micro"), abs=1e-6)
    assert ours["loss"] == pytest.approx(nn.functional.binary_cross_entropy_with_logits(logits, targets).item())
    assert ours["images"] == 41


@pytest.mark.filterwarnings("error")
def test_a_class_that_does_not_occur_is_left_out_of_the_mean():
    logits = torch.tensor([[2.0, -1.0, 3.0], [1.0, 2.0, 3.0], [-1.0, 0.5, 3.0], [0.3, -2.0, 3.0]])
    targets = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]])
    first, second = (average_precision_score(targets[:, place], logits[:, place]) for place in (0, 1))
    assert measured(logits, targets)["map"] == pytest.approx((first + second) / 2)


def test_a_single_class_is_refused():
    with pytest.raises(ValueError, match="1 class, expected 2 or more"):
        MultiLabel(nn.Flatten(), 1)


def test_the_asymmetric_loss_is_binary_cross_entropy_without_its_exponents_and_clip():
    logits, targets = torch.randn(8, 5), (torch.rand(8, 5) < 0.5).float()
    symmetric = MultiLabel(nn.Flatten(), 5, asymmetric=True, gamma_negative=0, gamma_positive=0, clip=0).loss
    torch.testing.assert_close(symmetric(logits, targets), MultiLabel(nn.Flatten(), 5).loss(logits, targets))
    asymmetric = MultiLabel(nn.Flatten(), 5, asymmetric=True).loss
    probability = torch.tensor(0.4)  # of one negative: p is 0.4 - 0.05 after the clip, weighted by p⁴
    expected = -((0.35) ** 4) * math.log(1 - 0.35)
    assert asymmetric(probability.logit().view(1, 1), torch.zeros(1, 1)).item() == pytest.approx(expected)
