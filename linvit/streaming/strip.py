"""The rows of an image or map that are in memory, the stored ones, and what attention must know of them."""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from linvit.files import replacing
from linvit.layers.operator import Operator
from linvit.ops.state import State, joined, joined_means

Size = tuple[int, int, int, int]
Written = tuple[int, int]
"""How many rows of a map are written, from the first on, and their checksum."""
Total = tuple[Tensor] | tuple[Tensor, Tensor] | State


class StoredMap:
    """A map (batch, channels, height, width) in memory, or in a file of its rows.

    A row holds all images, its positions from left to right, their channels innermost.

    path: the file; None keeps the map in memory. written: of the file of an earlier call; None makes it, at full size.

    Raises OSError if there is no room for the file.
    """

    def __init__(
        self, shape: Size, dtype: torch.dtype, path: Path | None = None, written: Written | None = None
    ) -> None:
        self.shape, self.dtype, self.path = shape, dtype, path
        batch, channels, height, width = shape
        self._row = (batch, width, channels)
        self._row_bytes = batch * width * channels * dtype.itemsize
        self._held = torch.empty(height, *self._row, dtype=dtype) if path is None else None
        self.written, self._is_checked = written or (0, 0), written is None
        if path is not None and written is None:
            _reserve(path, height * self._row_bytes)

    def check(self) -> None:
        """Raises ValueError if the file is not there, not a regular one (opening a pipe waits), or another one."""
        path, size = self.path, self.shape[2] * self._row_bytes
        if path is None:
            return
        damaged = path.is_symlink() or not path.is_file() or path.stat().st_size != size
        if not damaged and not self._is_checked:
            checksum = 0
            with open(path, "rb") as file:
                for _ in range(self.written[0]):
                    checksum = zlib.crc32(file.read(self._row_bytes), checksum)
            damaged, self._is_checked = checksum != self.written[1], True
        if damaged:
            raise ValueError(
                f"{path} is missing or damaged, expected a map of {size:,} bytes: remove the folder {path.parent} and"
                " compute again."
            )

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from start to stop, (batch, channels, rows, width)."""
        if self._held is not None:
            rows = self._held[start:stop]
        else:
            self.check()
            count = (stop - start) * self._row_bytes
            raw = np.fromfile(str(self.path), np.uint8, count, offset=start * self._row_bytes)
            rows = torch.from_numpy(raw).view(self.dtype).view(stop - start, *self._row)
        return rows.permute(1, 3, 0, 2)

    def write(self, start: int, rows: Tensor) -> None:
        """Stores rows (batch, channels, rows, width), the first of which has the number `start`."""
        ordered = rows.detach().permute(2, 0, 3, 1).contiguous()
        if self._held is not None:
            self._held[start : start + len(ordered)] = ordered
            return
        self.check()
        raw = ordered.view(-1).view(torch.uint8).numpy()
        with open(str(self.path), "r+b") as file:
            file.seek(start * self._row_bytes)
            raw.tofile(file)
        self.written = start + len(ordered), zlib.crc32(raw.data, self.written[1])

    def remove(self) -> None:
        """Removes the file, if there is one."""
        self._held = None
        if self.path is not None and self.path.is_file():
            self.path.unlink()


def _reserve(path: Path, size: int) -> None:
    """Creates a file whose bytes are allocated, so that a full disk is known at once."""
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        raised = OSError(
            f"{path.parent} has no room for a map of {size / 2**30:.2g} GiB ({os.strerror(error.errno or 0)}): choose"
            " another folder as `spill`."
        )
        raised.errno = error.errno
        raise raised from error


@dataclass(frozen=True)
class Rows:
    """Rows of a map: those that are computed, and those around them that the layers read as well.

    start, stop: the rows that are computed. first, last: the first row that is read, and the one after the last.
    height: of the whole map.
    """

    start: int
    stop: int
    first: int
    last: int
    height: int

    def at(self, stride: int, height: int) -> "Rows":
        """The same rows of a map with that stride and height; the last rows end where it ends."""
        stop = height if self.stop == self.height else self.stop // stride
        last = height if self.last == self.height else self.last // stride
        return Rows(self.start // stride, stop, self.first // stride, last, height)

    @property
    def computed(self) -> slice:
        """The rows that are computed among those that are read."""
        return slice(self.start - self.first, self.stop - self.first)


def cut(height: int, rows: int, reach: int, unit: int) -> list[Rows]:
    """Strips of `rows` rows, of which layers read `reach` rows more above and below; all start at multiples of unit.

    The last strip also has the rows beyond the last multiple.
    """
    rows, reach = (-(-number // unit) * unit for number in (rows, reach))
    starts = range(0, max(height // unit, 1) * unit, rows)
    return [
        Rows(start, stop, max(start - reach, 0), min(stop + reach, height), height)
        for start, stop in zip(starts, [*starts[1:], height], strict=True)
    ]


class Pending(Exception):  # noqa: N818 - not an error: what a strip adds to a total that is not known yet
    """Ends the computation of a strip at the first total that is not known; holds what the strip adds to it."""

    def __init__(self, adds: Total) -> None:
        super().__init__()
        self.adds = adds


class Strip:
    """The shard of attention (see `linvit.ops.state`) that the tokens of some rows are.

    totals: means and states of all rows that are known, in the order in which the layers ask for them. whole: whether
    there are no other rows.
    """

    def __init__(self, rows: Rows, totals: Sequence[Total], whole: bool) -> None:
        self.rows, self._totals, self._whole = rows, iter(totals), whole

    def visible(self, tokens: int) -> Tensor | None:
        """The tokens of the rows that are computed; the others count in other strips."""
        rows = self.rows
        if (rows.start, rows.stop) == (rows.first, rows.last):
            return None
        number = torch.arange(tokens) // (tokens // (rows.last - rows.first)) + rows.first
        return (number >= rows.start) & (number < rows.stop)

    def mean(self, mean: Tensor, count: Tensor, *, before: bool) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self._total((mean, count)))

    def state(self, state: State, *, before: bool) -> State:
        return cast(State, self._total(state))

    def chosen(self, tokens: Tensor, place: tuple[int, int], width: int) -> Tensor:
        """Of tokens (…, tokens, channels) in rows of that width the one at a row and column of the map.

        Returns (…, 1, channels). Places that the map does not reach are at its edge.
        """
        row, column = min(place[0], self.rows.height - 1), min(place[1], width - 1)
        is_here = self.rows.start <= row < self.rows.stop
        number = (row - self.rows.first) * width + column
        adds = tokens[..., number : number + 1, :] if is_here else torch.zeros_like(tokens[..., :1, :])
        return cast(tuple[Tensor], self._total((adds,)))[0]

    def _total(self, adds: Total) -> Total:
        if self._whole:
            return adds
        known = next(self._totals, None)
        if known is None:
            raise Pending(adds)
        return known


def together(first: Total, second: Total) -> Total:
    """The total of two groups of tokens."""
    if isinstance(first, State) and isinstance(second, State):
        return joined(first, second)
    if len(first) == 1:
        return (first[0] + second[0],)
    means, counts = (torch.stack(pair) for pair in zip(first, second, strict=True))
    return joined_means(means, counts), counts.sum(0)


@contextmanager
def attending(layer: nn.Module, strip: Strip) -> Iterator[None]:
    """Lets the attention of a layer have only the tokens of a strip."""
    operators = [module for module in layer.modules() if isinstance(module, Operator)]
    try:
        for operator in operators:
            operator.shard = strip
        yield
    finally:
        for operator in operators:
            operator.shard = None
