"""Speech from Hugging Face data sets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from linvit.data.source import load_rows
from linvit.data.speech.audio import CorruptAudioError, read_audio
from linvit.data.speech.librispeech import LibriSpeech, Utterance
from linvit.errors import SettingError


@dataclass(frozen=True)
class HubReader:
    """Reads the samples of the utterance SPLIT/NUMBER at this rate in hertz."""

    splits: Mapping[str, Any]
    sound: str
    rate: int

    def __call__(self, path: Path) -> Tensor:
        """The samples, float32 (samples,); raises as read_audio does."""
        split, number = path.parts
        held = self.splits[split][int(number)][self.sound]
        named = Path((held or {}).get("path") or f"utterance {number} of split {split}")
        if held is None or (held["bytes"] is None and not named.is_file()):
            raise CorruptAudioError(f"Utterance {number} of split {split} has no sound: leave it out.")
        return read_audio(named, self.rate, held["bytes"])


class HuggingFaceSpeech(LibriSpeech):
    """Utterances from a data set that `datasets.load_dataset` reads; soundfile decodes the sound.

    Args:
        path: Name on the Hugging Face hub, which is downloaded, or a local folder or kind of file.
        configuration: Name of the configuration (subset), if there are several.
        train: Splits to train on.
        val: Splits to validate on.
        sound: Column of the sound.
        text: Column of the transcripts.
        options: Further arguments of load_dataset, such as data_files.
        kwargs: Arguments of LibriSpeech, except groups, which is by file size.
    """

    fixed = ("root", "groups")

    def __init__(
        self,
        path: str,
        configuration: str | None = None,
        train: Sequence[str] = ("train",),
        val: Sequence[str] = ("validation",),
        sound: str = "audio",
        text: str = "text",
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, train, val, groups=1, **kwargs)
        self.arguments = {"path": path, "name": configuration, **(options or {})}
        self.sound, self.text = sound, text
        self._splits: dict[str, Any] = {}

    def subset(self, name: str) -> list[Utterance]:
        """The utterances of one split; their paths are SPLIT/NUMBER."""
        utterances = []
        for number, text in enumerate(self._split(name)[self.text]):
            if not isinstance(text, str):
                raise SettingError(
                    f"Utterance {number} of split {name} has {text!r} in the column {self.text!r}, expected its text:"
                    " set `text` to another column, or leave the utterance out."
                )
            utterances.append(Utterance(Path(name) / str(number), " ".join(text.split())))
        return utterances

    def reader(self) -> Callable[[Path], Tensor]:
        names = (*self.subsets["train"], *self.subsets["val"])
        return HubReader({name: self._split(name) for name in names}, self.sound, self.rate)

    def _split(self, name: str) -> Any:
        if name not in self._splits:
            import datasets

            rows = load_rows(self.arguments, name, text=self.text, sound=self.sound)
            self._splits[name] = rows.cast_column(self.sound, datasets.Audio(decode=False))
        return self._splits[name]
