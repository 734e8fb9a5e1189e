"""Conformer: convolution and attention over the frames of speech, with softmax, linear, MALA or RALA attention.

Papers: *Conformer* (Interspeech 2020, arXiv 2005.08100) and MALA (ICCV 2025, arXiv 2507.00698), whose Table 7 exchanges
the attention of Conformer (S). MALA's network is not released, and the paper does not say what stands around its
operator. All three rows print 10.3 M parameters: a gate φ(x), whose projection has the size of softmax's projection of
positions, gives that, and is what stands here; without it the linear rows would print 10.0.

| name | mel bands | channels | layers | heads | kernel | parameters |
|---|---:|---:|---:|---:|---:|---|
| conformer_nano | 40 | 64 | 3 | 4 | 15 | 0.4 M with 11 pieces |
| conformer_small | 80 | 144 | 16 | 4 | 32 | 10.3 M with 1,024 pieces and the transducer's head |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from linvit.layers.cache import AttentionCache
from linvit.layers.checks import known
from linvit.layers.conformer import SUBSAMPLED, ConformerBlock, Subsampling, relative_positions, subsampled
from linvit.layers.transducer import Joint, Predictor
from linvit.ops import Rotary, rotary_1d
from linvit.ranges import Range

SIZES: Mapping[str, dict[str, int]] = {
    "conformer_nano": {"mels": 40, "width": 64, "depth": 3, "heads": 4, "kernel": 15},
    "conformer_small": {"mels": 80, "width": 144, "depth": 16, "heads": 4, "kernel": 32},
}
HEADS = {"ctc": False, "transducer": True}


@dataclass
class StreamCache:
    """All that a causal Conformer keeps of a stream.

    layers: a cache for each layer. inputs: what each convolution of the subsampling last saw. features, frames: how
    many frames of features it has read, and how many frames of the encoder these became.
    """

    layers: list[AttentionCache] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    features: int = 0
    frames: int = 0

    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(layer.num_bytes() for layer in self.layers) + sum(x.nbytes for x in self.inputs)


class Conformer(nn.Module):
    """Features of speech in, logits of pieces of text out, for every fourth frame.

    Args:
        pieces: number of outputs; piece 0 is the blank.
        mels: bands of the features.
        width, depth, heads, kernel: channels, layers, heads, and frames that a layer's convolution sees.
        mechanism: a name in MECHANISMS that stands in sequences; "softmax" has relative positions.
        causal: no frame sees a later one, so that a stream can be transcribed piece by piece.
        modulation: of linear mechanisms, see FrameAttention.
        rope: whether linear mechanisms rotate queries and keys in the numerator.
        conv_norm: "batch" or "layer", see ConvModule.
        dropout: as in the paper.
        head: "ctc", one projection; or "transducer", predictor and joint network.
        predictor_width: channels of the transducer's predictor and joint network.

    Raises:
        ValueError: for an unknown mechanism, modulation, norm or head, and sizes that do not fit together.
    """

    def __init__(
        self,
        pieces: int,
        mels: int,
        width: int,
        depth: int,
        heads: int,
        kernel: int,
        mechanism: str = "softmax",
        causal: bool = False,
        modulation: str = "linear",
        rope: bool = False,
        conv_norm: str = "batch",
        dropout: Annotated[float, Range(0, below=1)] = 0.1,
        head: str = "ctc",
        predictor_width: int = 320,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        if mechanism == "softmax" and width % 2:
            raise ValueError(f"`width` is {width}, but relative positions need an even one: change it")
        self.pieces, self.mels, self.width, self.mechanism, self.causal = pieces, mels, width, mechanism, causal
        self.rotated = rope and mechanism != "softmax"
        self.head_width = width // heads
        self.subsampling = Subsampling(mels, width, causal, **dd)
        self.dropout = nn.Dropout(dropout)
        options = {"modulation": modulation, "conv_norm": conv_norm, "dropout": dropout}
        self.blocks = nn.ModuleList(
            ConformerBlock(width, heads, mechanism, kernel, causal, **options, **dd) for _ in range(depth)
        )
        self.transduces = known("head", head, HEADS)
        if self.transduces:
            self.predictor = Predictor(pieces, predictor_width, **dd)
            self.joint = Joint(pieces, width, predictor_width, **dd)
        else:
            self.head = nn.Linear(width, pieces, **dd)

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's frames, (batch, frames / 4 rounded up, width), and how many each utterance has.

        Args:
            features: (batch, frames, mels), of each utterance its own frames first.
            lengths: int64 (batch,), its own frames, at least one; what follows them changes nothing.

        Raises:
            ValueError: for features with other bands.
        """
        self._check(features)
        padded = bool((lengths < features.shape[1]).any())
        x = self.dropout(self.subsampling(features, lengths if padded else None))
        lengths = subsampled(lengths)
        valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None] if padded else None
        positions = self._positions(x, 0)
        for block in self.blocks:
            x = block(x, positions, valid)
        return x, lengths

    def forward(self, features: Tensor, lengths: Tensor, pieces: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits, and how many frames of them each utterance has; features and lengths as in `encode`.

        With head "ctc" (batch, frames / 4 rounded up, pieces). With "transducer" (batch, frames, 1 + text, pieces) for
        the text `pieces`, int64 (batch, text).
        """
        x, lengths = self.encode(features, lengths)
        if not self.transduces:
            return self.head(x), lengths
        if pieces is None:
            raise ValueError("A transducer's logits depend on the text: give its pieces, or call encode.")
        begun = torch.cat((pieces.new_zeros(len(pieces), 1), pieces), dim=1)
        return self.joint(x, self.predictor(begun)[0]), lengths

    @torch.inference_mode()
    def transduce(self, features: Tensor, lengths: Tensor, most: int = 10) -> list[list[int]]:
        """The pieces that a transducer writes: the most probable one at each step, at most `most` in a frame."""
        x, lengths = self.encode(features, lengths)
        texts = []
        for row, length in zip(x, lengths.tolist(), strict=True):
            pieces: list[int] = []
            place, held = self.predictor(torch.zeros(1, 1, dtype=torch.long, device=x.device))
            for frame in row[:length]:
                for _ in range(most):
                    piece = int(self.joint(frame[None, None], place).argmax())
                    if piece == 0:
                        break
                    pieces.append(piece)
                    place, held = self.predictor(torch.tensor([[piece]], device=x.device), held)
            texts.append(pieces)
        return texts

    def read(self, features: Tensor, cache: StreamCache) -> Tensor:
        """As forward for CTC, for frames that come after those in `cache`, to which they are added.

        Args:
            features: (batch, frames, mels), a multiple of 4 frames but in the last call.
            cache: `StreamCache()` to begin.

        Raises:
            ValueError: for a network that is not causal or transduces, and frames after a piece of another length.
        """
        self._check(features)
        if not self.causal or self.transduces or self.training:
            raise ValueError("Only a causal Conformer with `head='ctc'`, in evaluation mode, reads a stream.")
        if cache.features % SUBSAMPLED:
            raise ValueError(
                f"{cache.features} frames were read, which is not a multiple of {SUBSAMPLED}: give pieces of a multiple"
                f" of {SUBSAMPLED} frames; only the last may have another length."
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
        if features.dim() != 3 or features.shape[-1] != self.mels:
            raise ValueError(
                f"The features are of shape {tuple(features.shape)}, expected (batch, frames, {self.mels}): make the"
                " features with as many bands as the network's `mels`."
            )
