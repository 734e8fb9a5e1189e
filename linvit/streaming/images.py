"""Images of which some rows at a time are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from linvit.arguments import kind
from linvit.data.images.image import CorruptImageError
from linvit.data.images.image import open_image as open_whole_image
from linvit.files import user_path


class Image(Protocol):
    """An image of which `read` returns the rows from start to stop, (batch, channels, rows, width)."""

    shape: tuple[int, int, int, int]

    def read(self, start: int, stop: int) -> Tensor: ...


class TensorImage:
    """Images (batch, channels, height, width) as the network reads them."""

    def __init__(self, images: Tensor) -> None:
        self.shape: Any = tuple(images.shape)
        self._images = images

    def read(self, start: int, stop: int) -> Tensor:
        return self._images[:, :, start:stop]


class PixelImage:
    """Pixels (height, width, channels) of 8 bits, an array or anything that can be sliced like one.

    mean, std: for each channel, of values from 0 to 1, as the network was trained.
    """

    def __init__(self, pixels: Any, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> None:
        height, width, channels = pixels.shape
        self.shape = (1, channels, height, width)
        self._pixels, self._dtype = pixels, dtype
        self._mean, self._std = (torch.tensor(values, dtype=dtype)[:, None, None] for values in (mean, std))

    def read(self, start: int, stop: int) -> Tensor:
        rows = torch.from_numpy(np.array(self._pixels[start:stop])).permute(2, 0, 1)
        return ((rows.to(self._dtype) / 255 - self._mean) / self._std)[None]


def open_image(image: Any, config: Any, dtype: torch.dtype) -> Image:
    """The rows of a tensor, of an array of 8-bit pixels, of a file, or of an object with `shape` and `read`.

    config: timm's configuration of the network, for mean and deviation of pixels.

    Raises:
        TypeError: for anything else.
        FileNotFoundError: for a missing file.
        ValueError: for pixels of another form; CorruptImageError for a file that cannot be read.
    """
    if isinstance(image, Tensor):
        if image.ndim != 4 or not image.is_floating_point():
            raise ValueError(
                f"`image` is {image.dtype} of shape {tuple(image.shape)}, expected floating point (batch, channels,"
                " height, width): convert it, or give 8-bit pixels as an array."
            )
        return TensorImage(image)
    if isinstance(image, str | Path):
        image = _opened(user_path(image))
    elif hasattr(image, "read") and len(getattr(image, "shape", ())) == 4:
        rows: Image = image
        return rows
    if not hasattr(image, "shape") or not hasattr(image, "dtype"):
        raise TypeError(f"`image` is {kind(image)}, expected a tensor, an array, a path or a reader of rows")
    if image.dtype != np.uint8 or len(image.shape) != 3 or image.shape[2] != len(config["mean"]):
        raise ValueError(
            f"`image` is {image.dtype} of shape {tuple(image.shape)}, expected 8-bit pixels (height, width,"
            f" {len(config['mean'])}): convert it."
        )
    return PixelImage(image, config["mean"], config["std"], dtype)


def _opened(path: Path) -> Any:
    """The pixels (height, width, 3) of a file, of which libvips, if it is installed, reads those that are sliced."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no image at {path}: check the path.")
    try:
        return VipsPixels(path)
    except ImportError:
        return np.asarray(open_whole_image(path))


class VipsPixels:
    """The pixels of a file in any format of libvips, a TIFF pyramid or GeoTIFF for example, as 8-bit RGB.

    Raises:
        ImportError: without pyvips.
        CorruptImageError: for a file that libvips cannot open.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path) -> None:
        import pyvips

        try:
            image = pyvips.Image.new_from_file(str(path), fail_on="warning").autorot().colourspace("srgb")
        except pyvips.Error as error:
            raise CorruptImageError(
                f"{path} is not a readable image ({_reason(error)}): replace or remove the file."
            ) from error
        self._image, self._path = image.extract_band(0, n=3).cast("uchar"), path
        self.shape = (image.height, image.width, 3)

    def __getitem__(self, rows: slice) -> Any:
        import pyvips

        start, stop, _ = rows.indices(self.shape[0])
        try:
            return self._image.crop(0, start, self.shape[1], stop - start).numpy()
        except pyvips.Error as error:
            raise CorruptImageError(
                f"The rows {start:,} to {stop - 1:,} of {self._path} cannot be read ({_reason(error)}): replace the"
                " file; a computation with `spill` then goes on."
            ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
