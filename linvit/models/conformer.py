"""Conformer: convolution and attention over frames of speech, with softmax, linear, MALA or RALA attention.

Papers: *Conformer* (Interspeech 2020, arXiv 2005.08100) and MALA (ICCV 2025, arXiv 2507.00698), whose Table 7 replaces
the attention of Conformer (S). MALA's network is not released, and the paper does not describe the layer around its
operator. All three rows have as many parameters as conformer_small. A gate φ(x), whose projection is as large as
softmax attention's projection of positions, leads to this number, so we use one; without it the linear rows would have
10.0 M.

| name | mel bands | channels | layers | heads | kernel | parameters |
|---|---:|---:|---:|---:|---:|---|
| conformer_nano | 40 | 64 | 3 | 4 | 15 | 0.4 M with 11 tokens |
| conformer_small | 80 | 144 | 16 | 4 | 32 | 10.3 M with 1,024 tokens and the transducer's head |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linvit.arguments import is_traced
from linvit.errors import SettingError, refuse
from linvit.layers.cache import AttentionCache
from linvit.layers.checks import (
    Depth,
    Device,
    Dtype,
    Rate,
    TensorOptions,
    check_filled,
    check_floats,
    check_turns,
    check_whole_numbers,
    multiple_of_heads,
)
from linvit.layers.conformer import (
    SUBSAMPLED,
    ConformerBlock,
    Joint,
    Predictor,
    Subsampling,
    relative_positions,
    subsampled,
)
from linvit.ops import Rotary, rotary_1d
from linvit.ranges import Checked, Count, lookup

SIZES: Mapping[str, dict[str, int]] = {
    "conformer_nano": {"mels": 40, "width": 64, "depth": 3, "heads": 4, "kernel": 15},
    "conformer_small": {"mels": 80, "width": 144, "depth": 16, "heads": 4, "kernel": 32},
}
HEADS = {"ctc": False, "transducer": True}


@dataclass
class StreamCache:
    """All that a causal Conformer keeps of a stream.

    layers: one cache per layer. inputs: the last inputs of each convolution of the subsampling. features: number of
    feature frames read so far. frames: number of encoder frames made of them.
    """

    layers: list[AttentionCache] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    features: int = 0
    frames: int = 0

    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(layer.num_bytes() for layer in self.layers) + sum(x.nbytes for x in self.inputs)


class Conformer(Checked, nn.Module):
    """Features of speech in, logits of tokens out, one frame for every four.

    Args:
        tokens: number of outputs; token 0 is the blank.
        mels: mel bands of the features.
        width, depth, heads, kernel: channels, layers, heads, and kernel size in frames of the convolutions.
        mechanism: a name in MECHANISMS that can be used for sequences; "softmax" has relative positions.
        causal: no frame sees a later one, so that a stream can be transcribed piece by piece.
        modulation: gate of linear mechanisms, see FrameAttention.
        rope: linear mechanisms rotate queries and keys in the numerator.
        conv_norm: "batch" or "layer", see ConvModule.
        dropout: rate, used as in the paper.
        head: "ctc", one projection; or "transducer", predictor and joint network.
        predictor_width: channels of the transducer's predictor and joint network.

    Raises ValueError for an argument outside its range, and for sizes that do not fit together.
    """

    predictor: Predictor
    joint: Joint
    head: nn.Linear

    def __init__(
        self,
        tokens: Count,
        mels: Count,
        width: Count,
        depth: Depth,
        heads: Count,
        kernel: Count,
        mechanism: str = "softmax",
        causal: bool = False,
        modulation: str = "linear",
        rope: bool = False,
        conv_norm: str = "batch",
        dropout: Rate = 0.1,
        head: str = "ctc",
        predictor_width: Count = 320,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        dd: TensorOptions = {"device": device, "dtype": dtype}
        if mechanism == "softmax" and width % 2:
            raise SettingError(f"`width` is {width}, but relative positions need an even number: change it")
        self.tokens, self.mels, self.width, self.mechanism, self.causal = tokens, mels, width, mechanism, causal
        self.rotated = rope and mechanism != "softmax"
        self.head_width = multiple_of_heads(width, heads)
        if self.rotated:
            check_turns(self.head_width)
        self.subsampling = Subsampling(mels, width, causal, **dd)
        self.dropout = nn.Dropout(dropout)
        options: dict[str, Any] = {"modulation": modulation, "conv_norm": conv_norm, "dropout": dropout}
        self.blocks = nn.ModuleList(
            ConformerBlock(width, heads, mechanism, kernel, causal, **options, **dd) for _ in range(depth)
        )
        self.transduces = lookup("head", head, HEADS)
        if self.transduces:
            self.predictor = Predictor(tokens, predictor_width, **dd)
            self.joint = Joint(tokens, width, predictor_width, **dd)
        else:
            self.head = nn.Linear(width, tokens, **dd)

    def encode(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The frames of the encoder, (batch, frames / 4 rounded up, width), and their number for each utterance.

        Args:
            features: (batch, frames, mels), floating point; the frames of each utterance first, then padding.
            lengths: int64 (batch,), the number of frames of each utterance, at least 1; padding has no effect. None if
                there is no padding.

        Raises TypeError or ValueError for features or lengths of the wrong type, shape or range.
        """
        self._check(features)
        padded = lengths is not None
        if lengths is None:
            lengths = torch.full((features.shape[0],), features.shape[1], device=features.device)
        else:
            check_whole_numbers("lengths", lengths, (len(features),), 1, features.shape[1])
            padded = is_traced() or bool((lengths < features.shape[1]).any())  # no value decides what a graph has
        x = self.dropout(self.subsampling(features, lengths if padded else None))
        lengths = subsampled(lengths)
        valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None] if padded else None
        positions = self._positions(x, 0)
        for block in self.blocks:
            x = block(x, positions, valid)
        return x, lengths

    def forward(
        self, features: Tensor, lengths: Tensor | None = None, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits, and the number of their frames for each utterance; features and lengths as in `encode`.

        Logits are (batch, frames / 4 rounded up, tokens) with head "ctc", and (batch, frames, 1 + text, tokens) with
        head "transducer" for the text `tokens`, int64 (batch, text).
        """
        x, lengths = self.encode(features, lengths)
        if not self.transduces:
            return self.head(x), lengths
        if tokens is None:
            raise SettingError("The logits of a transducer depend on the text: pass its `tokens`, or call `encode`.")
        check_whole_numbers("tokens", tokens, (len(features), "text"), 0, self.tokens - 1)
        begun = torch.cat((tokens.new_zeros(len(tokens), 1), tokens), dim=1)
        return self.joint(x, self.predictor(begun)[0]), lengths

    @torch.inference_mode()
    def transduce(self, features: Tensor, lengths: Tensor, most: int = 10) -> list[list[int]]:
        """The texts of a transducer by greedy decoding, with at most `most` tokens per frame, as lists of tokens."""
        x, lengths = self.encode(features, lengths)
        texts = []
        for row, length in zip(x, lengths.tolist(), strict=True):
            tokens: list[int] = []
            place, held = self.predictor(torch.zeros(1, 1, dtype=torch.long, device=x.device))
            for frame in row[:length]:
                for _ in range(most):
                    token = int(self.joint(frame[None, None], place).argmax())
                    if token == 0:
                        break
                    tokens.append(token)
                    place, held = self.predictor(torch.tensor([[token]], device=x.device), held)
            texts.append(tokens)
        return texts

    def read(self, features: Tensor, cache: StreamCache) -> Tensor:
        """As forward with head "ctc", for the frames after those in `cache`, which is updated.

        Args:
            features: (batch, frames, mels), a multiple of 4 frames except in the last call.
            cache: `StreamCache()` at the start.

        Raises ValueError for a network that is not causal or is a transducer, and for a call after the last one.
        """
        self._check(features)
        refuse(
            (not self.causal or self.transduces or self.training)
            and "Only a causal Conformer with `head='ctc'`, in evaluation mode, can read a stream.",
            cache.features % SUBSAMPLED
            and f"{cache.features} frames were read, which is not a multiple of {SUBSAMPLED}: pass a multiple of"
            f" {SUBSAMPLED} frames in every call except the last.",
        )
        if not cache.layers:
            cache.layers = [AttentionCache() for _ in self.blocks]
        x = self.subsampling(features, None, cache.inputs)
        positions = self._positions(x, cache.frames)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, positions, None, layer)
        cache.features += features.shape[1]
        cache.frames += x.shape[1]
        return self.head(x)

    def _positions(self, x: Tensor, start: int) -> Tensor | Rotary | None:
        frames = x.shape[1]
        if self.mechanism == "softmax":
            return relative_positions(start + frames - 1, 1 - frames, self.width, x)
        if not self.rotated:
            return None
        return rotary_1d(frames, self.head_width, start=start, dtype=x.dtype, device=x.device)

    def _check(self, features: Tensor) -> None:
        remedy = "compute features with the network's `mels` bands"
        check_floats("features", features, ("batch", "frames", self.mels), remedy)
        check_filled("features", features)
