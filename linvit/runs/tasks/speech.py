"""Runs of speech recognition."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from linvit.analysis.report import paragraph, table
from linvit.data.source import Source
from linvit.data.speech.an4 import AN4
from linvit.data.speech.audio import HOP, CorruptAudioError, read_audio, samples_in_memory, window_samples
from linvit.data.speech.hub import HuggingFaceSpeech
from linvit.data.speech.librispeech import SUFFIXES, LibriSpeech, SpeechFolder, SpeechPreprocessing
from linvit.errors import refuse
from linvit.files import check_output_file
from linvit.layers.conformer import SUBSAMPLED
from linvit.models.conformer import Conformer, StreamCache
from linvit.ranges import check_names, checked, declared
from linvit.runs.evaluate import Measures
from linvit.runs.images import as_list, find_inputs
from linvit.runs.predictions import ENDINGS, Predictions, Transcript
from linvit.runs.progress import tracked
from linvit.runs.report import Section
from linvit.runs.run import NamedRun
from linvit.runs.trained import Trained
from linvit.tasks.speech import Recognizer, Speech, known_beam
from linvit.tasks.transcription import BLANK, CountedNGram, NGram, spelled, word_edits

logger = logging.getLogger(__name__)
WORST, CORRECT = 20, 5  # utterances of a report
OWN_TEXT = "train"  # in place of a language model's file


class SpeechRun(NamedRun):
    """A run of a Conformer with CTC or a transducer, which recognizes speech."""

    task_name = "speech"
    task_class = Speech
    sources: ClassVar = {"librispeech": LibriSpeech, "an4": AN4, "huggingface_speech": HuggingFaceSpeech}
    folder_source = "librispeech"
    preprocessing_class = SpeechPreprocessing
    kept = ("beam",)
    family = "speech"

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        settings = stored | changes
        check_names("setting of the data", changes, declared(self.sources[name]))
        if name == "librispeech" and "root" in changes and "val" not in changes:
            folder = SpeechFolder(settings["root"], self.class_names, self.preprocessing)
            for key in ("batch_size", "num_workers", "max_corrupt"):
                setattr(folder, key, settings.get(key, getattr(folder, key)))
            if len(inside := folder.subset_names()) > 1:
                logger.warning(
                    "%s contains the subsets %s, which are evaluated together: name one to evaluate it alone.",
                    folder.root,
                    ", ".join(inside),
                )
            return folder
        source = self.create_source(name, settings)
        source.class_names, source.preprocessing = self.class_names, self.preprocessing
        return source

    @checked
    def evaluate(
        self,
        data: str | Path | None = None,
        progress: bool = False,
        trainer: Mapping[str, Any] | None = None,
        *,
        beam: int | None = None,
        language_model: str | Path | None = None,
        lm_weight: float | None = None,
        word_bonus: float | None = None,
        **overrides: Any,
    ) -> Measures:
        """Loss and word and character errors over all held-out utterances.

        Args:
            data, overrides: see `source`.
            progress: show a progress bar in the terminal.
            trainer: arguments of Lightning's Trainer, such as devices and precision.
            beam, language_model, lm_weight, word_bonus: how texts are decoded, see `predict`.
        """
        self._set_decoding(beam, language_model, lm_weight, word_bonus)
        return super().evaluate(data, progress, trainer, **overrides)

    @checked
    def report(
        self,
        path: str | Path | None = None,
        measures: Measures | None = None,
        data: str | Path | None = None,
        *,
        beam: int | None = None,
        language_model: str | Path | None = None,
        lm_weight: float | None = None,
        word_bonus: float | None = None,
        **overrides: Any,
    ) -> Path:
        """Writes a self-contained HTML report, see `Run.report`; texts are decoded as in `predict`."""
        self._set_decoding(beam, language_model, lm_weight, word_bonus)
        return super().report(path, measures, data, **overrides)

    @checked
    def predict(
        self,
        inputs: Any,
        *,
        beam: int | None = None,
        language_model: str | Path | None = None,
        lm_weight: float | None = None,
        word_bonus: float | None = None,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
    ) -> Predictions[Transcript]:
        """A Transcript for each audio file, or float array of samples at the network's rate; each is decoded alone.

        Files with another sampling rate are resampled; channels are averaged.

        Args:
            inputs: a path, or a sequence of paths or arrays; folders are searched.
            beam: beam width of CTC decoding (default: the recipe's; 1 = greedy).
            language_model: word n-gram model, .arpa or KenLM binary, or "train" for one counted in the transcripts that
                the run was trained on; needs a beam.
            lm_weight: weight of the language-model score (0.5).
            word_bonus: score added for each word (0); needs a beam.
            weights: "raw" or "ema"; default: the moving average, if there is one.
            output: a .csv or .json file to write as well.
            progress: show a progress bar.

        Files that cannot be read are listed in `unreadable` of the result.
        """
        self._set_decoding(beam, language_model, lm_weight, word_bonus)
        path = None if output is None else check_output_file(output, ENDINGS)
        items, unreadable = find_inputs(as_list(inputs), SUFFIXES, "sound")
        network, device = self.placed_network(weights)
        rows = []
        for name, item in tracked(items, "Transcribing", progress=progress):
            try:
                features = self.preprocessing.features(_samples(item, name, self.preprocessing.rate))
            except CorruptAudioError as error:
                unreadable.append(str(error))
                continue
            (tokens,) = transcribed(self, network, features[None].to(device), torch.tensor([len(features)]).to(device))
            rows.append(Transcript(name, spelled(tokens, self.class_names)))
        transcripts = Predictions(rows, unreadable)
        if path:
            transcripts.save(path)
        return transcripts

    def transcriber(self, weights: str | None = None) -> "Transcriber":
        """Transcribes audio as it arrives; for causal networks. weights: "raw" or "ema"."""
        return Transcriber(self, weights)

    @checked
    def stream(self, inputs: Any, seconds: float, *, weights: str | None = None) -> Iterator[str]:
        """The text that each piece of an audio file adds, by a causal network; a piece is this many seconds long."""
        items, missing = find_inputs(as_list(inputs), SUFFIXES, "sound")
        count = len(items) + len(missing)
        refuse(
            count != 1 and f"One file can be streamed at a time, but {count} are given: give one.",
            not 0 < seconds < math.inf and f"`seconds` is {seconds}, expected a time above 0: change it.",
        )
        transcriber = Transcriber(self, weights)
        rate = self.preprocessing.rate
        pieces = _samples(items[0][1], items[0][0], rate).split(max(1, round(seconds * rate)))

        def added() -> Iterator[str]:
            for number, piece in enumerate(pieces, start=1):
                text = transcriber.text
                yield transcriber.add(piece, last=number == len(pieces))[len(text) :]

        return added()

    def _set_decoding(
        self, beam: int | None, language_model: str | Path | None, lm_weight: float | None, word_bonus: float | None
    ) -> None:
        """Sets how utterances are decoded from now on; without `beam`, with the recipe's beam width."""
        task = cast(Speech, self.task)
        recipe_beam = (self.recipe or {}).get("task", {}).get("beam", 1)
        beam = known_beam(recipe_beam if beam is None else beam, task.network)
        of_beam = {"language_model": language_model, "word_bonus": word_bonus}
        refuse(
            lm_weight is not None
            and language_model is None
            and "`lm_weight` is the weight of `language_model`, which is not given: leave it out, or add one.",
            *(
                beam == 1 and value is not None and f"`{name}` needs a beam: set `beam=16`, for example."
                for name, value in of_beam.items()
            ),
        )
        decoding: dict[str, Any] = {"names": self.class_names, "bonus": word_bonus or 0.0}
        if language_model is not None:
            if str(language_model) == OWN_TEXT:
                source = cast(LibriSpeech, self.source())
                decoding["language_model"] = CountedNGram(utterance.text for utterance in source.utterances("train"))
            else:
                decoding["language_model"] = NGram(language_model)
            decoding["weight"] = 0.5 if lm_weight is None else lm_weight
        task.beam, task.decoding = beam, decoding

    def facts(self, source: Source) -> tuple[str, ...]:
        beam, data = cast(Speech, self.task).beam, cast(LibriSpeech, source)
        decoding = f"beam width {beam}" if beam > 1 else "greedy decoding"
        return decoding, f"data: {data.preprocessing.corpus}", f"evaluated on {data.root}"

    def sections(self, source: Source) -> list[Section]:
        utterances = _utterances(self, source)
        worst = [row for row in sorted(utterances, key=lambda row: -row["edits"]) if row["edits"]][:WORST]
        correct = [row for row in utterances if not row["edits"]][:CORRECT]
        none = [paragraph("None.")]
        return [
            ("By speaker", [table(_by_speaker(utterances, self))]),
            (f"The {len(worst)} utterances with the most errors", [table(worst)] if worst else none),
            ("Without an error", [table(correct)] if correct else none),
        ]


class Transcriber:
    """Transcribes samples as they arrive, decoding greedily; the final text equals that of the complete utterance.

    Args:
        run: a run of a causal network with a CTC head.
        weights: "raw" or "ema"; default: the moving average, if there is one.
    """

    def __init__(self, run: Trained, weights: str | None = None) -> None:
        network, self.device = run.placed_network(weights)
        refuse(
            not isinstance(network, Conformer)
            and f"{run.path} is an exported file, which needs complete utterances: give the run itself.",
            (not network.causal or bool(network.transduces))
            and f"{run.path} needs complete utterances: to transcribe a stream, train with model.causal=true and"
            " model.head=ctc.",
        )
        assert isinstance(network, Conformer)
        self.network, self.preprocessing, self.class_names = network, run.preprocessing, run.class_names
        self.memory = StreamCache()
        self.tokens: list[int] = []
        self._waiting = torch.zeros(0)
        self._last = BLANK

    @property
    def text(self) -> str:
        """The text so far."""
        return spelled(self.tokens, self.class_names)

    def add(self, samples: Tensor | np.ndarray, last: bool = False) -> str:
        """Reads float samples (samples,) in −1 … 1 at the network's rate; `last` with the final ones.

        Returns the text so far.
        """
        self._waiting = torch.cat((self._waiting, samples_in_memory(samples, "piece")))
        hop, window = round(HOP * self.preprocessing.rate), window_samples(self.preprocessing.rate)
        frames = max(0, 1 + (len(self._waiting) - window) // hop)
        frames = frames if last else frames // SUBSAMPLED * SUBSAMPLED
        if frames:
            self._read(self.preprocessing.features(self._waiting[: (frames - 1) * hop + window]))
            self._waiting = self._waiting[frames * hop :]
        return self.text

    @torch.inference_mode()
    def _read(self, features: Tensor) -> None:
        for token in self.network.read(features[None].to(self.device), self.memory)[0].argmax(-1).tolist():
            if token not in (BLANK, self._last):
                self.tokens.append(token)
            self._last = token


@torch.inference_mode()
def transcribed(run: Trained, network: nn.Module, features: Tensor, lengths: Tensor) -> list[list[int]]:
    """The tokens of each utterance in a batch, see Speech.decoded."""
    speech = cast(Recognizer, network)
    if speech.transduces:
        return speech.transduce(features, lengths)
    return cast(Speech, run.task).decoded(*network(features, lengths))


def _samples(item: Any, name: str, rate: int) -> Tensor:
    if isinstance(item, Path):
        return read_audio(item, rate)
    samples = samples_in_memory(item, name)
    if len(samples) < window_samples(rate):
        raise CorruptAudioError(f"The {name} has {len(samples)} samples, less than one frame: leave it out.")
    return samples


def _utterances(run: Trained, source: Source) -> list[dict[str, Any]]:
    """One row per utterance: speaker, file, reference, transcript, and the word edits between the two."""
    network, device = run.placed_network()
    rows = []
    for features, targets in source.val_dataloader():
        answers = transcribed(run, network, features.to(device), targets["lengths"].to(device))
        for tokens, text, path in zip(answers, targets["texts"], targets["paths"], strict=True):
            transcript = spelled(tokens, run.class_names)
            edits, words = word_edits(text, transcript)
            row = {
                "speaker": cast(LibriSpeech, source).speaker(path),
                "file": path.name,
                "reference": text,
                "transcript": transcript,
            }
            rows.append(row | {"edits": edits, "words": words})
    return rows


def _by_speaker(utterances: Sequence[dict[str, Any]], run: Trained) -> list[dict[str, Any]]:
    speakers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in utterances:
        speakers[row["speaker"]].append(row)
    wer = run.task.measures["wer"]
    rows = []
    for speaker, rows_of_speaker in sorted(speakers.items()):
        edits, words = (sum(row[key] for row in rows_of_speaker) for key in ("edits", "words"))
        counts = {"speaker": speaker, "utterances": len(rows_of_speaker), "words": words, "edits": edits}
        rows.append(counts | {wer.heading: wer.cell(edits / words if words else math.nan)})
    return rows
