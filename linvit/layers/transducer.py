"""The two parts of a transducer besides its encoder: predictor and joint network.

Source: *Sequence Transduction with Recurrent Neural Networks* (arXiv 1211.3711), with the sizes of Conformer.
"""

import torch
from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype, TensorOptions


class Predictor(nn.Module):
    """An embedding and an LSTM over the pieces so far; the sequence starts with the blank, piece 0."""

    def __init__(self, pieces: int, width: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(pieces, width, device=device, dtype=dtype)
        self.lstm = nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype)

    def forward(
        self, pieces: Tensor, before: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """int64 (batch, pieces) to (batch, pieces, width), and the state of the LSTM for the next call."""
        states: tuple[Tensor, tuple[Tensor, Tensor]] = self.lstm(self.embed(pieces), before)
        return states


class Joint(nn.Module):
    """Logits of every piece for each frame and each place in the text: a layer on the tanh of the sum of both."""

    def __init__(self, pieces: int, frame_width: int, width: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        dd: TensorOptions = {"device": device, "dtype": dtype}
        self.frame = nn.Linear(frame_width, width, **dd)
        self.place = nn.Linear(width, width, **dd)
        self.head = nn.Linear(width, pieces, **dd)

    def forward(self, frames: Tensor, places: Tensor) -> Tensor:
        """(batch, frames, frame width), (batch, places, width) → (batch, frames, places, pieces)."""
        logits: Tensor = self.head(torch.tanh(self.frame(frames).unsqueeze(2) + self.place(places).unsqueeze(1)))
        return logits
