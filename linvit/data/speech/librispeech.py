"""Speech in LibriSpeech's layout: FOLDER/SPEAKER/CHAPTER/*.trans.txt and the sound files that it names."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from linvit.data.order import GroupedOrder, ShuffledOrder
from linvit.data.source import Source, Workers
from linvit.data.speech.audio import CorruptAudioError, log_mel, read_audio, spec_augmented
from linvit.data.speech.transcripts import UNITS, Speller, tokens_of
from linvit.ranges import Amount, Count, OneOf, Range, Seed, Share

SUFFIXES = (".flac", ".wav")
SLOWEST = 1000  # samples a second
MEASURED = 200  # utterances from which mean and deviation of the features are taken
Sample = tuple[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class SpeechPreprocessing:
    """How sound becomes features: `mels` log-mel bands at `rate` hertz, minus mean over deviation of each band.

    tokenizer: that of subwords, as JSON. corpus: the data in words.
    """

    rate: int
    mels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokenizer: str = ""
    corpus: str = ""

    def features(self, samples: Tensor) -> Tensor:
        """Float32 (frames, mels) of float32 (samples,)."""
        return (log_mel(samples, self.rate, self.mels) - torch.tensor(self.mean)) / torch.tensor(self.std)


@dataclass(frozen=True)
class Utterance:
    """A sound file and what is said in it."""

    path: Path
    text: str


def find_utterances(folder: Path) -> list[Utterance]:
    """All utterances beneath a folder, sorted by their transcripts' paths, then as these list them.

    Raises:
        ValueError: for a folder that is missing or holds no transcripts, transcripts that are no UTF-8, and an
            utterance without a sound file.
    """
    if not folder.is_dir():
        raise ValueError(
            f"The speech folder {folder} does not exist: give one in LibriSpeech's layout, or create one with"
            " make_speech."
        )
    utterances = []
    for listed in sorted(folder.rglob("*.trans.txt")):
        files = {file.stem: file for file in sorted(listed.parent.iterdir()) if file.suffix.lower() in SUFFIXES}
        for line in filter(str.strip, _transcripts(listed).splitlines()):
            name, *words = line.split()
            if name not in files:
                raise ValueError(
                    f"{listed} names the utterance {name!r}, but {listed.parent} has no {name}.flac or {name}.wav:"
                    " add the file or remove the line."
                )
            utterances.append(Utterance(files[name], " ".join(words)))
    if not utterances:
        raise ValueError(f"{folder} holds no transcripts: expected SPEAKER/CHAPTER/*.trans.txt, as in LibriSpeech.")
    return utterances


def _transcripts(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"Transcripts must be UTF-8, but {file} is not: re-save it as UTF-8.") from error


def _read(rate: int, utterance: Utterance) -> Tensor:
    return read_audio(utterance.path, rate)


@dataclass(eq=False)
class Utterances(Dataset[Sample]):
    """(features, {"tokens", "text", "path"}) of each utterance; a sentence that names the file where it is unreadable.

    read: samples of an utterance. masks: arguments of spec_augmented, for training.
    """

    utterances: Sequence[Utterance]
    read: Callable[[Utterance], Tensor]
    preprocessing: SpeechPreprocessing
    speller: Speller
    masks: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Sample | str:
        utterance = self.utterances[index]
        try:
            features = self.preprocessing.features(self.read(utterance))
        except CorruptAudioError as error:
            return str(error)
        if self.masks:
            features = spec_augmented(features, **self.masks)
        tokens = torch.tensor(self.speller(utterance.text))
        return features, {"tokens": tokens, "text": utterance.text, "path": utterance.path}


def assembled(samples: list[Sample]) -> tuple[Tensor, dict[str, Any]]:
    """Features padded to (batch, frames, mels); lengths, tokens padded to (batch, text), counts, texts and paths."""
    features, targets = zip(*samples, strict=True)
    tokens = [target["tokens"].long() for target in targets]
    return pad_sequence(features, batch_first=True), {
        "lengths": torch.tensor(list(map(len, features))),
        "tokens": pad_sequence(tokens, batch_first=True),
        "counts": torch.tensor(list(map(len, tokens))),
        "texts": [target["text"] for target in targets],
        "paths": [target["path"] for target in targets],
    }


class LibriSpeech(Source):
    """Utterances in LibriSpeech's layout, flac or wav.

    Args:
        root: Folder of the subsets.
        train: Subsets to train on; utterances of another sampling rate are resampled.
        val: Subsets to validate on.
        units: What the network writes: words, characters, or subwords (byte pair encoding of the training transcripts).
        num_tokens: Number of subwords, the blank included.
        rate: Samples per second.
        mels: Bands of the features.
        batch_size: Utterances per batch.
        groups: Utterances are batched with those of similar size of file, in this many groups; 1 mixes them all.
        bands: Masks of neighbouring bands in training.
        band_width: Their greatest width.
        times: Masks of neighbouring frames in training.
        time_share: Their greatest share of the utterance.
        max_corrupt: Unreadable files that are left out, by name, before it is an error.
        seed: Of order and masks.
        num_workers: Processes that read sound.

    Raises ValueError for folders without transcripts, unknown units, a transcript without its sound file, and sizes
    out of range.
    """

    task = "speech"
    item = "utterance"
    assemble = staticmethod(assembled)

    def __init__(
        self,
        root: str,
        train: Sequence[str] = ("train",),
        val: Sequence[str] = ("val",),
        units: Annotated[str, OneOf(UNITS)] = "characters",
        num_tokens: Count = 1024,
        rate: Annotated[int, Range(SLOWEST)] = 16_000,
        mels: Count = 80,
        batch_size: Count = 16,
        groups: Count = 1,
        bands: Amount = 2,
        band_width: Amount = 27,
        times: Amount = 10,
        time_share: Share = 0.05,
        max_corrupt: Amount = 0,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, max_corrupt)
        self.root, self.subsets = Path(root), {"train": tuple(train), "val": tuple(val)}
        self.units, self.num_tokens, self.rate, self.mels, self.groups = units, num_tokens, rate, mels, groups
        self.masks = {"bands": bands, "band_width": band_width, "times": times, "time_share": time_share}
        self._utterances: dict[str, list[Utterance]] = {}
        self._tokenizer = ""

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """The names of the tokens, the blank first: those of the training transcripts, unless others were set."""
        texts = [utterance.text for utterance in self.utterances("train")]
        names, self._tokenizer = tokens_of(texts, self.units, self.num_tokens)
        return names

    @cached_property
    def preprocessing(self) -> SpeechPreprocessing:  # type: ignore[override]
        """Features with the mean and deviation of up to MEASURED training utterances, unless others were set."""
        names = self.class_names  # the tokenizer too
        mean, std = self._measured()
        corpus = f"{self.root.name}: {', '.join(self.subsets['train'])}, {len(names) - 1} {self.units}"
        return SpeechPreprocessing(self.rate, self.mels, mean, std, self._tokenizer, corpus)

    def utterances(self, split: str) -> list[Utterance]:
        """Those of "train" or "val"."""
        if split not in self._utterances:
            self._utterances[split] = [utterance for name in self.subsets[split] for utterance in self.subset(name)]
        return self._utterances[split]

    def subset(self, name: str) -> list[Utterance]:
        """Those of one subset."""
        return find_utterances(self.root / name)

    def reader(self) -> Callable[[Utterance], Tensor]:
        """What gives the samples of an utterance, in reading processes too; it raises as read_audio."""
        return partial(_read, self.rate)

    def train_set(self) -> Utterances:
        return self._set("train", self.masks)

    def val_set(self) -> Utterances:
        return self._set("val")

    def train_order(self, dataset: Dataset[Any]) -> ShuffledOrder:
        if self.groups == 1:
            return super().train_order(dataset)
        sizes = np.array([utterance.path.stat().st_size for utterance in self.utterances("train")])
        edges = np.quantile(sizes, np.linspace(0, 1, self.groups + 1)[1:-1])
        return GroupedOrder(np.searchsorted(edges, sizes).tolist(), self.batch_size, self.seed)

    def _set(self, split: str, masks: dict[str, Any] | None = None) -> Utterances:
        speller = Speller(self.class_names, self.preprocessing.tokenizer)
        return Utterances(self.utterances(split), self.reader(), self.preprocessing, speller, masks)

    def _measured(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each band over utterances evenly spread over the training subsets."""
        utterances, read = self.utterances("train"), self.reader()
        picked = sorted({round(place) for place in np.linspace(0, len(utterances) - 1, MEASURED)})
        frames = []
        for place in picked:
            with suppress(CorruptAudioError):  # named when it is met in training
                frames.append(log_mel(read(utterances[place]), self.rate, self.mels))
        if not frames:
            raise ValueError(f"None of the sound files in {self.root} could be read: check them.")
        together = torch.cat(frames).double()
        std = together.std(0).clamp_min(1e-3)
        return tuple(together.mean(0).tolist()), tuple(std.tolist())


class SpeechFolder(LibriSpeech):
    """Every utterance beneath one folder, to evaluate a trained network on, with its tokens and features."""

    def __init__(
        self, root: str, names: list[str], preprocessing: SpeechPreprocessing, batch_size: Count = 16, seed: Seed = 0
    ) -> None:
        super().__init__(root, (), (".",), rate=preprocessing.rate, batch_size=batch_size, seed=seed)
        self.class_names, self.preprocessing = names, preprocessing

    def subset_names(self) -> list[str]:
        """The names of the folder's subsets; none where it is a subset itself, or within one."""
        paths = (utterance.path.relative_to(self.root) for utterance in self.utterances("val"))
        return sorted({path.parts[0] for path in paths if len(path.parts) == 4})
