"""Which tensors a network reads: each wrong one is a TypeError or ValueError of one sentence.

Values are read on a CPU only, where nothing has to wait for them, and never while a compiler or a transform traces.
"""

import torch
from torch import Tensor

Shape = tuple[str | int, ...]


def check_floats(name: str, x: object, shape: Shape, remedy: str) -> None:
    """Raises unless x is a floating-point tensor of that shape.

    shape: a size, or the name of one that can be any. remedy: what to do about another shape.
    """
    x = _tensor(name, x, shape)
    if _misfits(x, shape):
        raise ValueError(f"`{name}` has the shape {tuple(x.shape)}, expected {_words(shape)}: {remedy}")
    if not x.is_floating_point():
        raise ValueError(
            f"`{name}` has the dtype {x.dtype}, expected a floating-point one: convert and normalize it as in training"
        )


def check_whole_numbers(name: str, x: object, shape: Shape, least: int, most: int) -> None:
    """Raises unless x is an integer tensor of that shape with values from `least` to `most`; nothing if traced."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return
    x = _tensor(name, x, shape)
    if x.dtype not in (torch.int64, torch.int32) or _misfits(x, shape):
        raise ValueError(
            f"`{name}` is {x.dtype} of shape {tuple(x.shape)}, expected int64 of shape {_words(shape)}: convert it"
        )
    if not (has_values(x) and x.numel()):
        return
    first, last = (int(bound) for bound in x.aminmax())
    if first < least or last > most:
        wrong = first if first < least else last
        raise ValueError(f"`{name}` contains {wrong}, expected whole numbers from {least} to {most}: correct it")


def check_filled(name: str, x: Tensor) -> None:
    """Raises for a batch of nothing."""
    if not torch.compiler.is_compiling() and len(x) == 0:
        raise ValueError(
            f"`{name}` is empty, of shape {tuple(x.shape)}, expected a batch of at least one: leave it out"
        )


def has_values(x: Tensor) -> bool:
    """Whether values can be read at once: a plain tensor on a CPU, outside of vmap and other transforms."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch._C._are_functorch_transforms_active()


def _tensor(name: str, x: object, shape: Shape) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` is of type {type(x).__name__}, expected a tensor {_words(shape)}: convert it")
    return x


def _misfits(x: Tensor, shape: Shape) -> bool:
    return x.ndim != len(shape) or any(
        isinstance(size, int) and length != size for length, size in zip(x.shape, shape, strict=True)
    )


def _words(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
