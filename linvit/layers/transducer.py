"""The two parts of a transducer besides its encoder: predictor and joint network.

Source: *Sequence Transduction with Recurrent Neural Networks* (arXiv 1211.3711), with the sizes of Conformer.
"""

import torch
from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype, TensorOptions


class Predictor(nn.Module):
    """An embedding and an LSTM over the tokens so far; the sequence starts with the blank, token 0."""

    def __init__(self, tokens: int, width: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width, device=device, dtype=dtype)
        self.lstm = nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype)

    def forward(
        self, tokens: Tensor, before: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """int64 (batch, tokens) to (batch, tokens, width), and the state of the LSTM for the next call."""
        with torch.autocast("cpu", enabled=False):  # oneDNN has no bfloat16 LSTM for CPUs without AVX-512
            states: tuple[Tensor, tuple[Tensor, Tensor]] = self.lstm(self.embed(tokens), before)
        return states


class Joint(nn.Module):
    """Logits of every token for each frame and each place in the text: a layer on the tanh of the sum of both."""

    def __init__(self, tokens: int, frame_width: int, width: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        dd: TensorOptions = {"device": device, "dtype": dtype}
        self.frame = nn.Linear(frame_width, width, **dd)
        self.place = nn.Linear(width, width, **dd)
        self.head = nn.Linear(width, tokens, **dd)

    def forward(self, frames: Tensor, places: Tensor) -> Tensor:
        """(batch, frames, frame width), (batch, places, width) → (batch, frames, places, tokens)."""
        logits: Tensor = self.head(torch.tanh(self.frame(frames).unsqueeze(2) + self.place(places).unsqueeze(1)))
        return logits
