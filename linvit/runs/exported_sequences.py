"""Files of decoders and Conformers as the networks of runs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from linvit.data.speech.librispeech import SpeechPreprocessing
from linvit.data.text.source import TextPreprocessing
from linvit.deploy.facts import FactsError, SequenceFacts
from linvit.deploy.runtime import Session
from linvit.deploy.sequences import DecoderFile, cache_of, zeros
from linvit.files import reason_of
from linvit.layers.causal import Packing
from linvit.layers.conformer import subsampled
from linvit.models.sequence import DecoderCache
from linvit.ranges import as_tuple
from linvit.runs.run import Run
from linvit.runs.stored import check_preprocessing
from linvit.runs.tasks import TASKS


class ExportedDecoder(nn.Module):
    """An exported decoder, which reads tokens as `linvit.models.sequence.Decoder` does."""

    def __init__(self, path: Path, facts: SequenceFacts, session: Session) -> None:
        super().__init__()
        self.path, self.facts = path, facts
        self.vocabulary, self.mechanism = facts.logits, facts.mechanism
        self.file = DecoderFile(facts, session)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary); documents as in Decoder."""
        packing = None if documents is None else Packing(documents)
        rows = tokens if packing is None else packing.apart(tokens.unsqueeze(-1)).squeeze(-1)
        batches = [rows] if self.facts.dynamic else rows.split(1)
        logits = torch.cat([self.read(batch, DecoderCache()) for batch in batches])
        return logits if packing is None else packing.together(logits, tokens)

    def read(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """As Decoder.read."""
        return self.file.read(tokens.cpu(), cache).to(tokens.device)


class ExportedConformer(nn.Module):
    """An exported Conformer with a CTC head; it reads each utterance alone."""

    causal = transduces = False  # it keeps no stream

    def __init__(self, path: Path, facts: SequenceFacts, session: Session) -> None:
        super().__init__()
        self.path, self.facts, self.session = path, facts, session
        self.tokens, self.mechanism = facts.logits, facts.mechanism

    def forward(self, features: Tensor, lengths: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Conformer.forward."""
        utterances = zip(features.cpu().split(1), lengths.tolist(), strict=True)
        logits = [self.session(utterance[:, :length].contiguous())[0][0] for utterance, length in utterances]
        return pad_sequence(logits, batch_first=True).to(features.device), subsampled(lengths)


def run_of_sequences(path: Path, facts: SequenceFacts, session: Session) -> Run:
    """A run around the file of a decoder or Conformer.

    Raises ValueError for a file of another network than that of a run of language or speech.
    """
    kind, network = KINDS[facts.task]
    if "corpus" not in facts.preprocessing:
        raise ValueError(
            f"{path} does not say how its {facts.inputs[0]} are made, because its network has no run of language or"
            " speech: open it with `linvit.deploy.formats.opened`."
        )
    try:
        known = {name: facts.preprocessing[name] for name in kind.__dataclass_fields__}
        preprocessing = kind(**{name: as_tuple(value) for name, value in known.items()})
        cache_of(zeros(facts.states, 1))
        check_preprocessing(TASKS[facts.task], known)
        if len(facts.class_names) not in (0, facts.logits):
            raise ValueError(f"{len(facts.class_names)} names for {facts.logits} logits")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FactsError(
            f"What {path} says about its preprocessing and states is damaged ({reason_of(error)}): export it again."
        ) from error
    spec = TASKS[facts.task]
    task = spec.around(network(path, facts, session), facts.logits)
    return Run(spec, task, list(facts.class_names), preprocessing, path, facts.name)


KINDS: dict[str, tuple[Any, Any]] = {
    "language": (TextPreprocessing, ExportedDecoder),
    "speech": (SpeechPreprocessing, ExportedConformer),
}
