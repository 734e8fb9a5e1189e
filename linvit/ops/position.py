"""Rotary position embeddings (RoPE) as real-valued tables; the rotated pairs are adjacent channels.

Angles are computed in float32 whatever the model's dtype (float64 for a float64 model): in bfloat16, index × frequency
is wrong after a few hundred tokens. The tables follow the released RAVLT and MAViT code: frequencies
10000^-linspace(0, 1, pairs), both ends included; in 2-D the first half of the channels rotates with the row, the
second with the column, and in 3-D a part each with the frame, the row and the column.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from linvit.arguments import is_traced, kind
from linvit.ranges import Range, check

Length = Annotated[int, Range(0, 2**31 - 1)]
SIZES = {"tokens": Length, "size": tuple[Length, Length], "width": Length, "start": Length, "first_row": Length}
Lengths = tuple[Length, Length, Length]
VOLUME = {"size": Lengths, "width": Annotated[int, Range(6, 2**31 - 1)] | Lengths, "first_frame": Length}


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
    first = 0 if isinstance(start, Tensor) else start
    _check(dtype, device, 2, (tokens, first), tokens=tokens, width=width, start=first)
    if isinstance(start, Tensor) and start.ndim != 1:
        raise ValueError(f"`start` is a tensor {tuple(start.shape)}, expected a whole number or a tensor (batch,)")
    angles = _angles(tokens, width // 2, start, dtype, device)
    return Rotary(angles.cos(), angles.sin())


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
    if type(size) is not tuple or len(size) != 2:
        check(SIZES, {"size": size})
    height, breadth = size
    _check(dtype, device, 4, (height, breadth, first_row), size=size, width=width, first_row=first_row)
    rows = cols = _table(_angles(height, width // 4, first_row, dtype, device, endpoint), factor)
    if is_traced() or factor is not None or height != breadth or first_row:
        cols = _table(_angles(breadth, width // 4, 0, dtype, device, endpoint), factor)
    return _row_major(size, rows, cols)


def rotary_3d(
    size: tuple[int, int, int],
    width: int | tuple[int, int, int],
    *,
    first_frame: int = 0,
    endpoint: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Rotary:
    """Table for a volume or video of tokens in row-major order: frame by frame, and each frame row by row.

    Args:
        size: (frames, height, width) of the token grid; of a volume the depth is its frames.
        width: head width, even and at least 6: the row and the column turn a third each, rounded down to pairs, and the
            frame the rest, as in Wan (2025): 24, 20 and 20 of 64 channels. Or the channels of frame, row and column,
            even numbers whose sum is the head width, such as (16, 24, 24) as in CogVideoX (2024).
        first_frame: number of the first frame, for a later piece of a video.
        endpoint: whether the frequencies reach 1/10000, as in the tables of a grid; those of Wan and CogVideoX stop one
            step short.
        dtype, device: as in `rotary_1d`.

    Raises:
        TypeError: if `dtype` is not a torch.dtype.
        ValueError: if a number is not a whole number in its range, a width is odd, or the device is unknown.
    """
    _check_place(dtype, device)
    if not is_traced():
        check(VOLUME, {"size": size, "width": width, "first_frame": first_frame})
    third = 0 if isinstance(width, Sequence) else 2 * (width // 6)
    widths = tuple(width) if isinstance(width, Sequence) else (width - 2 * third, third, third)
    if any(channels % 2 for channels in widths):
        raise ValueError(f"`width` is {width}, expected {'a multiple' if third else 'multiples'} of 2")
    starts = (first_frame, 0, 0)
    angles = (
        _angles(length, channels // 2, start, dtype, device, endpoint)
        for length, channels, start in zip(size, widths, starts, strict=True)
    )
    return _row_major(size, *(_table(each, None) for each in angles))


def _row_major(size: tuple[int, ...], *tables: Rotary) -> Rotary:
    """The tables of each axis, for its positions, as one for the tokens of the whole grid."""
    axes = range(len(size))
    across = [tuple(slice(None) if axis == turned else None for axis in axes) for turned in axes]
    cos, sin = (
        torch.cat([table[index].expand(*size, -1) for table, index in zip(by_axis, across, strict=True)], dim=-1)
        for by_axis in zip(*tables, strict=True)
    )
    return Rotary(cos.flatten(0, -2), sin.flatten(0, -2))


def _table(angles: Tensor, factor: Tensor | None) -> Rotary:
    angles = angles if factor is None else angles * factor
    return Rotary(angles.cos(), angles.sin())


def _check(dtype: object, device: Any, multiple: int, numbers: tuple[Any, ...], *, width: Any, **sizes: Any) -> None:
    """Checks the arguments of a table, whose width is a multiple of 2 or 4; sizes that a compiler traces are free.

    numbers: those in `sizes`. Plain ones in their range are recognized without reading annotations.
    """
    _check_place(dtype, device)
    plain = all(type(number) is int and 0 <= number < 2**31 for number in (*numbers, width))
    if not plain and not is_traced():
        sizes["width"] = width
        check(SIZES, {name: size for name, size in sizes.items() if not isinstance(size, torch.SymInt)})
    if width % multiple:
        raise ValueError(f"`width` is {width}, expected a multiple of {multiple}")


def _check_place(dtype: object, device: Any) -> None:
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
    if isinstance(start, Tensor):
        index = index + start[:, None, None].to(dtype)
    elif type(start) is not int or start:  # a compiler's number stays free
        index = index + start
    return index.unsqueeze(-1) * frequencies
