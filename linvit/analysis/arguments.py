"""Checks of arguments that several analyses share: each raises TypeError or ValueError, in one sentence."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from linvit.arguments import check_dense, check_floating, kind
from linvit.errors import SettingError

Inputs = Tensor | tuple[Tensor, ...]


def check_matrix(name: str, matrix: Tensor, axes: int = 2) -> None:
    """Raises unless it is a dense floating-point tensor with at least this many axes."""
    check_dense(name, matrix)
    check_floating(name, matrix.dtype)
    if matrix.ndim < axes or 0 in matrix.shape[-axes:]:
        raise SettingError(f"`{name}` has shape {tuple(matrix.shape)}, expected {axes} or more axes, none of length 0")


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs of a network as a tuple of tensors that have a batch."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    for index, x in enumerate(given):
        name = f"inputs[{index}]" if isinstance(inputs, tuple) else "inputs"
        check_dense(name, x)
        if x.ndim == 0:
            raise SettingError(f"`{name}` has no axes, expected a batch")
    return given


def check_batches(batches: object) -> None:
    """Raises unless it is an iterable of batches of inputs."""
    if isinstance(batches, Tensor | str | dict) or not isinstance(batches, Iterable):
        raise TypeError(f"`batches` is {kind(batches)}, expected an iterable of inputs: put one batch into a list")


def check_layers(layers: object, known: Sequence[str]) -> None:
    """Raises unless it is a list of known names of layers."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise TypeError(f"`layers` is {kind(layers)}, expected a list of names of layers")
    for name in layers:
        if not isinstance(name, str) or name not in known:
            raise SettingError(f"`layers` has {name!r}, expected names among {', '.join(known)}")
