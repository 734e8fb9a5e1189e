"""Images of which some rows at a time are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from linvit.arguments import kind
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
        try:
            pixels = np.array(self._pixels[start:stop])
        except Exception as error:  # each decoder has errors of its own
            raise ValueError(
                f"The rows {start} to {stop - 1} of the image cannot be read ({error}): replace the file; with `spill`,"
                " the computation then goes on."
            ) from error
        rows = torch.from_numpy(pixels).permute(2, 0, 1)
        return ((rows.to(self._dtype) / 255 - self._mean) / self._std)[None]


def open_image(image: Any, config: Any, dtype: torch.dtype) -> Image:
    """The rows of a tensor, of an array of 8-bit pixels, of a file, or of an object with `shape` and `read`.

    config: timm's configuration of the network, for mean and deviation of pixels.

    Raises:
        TypeError: for anything else.
        ValueError: for a file that cannot be read, and for pixels of another form.
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
    """The pixels (height, width, 3) of a file; of a TIFF file only those that are sliced are read."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no image at {path}: check the path.")
    if path.suffix.lower() in (".tif", ".tiff"):
        return _opened_tiff(path)
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    try:
        with Pillow.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, Pillow.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read ({error}): convert it to a tiled TIFF file.") from error


def _opened_tiff(path: Path) -> Any:
    try:
        import tifffile  # type: ignore[import-not-found, unused-ignore]
        import zarr  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"{path.name} is a TIFF file, and its rows are read by tifffile and zarr: `pip install 'linvit[stream]'`."
        ) from error

    try:
        level = zarr.open(tifffile.imread(path, aszarr=True, level=0), mode="r")
    except Exception as error:  # each decoder has errors of its own
        raise ValueError(f"{path} cannot be read ({error}): replace the file.") from error
    return level
