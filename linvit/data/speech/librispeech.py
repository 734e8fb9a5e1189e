"""Speech in LibriSpeech's layout: FOLDER/SPEAKER/CHAPTER/*.trans.txt and the sound files that they name.

Transcripts are words, characters or subwords; "▁" begins a word, and token 0 is the blank.
"""

import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import eq
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from linvit.data.disk import data_folder, files_below, none_usable, read_lines
from linvit.data.order import GroupedOrder, ShuffledOrder
from linvit.data.source import Content, Contents, Source, Workers
from linvit.data.speech.audio import (
    FASTEST,
    HOP,
    SLOWEST,
    CorruptAudioError,
    log_mel,
    read_audio,
    spec_augmented,
    window_samples,
)
from linvit.errors import SettingError, refuse
from linvit.files import explained, user_path
from linvit.layers.conformer import subsampled
from linvit.ranges import Amount, Count, OneOf, Range, Seed, Share

SUFFIXES = (".flac", ".wav", ".sph", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64")
SUBSETS = {"train": ("train",), "val": ("val", "dev")}  # beginnings of their names
MEASURED = 200  # utterances that mean and deviation of the features are computed from
BLANK, START = "<blank>", "▁"
UNITS = ("words", "characters", "subwords")
composed = partial(unicodedata.normalize, "NFC")  # file systems and editors write é in one character or in two
Sample = tuple[Tensor, dict[str, Any]]
Masks = Annotated[int, Range(0, 1000)]

logger = logging.getLogger(__name__)


def tokens_of(texts: Sequence[str], units: str, number: int) -> tuple[list[str], str]:
    """The names of all tokens, the blank first, and the subword tokenizer as JSON ("" for other units).

    Args:
        texts: the training transcripts.
        units: "words", "characters", or "subwords", byte pair encoding learned on the texts.
        number: number of subwords, including the blank.
    """
    words = {word for text in texts for word in text.split()}
    if units == "words":
        return [BLANK, *(START + word for word in sorted(words))], ""
    characters = sorted({START} | {character for word in words for character in word})
    if units == "characters":
        return [BLANK, *characters], ""
    if number <= len(characters):
        raise SettingError(f"`num_tokens` is {number}, but the texts have {len(characters)} characters: set it higher.")
    with explained("Subwords need tokenizers: pip install 'linvit[train,speech]'.", ImportError, ImportError):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=START, prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=number, special_tokens=[BLANK], initial_alphabet=characters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    number_of = tokenizer.get_vocab()
    return sorted(number_of, key=number_of.__getitem__), tokenizer.to_str()


class Speller:
    """Converts text to token numbers.

    Args:
        names: names of all tokens, the blank first.
        tokenizer: the subword tokenizer as JSON, "" for other units.
    """

    def __init__(self, names: Sequence[str], tokenizer: str = "") -> None:
        self.index = {name: number for number, name in enumerate(names)}
        self.tokenizer = None
        if tokenizer:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(tokenizer)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; unknown words or characters are left out."""
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(" ".join(text.split())).ids)
        return [self.index[unit] for unit in self.units(text) if unit in self.index]

    def units(self, text: str) -> list[str]:
        """The words of a text with "▁" before each, or the characters of that; those without a token too."""
        words = [START + word for word in text.split()]
        return [character for word in words for character in word] if START in self.index else words


@dataclass(frozen=True)
class SpeechPreprocessing:
    """From sound to features: `mels` log-mel bands of sound at `rate` hertz, normalized by mean and std per band.

    tokenizer: the subword tokenizer as JSON, "" without subwords. corpus: a description of the data.
    """

    rate: int
    mels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokenizer: str = ""
    corpus: str = ""

    def features(self, samples: Tensor) -> Tensor:
        """From samples, float32 (samples,), to features, float32 (frames, mels)."""
        return (log_mel(samples, self.rate, self.mels) - torch.tensor(self.mean)) / torch.tensor(self.std)


@dataclass(frozen=True)
class Utterance:
    """A sound file and its transcript."""

    path: Path
    text: str


def find_utterances(folder: Path) -> list[Utterance]:
    """All utterances below a folder, in the order of the transcript files' paths and of their lines."""
    data_folder(folder, "one in LibriSpeech's layout, or create one with make_speech")
    utterances = []
    for listed in files_below(folder, (".txt",)):
        if listed.name.endswith(".trans.txt"):
            sounds = [path for path in files_below(listed.parent, SUFFIXES) if path.parent == listed.parent]
            words = map(str.split, read_lines(listed))
            utterances += with_sounds(listed, [(name, " ".join(text)) for name, *text in words], sounds)
    if not utterances:
        raise ValueError(f"{folder} has no transcripts: expected SPEAKER/CHAPTER/*.trans.txt, as in LibriSpeech.")
    return utterances


def with_sounds(listed: Path, lines: Sequence[tuple[str, str]], sounds: Iterable[Path]) -> list[Utterance]:
    """The utterances of a file of transcripts, whose lines are the name of a sound file without ending, and a text."""
    by_name: dict[str, list[Path]] = {}
    for path in sounds:
        by_name.setdefault(composed(path.stem), []).append(path)
    times = Counter(composed(name) for name, _ in lines)
    utterances = []
    for name, text in lines:
        files = by_name.get(composed(name), [])
        refuse(
            times[composed(name)] > 1 and f"{listed} has two lines for the utterance {name!r}: remove one of them.",
            not files
            and (
                f"{listed} names the utterance {name!r}, but there is no {name}{' or '.join(SUFFIXES[:3])} …: add the"
                " file or remove the line."
            ),
            len(files) > 1 and f"{' has the name of '.join(map(str, files[:2]))}: remove one of them.",
        )
        utterances.append(Utterance(files[0], text))
    return utterances


def _utterance_content(rate: int, speller: Speller | None, utterance: Utterance) -> Content | str:
    try:
        samples = len(read_audio(utterance.path, rate))
    except CorruptAudioError as error:
        return str(error)
    tokens = speller(utterance.text) if speller else []
    needed = len(tokens) + sum(map(eq, tokens, tokens[1:]))  # a blank between equal ones
    frames = int(subsampled(torch.tensor(max(0, (samples - window_samples(rate)) // round(HOP * rate) + 1))))
    if needed > frames:
        return (
            f"{utterance.path} has {len(tokens)} tokens, for which CTC needs {needed} frames of the encoder, but only"
            f" {frames}: check its transcript, or use larger units or a transducer."
        )
    return Content((samples / rate,), others={"words": len(utterance.text.split())})


@dataclass(eq=False)
class Utterances(Dataset[Sample | str]):
    """(features, {"tokens", "text", "path"}) of each utterance; a sentence that names the file if it is unreadable.

    read: returns the samples of a sound file. masks: arguments of spec_augmented, for training.
    """

    utterances: Sequence[Utterance]
    read: Callable[[Path], Tensor]
    preprocessing: SpeechPreprocessing
    speller: Speller
    masks: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Sample | str:
        utterance = self.utterances[index]
        try:
            features = self.preprocessing.features(self.read(utterance.path))
        except CorruptAudioError as error:
            return str(error)
        if self.masks:
            features = spec_augmented(features, **self.masks)
        tokens = torch.tensor(self.speller(utterance.text))
        return features, {"tokens": tokens, "text": utterance.text, "path": utterance.path}


def assembled(samples: list[Sample]) -> tuple[Tensor, dict[str, Any]]:
    """Features padded to (batch, frames, mels); tokens padded to (batch, text), lengths of both, texts and paths."""
    features, targets = [sample[0] for sample in samples], [sample[1] for sample in samples]
    tokens = [target["tokens"].long() for target in targets]
    return pad_sequence(features, batch_first=True), {
        "lengths": torch.tensor(list(map(len, features))),
        "tokens": pad_sequence(tokens, batch_first=True),
        "counts": torch.tensor(list(map(len, tokens))),
        "texts": [target["text"] for target in targets],
        "paths": [target["path"] for target in targets],
    }


class LibriSpeech(Source):
    """Utterances in LibriSpeech's layout: flac, wav, sph, mp3, ogg and others.

    Args:
        root: Folder of the subsets.
        train: Subsets to train on.
        val: Subsets to validate on.
        units: Output units of the network: words, characters, or subwords (byte pair encoding learned on the training
            transcripts).
        num_tokens: Number of subwords, including the blank.
        rate: Sampling rate in hertz; sound at another rate is resampled.
        mels: Number of mel bands.
        batch_size: Utterances per batch.
        groups: Number of groups by file size; a batch has utterances of one group. 1 mixes all.
        bands: Number of frequency masks in training.
        band_width: Largest width of a frequency mask, in bands.
        times: Number of time masks in training.
        time_share: Largest length of a time mask, as a share of the utterance.
        max_corrupt: Number of unreadable sound files that may be left out.
        seed: Seed of order and masks.
        num_workers: Processes that read sound.
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
        rate: Annotated[int, Range(SLOWEST, FASTEST)] = 16_000,
        mels: Annotated[int, Range(1, 1024)] = 80,
        batch_size: Count = 16,
        groups: Annotated[int, Range(1, 1000)] = 1,
        bands: Masks = 2,
        band_width: Amount = 27,
        times: Masks = 10,
        time_share: Share = 0.05,
        max_corrupt: Amount = 0,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, max_corrupt)
        self.root, self.subsets = user_path(root), {"train": tuple(train), "val": tuple(val)}
        self.units, self.num_tokens, self.rate, self.mels, self.groups = units, num_tokens, rate, mels, groups
        self.masks = {"bands": bands, "band_width": band_width, "times": times, "time_share": time_share}
        self._utterances: dict[str, list[Utterance]] = {}
        self._tokenizer = ""

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """The names of the tokens, the blank first; those of the training transcripts unless others are assigned."""
        texts = [utterance.text for utterance in self.utterances("train")]
        names, self._tokenizer = tokens_of(texts, self.units, self.num_tokens)
        return names

    @cached_property
    def preprocessing(self) -> SpeechPreprocessing:
        """Features normalized by statistics of up to MEASURED training utterances, unless another one is assigned."""
        names = self.class_names  # makes the tokenizer too
        mean, std = self._measured()
        corpus = f"{self.root.name}: {', '.join(self.subsets['train'])}, {len(names) - 1} {self.units}"
        return SpeechPreprocessing(self.rate, self.mels, mean, std, self._tokenizer, corpus)

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        subsets = sorted(path.parts[-4] for path in root.glob("[!.]*/*/*/*.trans.txt"))
        if not subsets:
            return None
        about: dict[str, Any] = {"name": "librispeech", "root": str(root)}
        for split, usual in SUBSETS.items():
            names = [name for name in dict.fromkeys(subsets) if name.startswith(usual)]
            about |= {split: names} if names and names != [split] else {}
        return about

    def contents(self, split: str) -> Contents:
        speller = None
        with suppress(ValueError):  # which the training data report
            speller = Speller(self.class_names, self._tokenizer)
        return Contents(self.utterances(split), partial(_utterance_content, self.rate, speller))

    def utterances(self, split: str) -> list[Utterance]:
        """The utterances of "train" or "val"."""
        if split not in self._utterances:
            self._utterances[split] = [utterance for name in self.subsets[split] for utterance in self.subset(name)]
        return self._utterances[split]

    def subset(self, name: str) -> list[Utterance]:
        """The utterances of one subset."""
        return find_utterances(self.root / name)

    @staticmethod
    def speaker(path: Path) -> str:
        """The speaker of a sound file: the folder above the chapter's, or for shorter paths the first folder."""
        folders = path.parts[:-1]
        return folders[-2:][0] if folders else "–"

    def reader(self) -> Callable[[Path], Tensor]:
        """A picklable function that returns the samples of a sound file and raises as read_audio does."""
        return partial(read_audio, rate=self.rate)

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
        speller, utterances = Speller(self.class_names, self.preprocessing.tokenizer), self.utterances(split)
        if utterances and not any(utterance.text for utterance in utterances):
            raise ValueError(f"The {len(utterances)} transcripts of {self.root} have no words: check their files.")
        units = (unit for utterance in utterances for unit in speller.units(utterance.text))
        if unknown := Counter(unit.removeprefix(START) for unit in units if unit not in speller.index):
            often = ", ".join(repr(unit) for unit, _ in unknown.most_common(3))
            about = f"{unknown.total():,} words or characters of the transcripts of {self.root} have no token"
            logger.warning("%s and count as errors, most often %s.", about, often)
        return Utterances(utterances, self.reader(), self.preprocessing, speller, masks)

    def _measured(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation per band over utterances that are evenly spread over the training subsets."""
        utterances, read = self.utterances("train"), self.reader()
        picked = sorted({round(place) for place in np.linspace(0, len(utterances) - 1, MEASURED)})
        frames, complaints = [], []
        for place in picked:
            try:
                frames.append(log_mel(read(utterances[place].path), self.rate, self.mels))
            except CorruptAudioError as error:  # reported when training reads it, unless all of them are corrupt
                complaints.append(str(error))
        if not frames:
            raise none_usable(complaints, "sound file")
        together = torch.cat(frames).double()
        std = together.std(0).clamp_min(1e-3)
        return tuple(together.mean(0).tolist()), tuple(std.tolist())


class SpeechFolder(LibriSpeech):
    """All utterances below one folder, with the tokens and features of a trained network, to evaluate it."""

    def __init__(
        self, root: str, names: list[str], preprocessing: SpeechPreprocessing, batch_size: Count = 16, seed: Seed = 0
    ) -> None:
        super().__init__(root, (), (".",), rate=preprocessing.rate, batch_size=batch_size, seed=seed)
        self.class_names, self.preprocessing = names, preprocessing

    def subset_names(self) -> list[str]:
        """The names of the folder's subsets; empty if it is a subset itself or lies within one."""
        paths = (utterance.path.relative_to(self.root) for utterance in self.utterances("val"))
        return sorted({path.parts[0] for path in paths if len(path.parts) == 4})
