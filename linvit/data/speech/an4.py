"""Speech in AN4's layout: etc/*_{train,test}.transcription and sound files, as CMU Sphinx trains from."""

import re
from pathlib import Path
from typing import Any

from linvit.data.disk import files_below, read_text
from linvit.data.source import held_out_of
from linvit.data.speech.librispeech import SUFFIXES, LibriSpeech, Utterance, composed
from linvit.errors import SettingError
from linvit.ranges import Share

ENDING = "_{}.transcription"
LINE = re.compile(r"(?P<text>.*?)\s*\((?P<name>[^\s()]+)\)\s*")
FILLER = re.compile(r"<\S*>|\+\+\S+\+\+")  # silence, and sounds that are not words
VARIANT = re.compile(r"(?<=\S)\(\d+\)$")  # the number of a word's pronunciation


class AN4(LibriSpeech):
    """Utterances in the layout of AN4, with sound in NIST's SPHERE format (.sph), flac or wav.

    Lines of `etc/*_train.transcription` and `etc/*_test.transcription` are a text and the name of its sound file in
    parentheses, `<s> ENTER SIX </s> (an8-fash-b)`. Sound files are found by name at any depth, in one folder per
    speaker. Of several endings, .sph is read.

    Args:
        root: Folder of the data set.
        held_out: Share of the training speakers to validate on instead of the test utterances, chosen by a hash of
            their names. Tune settings with 0.1, for example, then train with 0.
        kwargs: Arguments of LibriSpeech.
    """

    fixed = ("train", "val")

    def __init__(self, root: str, held_out: Share = 0.0, **kwargs: Any) -> None:
        super().__init__(root, ("train",), ("test",), **kwargs)
        self.held_out = held_out

    @classmethod
    def found_in(cls, root: str | Path) -> dict[str, Any] | None:
        """The settings that read this folder, or None if it has no training transcripts in this layout."""
        named = [path.name for path in files_below(Path(root), (".transcription",))]
        is_an4 = any(name.endswith(ENDING.format("train")) for name in named)
        return {"name": "an4", "root": str(root)} if is_an4 else None

    def utterances(self, split: str) -> list[Utterance]:
        if not self.held_out:
            return super().utterances(split)
        utterances = super().utterances("train")
        speakers = sorted({self.speaker(utterance.path) for utterance in utterances})
        if len(speakers) < 2:
            raise SettingError(f"{self.root} has one training speaker, none can be held out: set `held_out` to 0.")
        held_out = held_out_of(speakers, self.held_out, split=0)
        return [utterance for utterance in utterances if (self.speaker(utterance.path) in held_out) == (split == "val")]

    def subset(self, name: str) -> list[Utterance]:
        """The utterances of "train" or "test"."""
        if not self.root.is_dir():
            raise SettingError(f"The speech folder {self.root} does not exist: set `root` to one in AN4's layout.")
        ending = ENDING.format(name)
        listed = [path for path in files_below(self.root, (".transcription",)) if path.name.endswith(ending)]
        if len(listed) != 1:
            raise ValueError(f"{self.root} has {len(listed)} files named *{ending}, expected one: see AN4's layout.")
        best: dict[Path, Path] = {}  # of several endings in a folder
        for path in sorted(files_below(self.root, SUFFIXES), key=lambda path: path.suffix.lower() != ".sph"):
            best.setdefault(path.with_suffix(""), path)
        sounds: dict[str, list[Path]] = {}
        for path in best.values():
            sounds.setdefault(composed(path.stem), []).append(path)
        texts: dict[str, str] = {}
        for line in filter(str.strip, read_text(listed[0]).split("\n")):
            parts = LINE.fullmatch(line)
            if parts is None:
                raise ValueError(
                    f"{listed[0]} has the line {line[:60]!r}, expected a text and a name in parentheses, as in"
                    " `GO (an253-fash-b)`: correct it."
                )
            stem = composed(parts["name"])
            if stem in texts:
                raise ValueError(f"{listed[0]} has two lines for the utterance {stem!r}: remove one of them.")
            if not sounds.get(stem):
                raise ValueError(
                    f"{listed[0]} names the utterance {stem!r}, but {self.root} has no"
                    f" {stem}{' or '.join(SUFFIXES[:3])} …: add the file or remove the line."
                )
            if len(sounds[stem]) > 1:
                raise ValueError(f"{sounds[stem][1]} has the name of {sounds[stem][0]}: remove one of them.")
            words = [VARIANT.sub("", word) for word in parts["text"].split() if not FILLER.fullmatch(word)]
            texts[stem] = " ".join(words)
        if not texts:
            raise ValueError(f"{listed[0]} has no transcripts: add lines such as `GO (an253-fash-b)`.")
        return [Utterance(sounds[stem][0], text) for stem, text in texts.items()]

    @staticmethod
    def speaker(path: Path) -> str:
        return path.parent.name
