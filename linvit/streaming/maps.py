"""Maps of which only some rows are in memory at a time."""

import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linvit.files import replacing

Size = tuple[int, int, int, int]
Written = tuple[int, int]
"""How many rows of a map are written, from the first on, and their checksum."""


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
