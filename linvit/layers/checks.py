"""The values that arguments of layers and networks can have, as annotations.

The constructors are checked by `linvit.ranges.Checked`, before any memory is allocated: the upper limits are far above
every published network, so that a typing error does not fill the memory.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch

from linvit.arguments import FLOATS
from linvit.ranges import Range, Rule


@dataclass(frozen=True)
class IsDevice(Rule):
    """A device of torch; a GPU must exist."""

    def holds(self, value: Any) -> bool:
        try:
            device = torch.device("cpu" if value is None else value)
        except (RuntimeError, TypeError, ValueError):
            return False
        there = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
        return there and not isinstance(value, bool)

    def words(self, noun: str, got: Any = None) -> str:
        return "a device that exists here, such as cpu or cuda:0"


@dataclass(frozen=True)
class IsFloatingPoint(Rule):
    """A dtype for weights."""

    def holds(self, value: Any) -> bool:
        return value is None or (isinstance(value, torch.dtype) and value in FLOATS)

    def words(self, noun: str, got: Any = None) -> str:
        return "torch.float16, torch.bfloat16, torch.float32 or torch.float64"


Width = Annotated[int, Range(1, 65_536)]
Depth = Annotated[int, Range(1, 1_000)]
Heads = Annotated[int, Range(1, 65_536)]
Kernel = Annotated[int, Range(1, 1_024)]
Channels = Annotated[int, Range(1, 4_096)]
Outputs = Annotated[int, Range(1, 2**20)]
Classes = Annotated[int, Range(0, 2**20)]
Expansion = Annotated[int, Range(1, 64)]
Ratio = Annotated[float, Range(above=0, most=64)]
Prefix = Annotated[int, Range(0, 4_096)]
Rate = Annotated[float, Range(0, below=1)]
Scale = Annotated[float, Range(0, 1_000_000)]
Device = Annotated[torch.device | str | int | None, IsDevice()]
Dtype = Annotated[torch.dtype | None, IsFloatingPoint()]


class TensorOptions(TypedDict):
    """Device and dtype of a layer's parameters."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None


def multiple_of_heads(width: int, heads: int) -> int:
    """The width of a head. Raises ValueError if `heads` does not divide `width`."""
    if width % heads:
        raise ValueError(f"`width` is {width} and `heads` {heads}, expected a multiple: change one of the two")
    return width // heads
