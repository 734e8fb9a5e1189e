"""Checks of the tensors that a network reads: each wrong one is a TypeError or ValueError of one sentence.

Values are read on a CPU only, where nothing has to wait for them, and never while a compiler or a transform traces.
"""

import torch
from torch import Tensor

from linvit.arguments import check_floating, form, is_traced

Shape = tuple[str | int, ...]


def check_floats(
    name: str, x: object, shape: Shape, remedy: str, cast: str = "convert and normalize it as in training"
) -> None:
    """Raises unless x is a floating-point tensor of that shape; nothing if traced.

    shape: a size, or the name of one that can be any. remedy, cast: what to do about another shape, or another dtype.
    """
    if is_traced():
        return
    actual, dtype, _ = form(name, x)
    if _misfits(actual, shape):
        raise ValueError(f"`{name}` has shape {tuple(actual)}, expected {_words(shape)}: {remedy}")
    check_floating(name, dtype, cast)


def check_whole_numbers(name: str, x: object, shape: Shape, least: int, most: int) -> None:
    """Raises unless x is an integer tensor of that shape with values from `least` to `most`; nothing if traced."""
    if is_traced():
        return
    actual, dtype, _ = form(name, x)
    if dtype not in (torch.int64, torch.int32) or _misfits(actual, shape):
        raise ValueError(
            f"`{name}` is {dtype} of shape {tuple(actual)}, expected int64 of shape {_words(shape)}: convert it"
        )
    assert isinstance(x, Tensor)
    if not (has_values(x) and x.numel()):
        return
    first, last = (int(bound) for bound in x.aminmax())
    if first < least or last > most:
        wrong = first if first < least else last
        raise ValueError(f"`{name}` contains {wrong}, expected whole numbers from {least} to {most}: correct it")


def check_filled(name: str, x: Tensor) -> None:
    """Raises for an empty batch; nothing if traced."""
    if not is_traced() and len(x) == 0:
        raise ValueError(f"`{name}` is empty, of shape {tuple(x.shape)}, expected a batch of one or more: leave it out")


def has_values(x: Tensor) -> bool:
    """Whether values can be read at once: a plain tensor on a CPU, outside of vmap and other transforms."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch._C._are_functorch_transforms_active()


def _misfits(actual: torch.Size, shape: Shape) -> bool:
    return len(actual) != len(shape) or any(
        isinstance(size, int) and length != size for length, size in zip(actual, shape, strict=True)
    )


def _words(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
