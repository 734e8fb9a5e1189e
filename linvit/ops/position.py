"""Rotary position embeddings (RoPE) as real-valued tables; the rotated pairs are adjacent channels.

Angles are computed in float32 whatever the model's dtype (float64 for a float64 model): in bfloat16, index × frequency
is wrong after a few hundred tokens. The tables follow the released RAVLT and MAViT code: frequencies
10000^-linspace(0, 1, pairs), both ends included; in 2-D the first half of the channels rotates with the row, the
second with the column.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from linvit.arguments import is_traced, kind
from linvit.ranges import Range, check

LONGEST = 2**31 - 1
Length = Annotated[int, Range(1, LONGEST)]
SIZES = {
    "tokens": Length,
    "size": tuple[Length, Length],
    "width": Length,
    "start": Annotated[int, Range(0, LONGEST)],
    "first_row": Annotated[int, Range(0, LONGEST)],
    "endpoint": bool,
}


class Rotary(NamedTuple):
    """Cosines and sines of the angles, each (tokens, width / 2), float32 or float64."""

    cos: Tensor
    sin: Tensor


def rotary_1d(
    tokens: int,
    width: int,
    *,
    start: int | Tensor = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Rotary:
    """Table for a sequence at positions start … start + tokens - 1.

    Args:
        tokens: number of positions.
        width: head width, even.
        start: first position; the number of tokens already read when decoding. A tensor (batch,) of them, one for each
            sequence, gives tables (batch, 1, tokens, width / 2); its values are not checked.
        dtype: dtype of the tokens to be rotated; the table is float64 for float64, otherwise float32.
        device: device of the table.

    Raises:
        TypeError: if `dtype` is not a torch.dtype.
        ValueError: if a number is not a whole number in its range, `start` has another shape, width is odd, or the
            device is unknown.
    """
    _check_place(dtype, device)
    if isinstance(start, Tensor):
        _check_sizes(tokens=tokens, width=width)
        if start.ndim != 1:
            raise ValueError(f"`start` is a tensor {tuple(start.shape)}, expected a whole number or a tensor (batch,)")
    elif not _are_lengths(tokens, width, start):
        _check_sizes(tokens=tokens, width=width, start=start)
    if width % 2:
        raise ValueError(f"`width` is {width}, expected a multiple of 2")
    return _table(_angles(tokens, width // 2, start, dtype, device))


def rotary_2d(
    size: tuple[int, int],
    width: int,
    *,
    first_row: int = 0,
    endpoint: bool = True,
    factor: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Rotary:
    """Table for a grid of tokens in row-major order.

    Args:
        size: (height, width) of the token grid.
        width: head width, a multiple of 4.
        first_row: number of the first row, for some rows of a larger grid.
        endpoint: whether the frequencies reach 1/10000, as in RAVLT and MAViT; MLLA's stop one step short.
        factor: a number, as a tensor without axes, that multiplies all angles; it may need gradients.
        dtype, device: as in `rotary_1d`.

    Raises:
        TypeError: if `dtype` is not a torch.dtype.
        ValueError: if a number is not a whole number in its range, width is not a multiple of 4, or the device is
            unknown.
    """
    _check_place(dtype, device)
    plain = type(size) is tuple and len(size) == 2 and _are_lengths(*size, width) and first_row == 0
    if not (plain and isinstance(endpoint, bool)):
        _check_sizes(size=size, width=width, first_row=first_row, endpoint=endpoint)
    if width % 4:
        raise ValueError(f"`width` is {width}, expected a multiple of 4")
    starts = (first_row, 0)
    rows, cols = (_angles(n, width // 4, start, dtype, device, endpoint) for n, start in zip(size, starts, strict=True))
    if factor is not None:
        rows, cols = rows * factor, cols * factor
    tables = zip(_table(rows), _table(cols), strict=True)
    return Rotary(*(_grid(by_row, by_column) for by_row, by_column in tables))


def _are_lengths(*sizes: object) -> bool:
    """Whether these are plain positive integers, as in most calls: faster than reading annotations."""
    return all(type(size) is int and 0 < size <= LONGEST for size in sizes)


def _check_sizes(**sizes: object) -> None:
    if not is_traced():
        check(SIZES, {name: size for name, size in sizes.items() if not isinstance(size, torch.SymInt)})


def _check_place(dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"`dtype` is {kind(dtype)}, expected a torch.dtype or None")
    if device is not None and not isinstance(device, torch.device):
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"`device` is {device!r}, expected a device of torch, such as 'cpu' or 'cuda'") from None


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the channel pairs of x (…, tokens, width) by the table's angles; same shape, norms kept."""
    cos, sin = rotary.cos.to(x.dtype), rotary.sin.to(x.dtype)
    if _pairs_are_complex_numbers(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _pairs_are_complex_numbers(x: Tensor) -> bool:
    """Whether pairs can be viewed as complex numbers, whose product takes one pass over memory instead of eight.

    Compilers and export formats handle real numbers better.
    """
    if x.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
        return False
    even = x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return bool(even and x.stride(-1) == 1)


def _angles(
    positions: int,
    pairs: int,
    start: int | Tensor,
    dtype: torch.dtype | None,
    device: torch.device | None,
    endpoint: bool = True,
) -> Tensor:
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.linspace(0, 1, pairs if endpoint else pairs + 1, dtype=dtype, device=device)[:pairs]
    frequencies = 10000**-exponents
    index = torch.arange(positions, dtype=dtype, device=device)
    index = index + (start[:, None, None].to(dtype) if isinstance(start, Tensor) else start)
    return index.unsqueeze(-1) * frequencies


def _table(angles: Tensor) -> Rotary:
    return Rotary(angles.cos(), angles.sin())


def _grid(by_row: Tensor, by_column: Tensor) -> Tensor:
    size = (by_row.shape[0], by_column.shape[0], -1)
    return torch.cat((by_row[:, None].expand(size), by_column[None].expand(size)), dim=-1).flatten(0, 1)
