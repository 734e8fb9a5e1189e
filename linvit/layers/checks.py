"""What users pass to networks: the values of options, as annotations, and the tensors that networks read.

Options are checked by the classes of the networks (`linvit.ranges.Checked`), not again by their layers. Values of
tensors are read on a CPU only, where nothing has to wait for them, and never while a compiler or a transform traces.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from linvit.arguments import FLOATS, check_dense, check_floating, is_traced
from linvit.errors import SettingError
from linvit.ranges import OneOf, Range, Rule


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


Depth = Annotated[int, Range(1, 1_000)]  # each block takes time, whatever its width and device, also one of a file
Ratio = Annotated[float, Range(above=0)]
Rate = Annotated[float, Range(0, below=1)]
Scale = Annotated[float, Range(0)]
Device = Annotated[torch.device | str | int | None, IsDevice()]
Dtype = Annotated[torch.dtype, OneOf(FLOATS)] | None
Shape = tuple[str | int, ...]


class TensorOptions(TypedDict, total=False):
    """Device and dtype of a layer's parameters."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None


def multiple_of_heads(width: int, heads: int) -> int:
    """The width of a head. Raises ValueError if `heads` does not divide `width`."""
    if width % heads:
        raise SettingError(f"`width` is {width} and `heads` {heads}, expected a multiple: change one of the two")
    return width // heads


def check_turns(head_width: int, axes: int = 1) -> None:
    """Raises ValueError for a head width that a rotation along so many axes cannot divide into pairs of channels."""
    if head_width % (2 * axes):
        raise SettingError(
            f"the head width is {head_width}, expected a multiple of {2 * axes} for RoPE: change `heads` or `rope`"
        )


def check_floats(
    name: str, x: Tensor, shape: Shape, remedy: str, cast: str = "convert and normalize it as in training"
) -> None:
    """Raises unless x is a floating-point tensor of that shape; nothing if traced.

    shape: a size, or the name of one that can be any. remedy, cast: what to do about another shape, or another dtype.
    """
    if is_traced():
        return
    check_dense(name, x)
    if _misfits(x.shape, shape):
        raise SettingError(f"`{name}` has shape {tuple(x.shape)}, expected {_words(shape)}: {remedy}")
    check_floating(name, x.dtype, cast)


def check_whole_numbers(name: str, x: Tensor, shape: Shape, least: int, most: int) -> None:
    """Raises unless x is an integer tensor of that shape with values from `least` to `most`; nothing if traced."""
    if is_traced():
        return
    check_dense(name, x)
    if x.dtype not in (torch.int64, torch.int32) or _misfits(x.shape, shape):
        raise SettingError(
            f"`{name}` is {x.dtype} of shape {tuple(x.shape)}, expected int64 of shape {_words(shape)}: convert it"
        )
    # values can be read at once of a plain tensor on a CPU, outside of vmap and other transforms
    if type(x) is not Tensor or x.device.type != "cpu" or torch._C._are_functorch_transforms_active() or not x.numel():
        return
    first, last = (int(bound) for bound in x.aminmax())
    if first < least or last > most:
        wrong = first if first < least else last
        raise SettingError(f"`{name}` contains {wrong}, expected whole numbers from {least} to {most}: correct it")


def check_filled(name: str, x: Tensor) -> None:
    """Raises for an empty batch; nothing if traced."""
    if not is_traced() and len(x) == 0:
        raise SettingError(
            f"`{name}` is empty, of shape {tuple(x.shape)}, expected a batch of one or more: leave it out"
        )


def _misfits(actual: torch.Size, shape: Shape) -> bool:
    return len(actual) != len(shape) or any(
        isinstance(size, int) and length != size for length, size in zip(actual, shape, strict=True)
    )


def _words(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
