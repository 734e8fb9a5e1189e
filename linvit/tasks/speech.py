"""Speech to text: connectionist temporal classification (CTC), word error rate."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torchmetrics import SumMetric

from linvit.tasks.task import Task
from linvit.tasks.transcription import BLANK, greedy, prefix_beam, spelled, word_edits

Targets = dict[str, Any]


class Speech(Task):
    """Trains a network to write what is said.

    Args:
        network: Takes features (batch, frames, mels) and the frames of each utterance, gives logits (batch, frames,
            pieces), piece 0 the blank, and how many frames of these each utterance has.
        beam: Beginnings that decoding keeps; 1 takes the most probable piece of each frame.
        kwargs: Those of Task.

    wer is the edits of all utterances over all their words; loss the mean over utterances of their loss a piece. An
    utterance with more pieces than frames has no path and counts as loss 0.
    """

    score = "wer"
    lowest = True
    counted = "utterances"
    sums = ("edits", "words", "loss")

    def __init__(self, network: nn.Module, beam: int = 1, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        if beam < 1:
            raise ValueError(f"task.beam is {beam}, but one beginning or more has to be kept: set it to 1 or more.")
        self.beam = beam
        self.sums_of = nn.ModuleDict(
            {kind: nn.ModuleDict({name: _exact_sum() for name in self.sums}) for kind in self.networks()}
        )
        self.count = _exact_sum()

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits: tuple[Tensor, Tensor] = self.network(features, lengths)
        return logits

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        features, targets = batch
        logits, lengths = self(features, targets["lengths"])
        return self.learn(loss_a_piece(logits, lengths, targets).mean(), len(features))

    def validation_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> None:
        features, targets = batch
        self.count.update(len(features))
        names = self.trainer.datamodule.class_names
        for kind, network in self.networks().items():
            logits, lengths = network(features, targets["lengths"])
            found = self.sums_of[kind]
            found["loss"].update(loss_a_piece(logits, lengths, targets).double().sum())
            for pieces, text in zip(self.written(logits, lengths), targets["texts"], strict=True):
                edits, words = word_edits(text, spelled(pieces, names))
                found["edits"].update(edits)
                found["words"].update(words)

    def written(self, logits: Tensor, lengths: Tensor) -> list[list[int]]:
        """The pieces of each utterance, by greedy search or with a beam."""
        if self.beam == 1:
            return greedy(logits, lengths)
        return [prefix_beam(row[:length], self.beam) for row, length in zip(logits, lengths.tolist(), strict=True)]

    def on_validation_epoch_end(self) -> None:
        count = self.count.compute()
        for kind, found in self.sums_of.items():
            edits, words, loss = (found[name].compute() for name in self.sums)
            self.log_measures(kind, {"wer": edits / words.clamp_min(1), "loss": loss / count})
            for one in found.values():
                one.reset()
        self.log(f"val/{self.counted}", count)
        self.count.reset()


def loss_a_piece(logits: Tensor, lengths: Tensor, targets: Targets) -> Tensor:
    """The loss of each utterance over its pieces, (batch,)."""
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    losses = ctc_loss(
        scores, targets["pieces"], lengths, targets["counts"], blank=BLANK, reduction="none", zero_infinity=True
    )
    return losses / targets["counts"].clamp_min(1)


def _exact_sum() -> SumMetric:
    return SumMetric().set_dtype(torch.float64)
