import math

import pytest
import torch
from torch import nn

from linvit.tasks import Language, Recall

IGNORED = -100


class Fixed(nn.Module):
    """Gives the same logits for every token."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens, documents):
        return self.logits.expand(*tokens.shape, -1)


def validated(task, batches):
    logged = {}
    task.log = lambda name, value, **kwargs: logged.__setitem__(name, float(value))
    for number, batch in enumerate(batches):
        task.validation_step(batch, number)
    task.on_validation_epoch_end()
    return logged


def batch(targets, num_bytes):
    targets = torch.tensor(targets)
    about = {"targets": targets, "documents": torch.zeros_like(targets), "bytes": torch.tensor(num_bytes)}
    return torch.zeros_like(targets), about


def test_bits_are_those_of_every_asked_token_over_all_bytes():
    likely = torch.tensor([0.5, 0.25, 0.125, 0.125])
    task = Language(Fixed(likely.log()))
    logged = validated(task, [batch([[0, 1, IGNORED]], [3]), batch([[3, 0, 0]], [5])])
    bits = 1 + 2 + 3 + 1 + 1
    assert logged["val/bits_per_byte"] == pytest.approx(bits / 8)
    assert logged["val/loss"] == pytest.approx(bits * math.log(2) / 5)
    assert logged["val/perplexity"] == pytest.approx(2 ** (bits / 5))
    assert logged["val/next_accuracy"] == pytest.approx(3 / 5)
    assert logged["val/bytes"] == 8
    again = validated(task, [batch([[1]], [1])])
    assert again["val/bits_per_byte"] == pytest.approx(2)


def test_the_moving_average_has_measures_of_its_own():
    task = Language(Fixed(torch.zeros(2)), ema_decay=0.9)
    with torch.no_grad():
        task.network.logits.copy_(torch.tensor([0.75, 0.25]).log())
    logged = validated(task, [batch([[0]], [1])])
    assert logged["val/ema_bits_per_byte"] == pytest.approx(1)
    assert logged["val/bits_per_byte"] == pytest.approx(-math.log2(0.75))
    assert task.monitor == "ema_bits_per_byte"


def test_recall_counts_answers_alone():
    task = Recall(Fixed(torch.tensor([1.0, 0.0])))
    logged = validated(task, [batch([[IGNORED, 0], [IGNORED, 1]], [0, 0]), batch([[0, IGNORED]], [0])])
    assert logged["val/recall_accuracy"] == pytest.approx(2 / 3)
    assert logged["val/sequences"] == 3
    assert "val/bits_per_byte" not in logged
    assert (task.score, task.measures[task.score].lower_is_better) == ("recall_accuracy", False)
