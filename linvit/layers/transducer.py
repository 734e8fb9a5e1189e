"""The two parts of a transducer beside its encoder: what predicts from the pieces so far, and what joins both.

Source: *Sequence Transduction with Recurrent Neural Networks* (arXiv 1211.3711), with the sizes of Conformer.
"""

import torch
from torch import Tensor, nn


class Predictor(nn.Module):
    """An embedding and an LSTM over the pieces so far; piece 0, the blank, begins."""

    def __init__(self, pieces: int, width: int, device=None, dtype=None):
        super().__init__()
        self.embed = nn.Embedding(pieces, width, device=device, dtype=dtype)
        self.lstm = nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype)

    def forward(
        self, pieces: Tensor, before: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """int64 (batch, pieces) to (batch, pieces, width), and what to go on from."""
        return self.lstm(self.embed(pieces), before)


class Joint(nn.Module):
    """Logits of every piece for each pair of a frame and a place among the pieces: a tanh of the sum of both."""

    def __init__(self, pieces: int, frame_width: int, width: int, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.frame = nn.Linear(frame_width, width, **dd)
        self.place = nn.Linear(width, width, **dd)
        self.head = nn.Linear(width, pieces, **dd)

    def forward(self, frames: Tensor, places: Tensor) -> Tensor:
        """(batch, frames, frame width), (batch, places, width) → (batch, frames, places, pieces)."""
        return self.head(torch.tanh(self.frame(frames).unsqueeze(2) + self.place(places).unsqueeze(1)))
