"""`linvit predict RUN FILE --stream SECONDS`: what is said, as it is heard, by a causal network with carried state."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from linvit.data.speech.audio import HOP, read_audio, window_samples
from linvit.layers.conformer import SUBSAMPLED
from linvit.models.conformer import StreamCache
from linvit.runs.predict import ready_network
from linvit.runs.restore import Restored
from linvit.tasks.transcription import BLANK, spelled


class Listener:
    """Hears samples as they come and writes what is said; at the end the text is that of the whole at once.

    Args:
        restored: a causal network with CTC.
        weights: "raw" or "ema"; by default the moving average where there is one.

    Raises:
        ValueError: for a network that is not causal, or transduces.
    """

    def __init__(self, restored: Restored, weights: str | None = None) -> None:
        self.network, self.device = ready_network(restored, weights)
        if not self.network.causal or self.network.transduces:
            raise ValueError(
                f"{restored.path} hears whole utterances: only a network trained with model.causal=true and head ctc"
                " hears a stream."
            )
        self.preprocessing, self.names = restored.preprocessing, restored.class_names
        self.memory = StreamCache()
        self.pieces: list[int] = []
        self._waiting = torch.zeros(0)
        self._last = BLANK

    @property
    def text(self) -> str:
        """What was written so far."""
        return spelled(self.pieces, self.names)

    def hear(self, samples: Tensor, ends: bool = False) -> str:
        """The text so far, with these samples, float32 (samples,) at the network's rate; `ends` where no more come."""
        self._waiting = torch.cat((self._waiting, samples))
        hop, window = round(HOP * self.preprocessing.rate), window_samples(self.preprocessing.rate)
        frames = max(0, 1 + (len(self._waiting) - window) // hop)
        frames = frames if ends else frames // SUBSAMPLED * SUBSAMPLED
        if frames:
            self._read(self.preprocessing.features(self._waiting[: (frames - 1) * hop + window]))
            self._waiting = self._waiting[frames * hop :]
        return self.text

    @torch.inference_mode()
    def _read(self, features: Tensor) -> None:
        for piece in self.network.read(features[None].to(self.device), self.memory)[0].argmax(-1).tolist():
            if piece not in (BLANK, self._last):
                self.pieces.append(piece)
            self._last = piece


def listen(restored: Restored, path: str | Path, seconds: float, weights: str | None = None) -> Iterator[str]:
    """The text so far after every so many seconds of a sound file; raises as Listener and read_audio."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"--stream is {seconds}, but a piece of sound takes time and ends: set it above 0.")
    listener = Listener(restored, weights)
    rate = restored.preprocessing.rate
    pieces = read_audio(path, rate).split(max(1, round(seconds * rate)))
    for number, piece in enumerate(pieces, 1):
        yield listener.hear(piece, ends=number == len(pieces))
