"""Speech recognition: connectionist temporal classification (CTC) or a transducer (RNN-T), word error rate."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torchmetrics import Metric

from linvit.errors import SettingError
from linvit.ranges import Count, check
from linvit.tasks.measures import LOSS, Measure, counted
from linvit.tasks.task import Task, exact_sum
from linvit.tasks.transcription import BLANK, CountedNGram, greedy, prefix_beam, spelled, word_edits

logger = logging.getLogger(__name__)
Targets = dict[str, Any]
WITH_MODEL = {"wer_lm": Measure("word error rate with language model", lower_is_better=True, panel="word error rate")}


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
        lm_beam: Beam width of a second decoding, with an n-gram model counted in the training transcripts, whose word
            error rate is the measure wer_lm; 1 is none.
        kwargs: Further arguments of Task.

    `decoding` contains the further arguments of prefix_beam, such as names and language_model; recipes do not set them.

    wer is the number of word edits over all utterances divided by their number of words; loss is the loss per token,
    averaged over utterances. Utterances with fewer frames than tokens and blanks between equal ones, which CTC cannot
    align, are left out of the loss, with a warning; if all training utterances are, training ends with a ValueError.
    """

    measures: Mapping[str, Measure] = {
        "wer": Measure("word error rate", lower_is_better=True, panel="word error rate"),
        **LOSS,
        **counted("utterances"),
    }
    score = "wer"
    headline: tuple[str, ...] = ("wer",)
    counted = "utterances"

    def __init__(self, network: nn.Module, beam: Count = 1, lm_beam: Count = 1, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.beam, self.lm_beam = known_beam(beam, network), known_beam(lm_beam, network, "lm_beam")
        self.decoding: dict[str, Any] = {}
        self._n_gram: CountedNGram | None = None
        sums = ["words", "aligned", "loss", "wer"]
        if self.lm_beam > 1:
            self.measures = {**self.measures, **WITH_MODEL}
            sums += WITH_MODEL
        self.keep(lambda: {name: exact_sum() for name in sums})
        self.utterances, self.aligned = exact_sum(), exact_sum()  # training utterances
        self._warned: set[str] = set()

    def setup(self, stage: str) -> None:
        source = cast(Any, self.trainer).datamodule
        if self.lm_beam > 1 and not hasattr(source, "utterances"):
            raise SettingError(
                f"`lm_beam` needs transcripts that can be read at once, which {type(source).__name__} does not have:"
                " leave it out."
            )

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        features, targets = batch
        logits, lengths = self.network(features, targets["lengths"], targets["tokens"])
        losses = loss_per_token(logits, lengths, targets)
        self.utterances.update(len(features))
        self.aligned.update(len(losses))
        return self.learn(losses.mean() if len(losses) else losses.sum(), len(losses))

    def on_train_epoch_end(self) -> None:
        self.warn_of_unaligned("training", self.utterances, self.aligned.compute())
        self.utterances.reset()
        self.aligned.reset()
        super().on_train_epoch_end()

    def warn_of_unaligned(self, split: str, utterances: Metric, aligned: Tensor) -> None:
        """Warns once of utterances without an alignment; raises ValueError if no training utterance has one."""
        total, count = int(utterances.compute()), int(aligned)
        about = f"{total - count:,} of the {total:,} {split} utterances have too few frames for their tokens"
        if not count and split == "training":
            raise ValueError(f"{about}: check the transcripts, or use larger units.")
        if count < total and split not in self._warned:
            logger.warning("%s, so they are left out of the loss.", about)
            self._warned.add(split)

    def validation_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> None:
        features, targets = batch
        self.count.update(len(features))
        source = cast(Any, self.trainer).datamodule
        names = source.class_names
        for kind, network in self.networks().items():
            logits, lengths = network(features, targets["lengths"], targets["tokens"])
            sums = self.kept(kind)
            losses = loss_per_token(logits, lengths, targets)
            sums["loss"].update(losses.double().sum())
            sums["aligned"].update(len(losses))
            speech = cast(Recognizer, network)
            transduced = speech.transduce(features, targets["lengths"]) if speech.transduces else None
            decoded = {"wer": transduced or self.decoded(logits, lengths)}
            if self.lm_beam > 1:
                decoding = {"names": names, "language_model": self.counted_n_gram(source)}
                decoded["wer_lm"] = beamed(logits, lengths, self.lm_beam, **decoding)
            for name, rows in decoded.items():
                for tokens, text in zip(rows, targets["texts"], strict=True):
                    sums[name].update(word_edits(text, spelled(tokens, names))[0])
            for text in targets["texts"]:
                sums["words"].update(len(text.split()))

    def decoded(self, logits: Tensor, lengths: Tensor) -> list[list[int]]:
        """The decoded tokens of each utterance, greedily or with a beam."""
        if self.beam == 1:
            return greedy(logits, lengths)
        return beamed(logits, lengths, self.beam, **self.decoding)

    def counted_n_gram(self, source: Any) -> CountedNGram:
        """The language model of the training transcripts, counted once."""
        if self._n_gram is None:
            self._n_gram = CountedNGram(utterance.text for utterance in source.utterances("train"))
        return self._n_gram

    def measured(self, kind: str) -> dict[str, Tensor]:
        sums = {name: total.compute() for name, total in self.kept(kind).items()}
        words, aligned, loss = (sums.pop(name) for name in ("words", "aligned", "loss"))
        self.warn_of_unaligned("held-out", self.count, aligned)
        return {name: edits / words for name, edits in sums.items()} | {"loss": loss / aligned}


def known_beam(beam: int, network: nn.Module, name: str = "beam") -> int:
    """Returns the beam width; raises ValueError, calling it `name`, if the network cannot use it."""
    check({name: Count}, {name: beam})
    if beam > 1 and cast(Recognizer, network).transduces:
        raise SettingError(f"`{name}` is {beam}, but a transducer is decoded greedily: leave it out.")
    return beam


def beamed(logits: Tensor, lengths: Tensor, beam: int, **decoding: Any) -> list[list[int]]:
    """The tokens of each utterance by prefix_beam, whose further arguments `decoding` contains."""
    rows = zip(logits, lengths.tolist(), strict=True)
    return [prefix_beam(row[:length], beam, **decoding) for row, length in rows]


def loss_per_token(logits: Tensor, lengths: Tensor, targets: Targets) -> Tensor:
    """The loss per token of each utterance that has an alignment, (utterances,).

    CTC's loss, or for logits in four dimensions a transducer's, which can align all utterances.
    """
    counts: Tensor = targets["counts"]
    if logits.dim() == 4:
        loss = transducer_loss(logits, lengths, targets["tokens"], counts)
        return loss / counts.clamp_min(1)
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    losses = ctc_loss(scores, targets["tokens"], lengths, counts, blank=BLANK, reduction="none", zero_infinity=True)
    tokens = targets["tokens"]
    inside = torch.arange(tokens.shape[1], device=tokens.device)[1:] < counts[:, None]
    blanks = ((tokens[:, 1:] == tokens[:, :-1]) & inside).sum(1)
    return (losses / counts.clamp_min(1))[counts + blanks <= lengths]


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
