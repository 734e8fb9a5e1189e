"""Speech in AN4's layout: etc/*_{train,test}.transcription and sound files, as CMU Sphinx trains from."""

import re
from pathlib import Path
from typing import Any

from linvit.data.disk import data_folder, files_below, read_lines
from linvit.data.source import of_split
from linvit.data.speech.librispeech import SUFFIXES, LibriSpeech, Utterance, with_sounds
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
        chosen = of_split(speakers, split, self.held_out, seed=0)
        return [utterance for utterance in utterances if self.speaker(utterance.path) in chosen]

    def subset(self, name: str) -> list[Utterance]:
        """The utterances of "train" or "test"."""
        data_folder(self.root, "one in AN4's layout")
        ending = ENDING.format(name)
        listed = [path for path in files_below(self.root, (".transcription",)) if path.name.endswith(ending)]
        if len(listed) != 1:
            raise ValueError(f"{self.root} has {len(listed)} files named *{ending}, expected one: see AN4's layout.")
        best: dict[Path, Path] = {}  # of several endings in a folder
        for path in sorted(files_below(self.root, SUFFIXES), key=lambda path: path.suffix.lower() != ".sph"):
            best.setdefault(path.with_suffix(""), path)
        pairs = []
        for line in read_lines(listed[0]):
            parts = LINE.fullmatch(line)
            if parts is None:
                raise SettingError(
                    f"{listed[0]} has the line {line[:60]!r}, expected a text and a name in parentheses, as in"
                    " `GO (an253-fash-b)`: correct it."
                )
            words = [VARIANT.sub("", word) for word in parts["text"].split() if not FILLER.fullmatch(word)]
            pairs.append((parts["name"], " ".join(words)))
        if not pairs:
            raise SettingError(f"{listed[0]} has no transcripts: add lines such as `GO (an253-fash-b)`.")
        return with_sounds(listed[0], pairs, best.values())

    @staticmethod
    def speaker(path: Path) -> str:
        return path.parent.name
