"""The settings of `linvit bench` and their defaults, from which the command line makes its flags, without torch."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from linvit.ranges import Amount, Checked, Count, OneOf, Range, Seed

CORES = os.cpu_count() or 1
Threads = Annotated[int, Range(1, CORES, because="that is how many cores this machine has")]
Device = Annotated[str, OneOf(("cpu", "cuda"))]
Size = tuple[Count, Count]  # (height, width) in pixels
Batch = Annotated[int, Range(2, because="batch norms need two")]

OURS = ("ravlt_tiny", "mavit_tiny", "care_s0")
PEERS = (
    "swin_tiny_patch4_window7_224",
    "deit_small_patch16_224",
    "convnext_tiny",
    "efficientvit_b1",
    "fastvit_t8",
    "mobilenetv4_conv_medium",
)
BYTES_PER_PIXEL = 64  # at least: float32 images, and 32 channels at half the resolution, which the next layer reads


@dataclass(frozen=True)
class Options(Checked):
    """Options of every kind of benchmark.

    seconds: time budget for all rounds of one size, None for no limit; at least three rounds are always made.
    """

    device: Device = "cpu"
    threads: Threads = 1
    rounds: Count = 7
    seconds: Annotated[float, Range(above=0)] | None = None
    memory: bool = False
    seed: Seed = 0

    def least_bytes(self) -> int:
        """A lower bound of the memory of the largest case, in bytes."""
        return 0


@dataclass(frozen=True)
class OperatorOptions(Options):
    """Options of `linvit bench op`; sdpa_tokens is the largest number of tokens for softmax attention."""

    operators: Sequence[str] = ("rala", "mala", "linear")
    variants: Sequence[str] = ("plain", "reference", "sdpa")
    dtypes: Sequence[str] = ("float32",)
    tokens: Sequence[Count] = (49, 196, 784, 3136, 12544, 50176)
    batch: Count = 1
    heads: Count = 4
    width: Count = 64
    backward: bool = False
    layout: str = "heads"
    sdpa_tokens: Amount = 12544
    rounds: Count = 9

    def least_bytes(self) -> int:
        """Inputs and output in float64, against which results are checked."""
        return 4 * 8 * self.batch * self.heads * max(self.tokens, default=0) * self.width


@dataclass(frozen=True)
class NetworkOptions(Options):
    """Options of `linvit bench model`.

    variants: of every network, and exported files, each timed once. framework: of segmentors, whose backbones the
    networks are.
    """

    names: Sequence[str] = OURS
    variants: Sequence[str] = ("plain", "reference", "fused")
    peers: Sequence[str] = PEERS
    peer_variants: Sequence[str] = ("plain", "fused")
    sizes: Sequence[Size] = ((224, 224),)
    batches: Sequence[Count] = (1,)
    framework: str | None = None

    def least_bytes(self) -> int:
        """The bytes of the images and of a network's first maps."""
        pixels = max((math.prod(size) for size in self.sizes), default=0)
        return BYTES_PER_PIXEL * pixels * max(self.batches, default=0)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of `linvit bench train`."""

    names: Sequence[str] = OURS
    variants: Sequence[str] = ("plain", "reference", "channels_last", "bf16", "checkpointing")
    size: Size = (224, 224)
    batch: Batch = 4
    rounds: Count = 3

    def least_bytes(self) -> int:
        """The bytes of the images, of a network's first maps and of their gradients."""
        return 2 * BYTES_PER_PIXEL * self.batch * math.prod(self.size)
