"""Speech recognition: connectionist temporal classification (CTC) or a transducer (RNN-T), word error rate."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torchmetrics import Metric

from linvit.ranges import Count, check
from linvit.tasks.measures import LOSS, Measure, counted
from linvit.tasks.task import Task, exact_sum
from linvit.tasks.transcription import BLANK, greedy, prefix_beam, spelled, word_edits

Targets = dict[str, Any]


class Recognizer(Protocol):
    """A network for speech recognition, as decoding uses it."""

    transduces: bool

    def transduce(self, features: Tensor, lengths: Tensor) -> list[list[int]]: ...


class Speech(Task):
    """Trains a network to transcribe speech.

    Args:
        network: Maps features (batch, frames, mels), the number of frames of each utterance and the tokens of its text
            to logits (batch, frames, tokens), or (batch, frames, text + 1, tokens) if it `transduces`, and the number
            of these frames of each utterance; token 0 is the blank.
        beam: Beam width of decoding; 1 is greedy, the only choice for a transducer.
        kwargs: Further arguments of Task.

    `decoding` contains the further arguments of prefix_beam, such as names and language_model; recipes do not set them.

    wer is the number of word edits over all utterances divided by their number of words; loss is the loss per token,
    averaged over utterances. An utterance with more tokens than frames has no alignment and counts as loss 0.
    """

    measures: Mapping[str, Measure] = {
        "wer": Measure("word error rate", lower_is_better=True, panel="word error rate"),
        **LOSS,
        **counted("utterances"),
    }
    score = "wer"
    headline: tuple[str, ...] = ("wer",)
    counted = "utterances"

    def __init__(self, network: nn.Module, beam: Count = 1, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.beam = known_beam(beam, network)
        self.decoding: dict[str, Any] = {}
        self.keep(lambda: {name: exact_sum() for name in ("edits", "words", "loss")})

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        features, targets = batch
        logits, lengths = self.network(features, targets["lengths"], targets["tokens"])
        return self.learn(loss_per_token(logits, lengths, targets).mean(), len(features))

    def validation_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> None:
        features, targets = batch
        self.count.update(len(features))
        names = cast(Any, self.trainer).datamodule.class_names
        for kind, network in self.networks().items():
            logits, lengths = network(features, targets["lengths"], targets["tokens"])
            sums = cast(Mapping[str, Metric], self.metrics[kind])
            sums["loss"].update(loss_per_token(logits, lengths, targets).double().sum())
            speech = cast(Recognizer, network)
            transduced = speech.transduce(features, targets["lengths"]) if speech.transduces else None
            for tokens, text in zip(transduced or self.decoded(logits, lengths), targets["texts"], strict=True):
                edits, words = word_edits(text, spelled(tokens, names))
                sums["edits"].update(edits)
                sums["words"].update(words)

    def decoded(self, logits: Tensor, lengths: Tensor) -> list[list[int]]:
        """The decoded tokens of each utterance, greedily or with a beam."""
        if self.beam == 1:
            return greedy(logits, lengths)
        rows = zip(logits, lengths.tolist(), strict=True)
        return [prefix_beam(row[:length], self.beam, **self.decoding) for row, length in rows]

    def measured(self, kind: str) -> dict[str, Tensor]:
        edits, words, loss = (total.compute() for total in cast(Mapping[str, Metric], self.metrics[kind]).values())
        return {"wer": edits / words.clamp_min(1), "loss": loss / self.count.compute()}


def known_beam(beam: int, network: nn.Module) -> int:
    """Returns the beam width; raises ValueError if the network cannot use it."""
    check({"beam": Count}, {"beam": beam})
    if beam > 1 and cast(Recognizer, network).transduces:
        raise ValueError(f"`beam` is {beam}, but a transducer is decoded greedily: leave it out.")
    return beam


def loss_per_token(logits: Tensor, lengths: Tensor, targets: Targets) -> Tensor:
    """The loss per token of each utterance, (batch,): CTC's, or for logits in four dimensions a transducer's."""
    counts: Tensor = targets["counts"]
    if logits.dim() == 4:
        loss = transducer_loss(logits, lengths, targets["tokens"], counts)
        return loss / counts.clamp_min(1)
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    losses = ctc_loss(scores, targets["tokens"], lengths, counts, blank=BLANK, reduction="none", zero_infinity=True)
    return losses / counts.clamp_min(1)


def transducer_loss(logits: Tensor, lengths: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """Negative log-likelihood of each text, summed over all alignments of its tokens with the frames, (batch,).

    Args:
        logits: (batch, frames, text + 1, tokens).
        lengths: int64 (batch,), frames of each utterance, at least one.
        tokens: int64 (batch, text), padded with anything.
        counts: int64 (batch,), tokens of each text.

    One step per frame; within a frame a cumulative logsumexp over places. In plain torch, memory is several times that
    of the logits.

    Source: arXiv 1211.3711, Eq. 16 and 18.
    """
    scores = logits.float().log_softmax(-1)
    blank = scores[..., BLANK].double()
    wanted = tokens[:, None, :, None].expand(-1, scores.shape[1], -1, -1)
    emitted = nn.functional.pad(scores[:, :, :-1].gather(-1, wanted).squeeze(-1).double().cumsum(-1), (1, 0))
    alpha = emitted[:, 0]
    ends = []
    for frame in range(scores.shape[1]):
        if frame:
            alpha = emitted[:, frame] + (alpha + blank[:, frame - 1] - emitted[:, frame]).logcumsumexp(-1)
        ends.append(alpha + blank[:, frame])
    rows = torch.arange(len(lengths), device=lengths.device)
    return -torch.stack(ends, 1)[rows, lengths - 1, counts].to(logits.dtype)
