"""Images of which some rows at a time are read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linvit.arguments import check_dense, kind
from linvit.data.images.image import CorruptImageError, say_pages
from linvit.data.images.image import open_image as open_whole_image
from linvit.errors import SettingError
from linvit.files import user_path

GREY, COLOUR, CMYK = range(1, 3), range(3, 6), range(4, 6)  # with alpha, and of satellites with infrared
BANDS = {"b-w": GREY, "grey16": GREY, "srgb": COLOUR, "rgb": COLOUR, "rgb16": COLOUR, "cmyk": CMYK}
"""How many bands an image of each of libvips' interpretations can have to be shown."""

Rows = Callable[[int, int], Any]
"""Reads the rows from start to stop, (batch, channels, rows, width)."""


class Image:
    """Images (batch, channels, height, width) as the network reads them, whose rows come from a function.

    file: its path, size and time of change; "" if the rows are not those of a file.

    Raises TypeError and ValueError for rows that are not a tensor of that shape and dtype on the CPU.
    """

    def __init__(self, shape: Sequence[int], read: Rows, dtype: torch.dtype, file: str = "") -> None:
        self.shape: Any = tuple(shape)
        self.file = file
        self._read, self._dtype = read, dtype

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from start to stop."""
        rows = self._read(start, stop)
        if not isinstance(rows, Tensor):
            raise TypeError(f"`image` has rows {kind(rows)}, expected a tensor: change `read`")
        expected = (*self.shape[:2], stop - start, self.shape[3])
        if (tuple(rows.shape), rows.dtype, rows.device.type) != (expected, self._dtype, "cpu"):
            raise SettingError(
                f"`image` has rows {start:,} to {stop - 1:,} of {rows.dtype} and shape {tuple(rows.shape)} on"
                f" {rows.device}, expected {self._dtype}, as the network's weights, and shape {expected} on the CPU:"
                " convert them."
            )
        return rows


def pixel_rows(pixels: Any, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Rows:
    """Reads rows of pixels (height, width, channels) of 8 bits, an array or anything that can be sliced like one.

    mean, std: for each channel, of values from 0 to 1, as the network was trained.
    """
    shift, scale = (torch.tensor(values, dtype=dtype)[:, None, None] for values in (mean, std))

    def read(start: int, stop: int) -> Tensor:
        rows = torch.from_numpy(np.array(pixels[start:stop])).permute(2, 0, 1)
        return ((rows.to(dtype) / 255 - shift) / scale)[None]

    return read


def open_image(image: Any, config: Any, dtype: torch.dtype) -> Image:
    """The rows of a tensor, of an array of 8-bit pixels, of a file, or of an object with `shape` and `read`.

    config: timm's configuration of the network, for mean and deviation of pixels.

    Raises:
        TypeError: for anything else, and when rows are read that are not a tensor.
        FileNotFoundError: for a missing file.
        ValueError: for pixels of another form; CorruptImageError for a file that cannot be read.
    """
    file = ""
    if isinstance(image, Tensor):
        check_dense("image", image)
        if image.ndim != 4 or not image.is_floating_point():
            raise SettingError(
                f"`image` is {image.dtype} of shape {tuple(image.shape)}, expected floating point (batch, channels,"
                " height, width): convert it, or give 8-bit pixels as an array."
            )
        return Image(image.shape, lambda start, stop: image[:, :, start:stop], dtype)
    if isinstance(image, str | Path):
        path = user_path(image)
        image = _opened(path, channels=len(config["mean"]))
        about = path.stat()
        file = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"
    elif hasattr(image, "read") and len(getattr(image, "shape", ())) == 4:
        return Image(image.shape, image.read, dtype, image.file if isinstance(image, Image) else "")
    if not hasattr(image, "shape") or not hasattr(image, "dtype"):
        raise TypeError(f"`image` is {kind(image)}, expected a tensor, an array, a path or a reader of rows")
    if image.dtype != np.uint8 or len(image.shape) != 3 or image.shape[2] != len(config["mean"]):
        raise SettingError(
            f"`image` is {image.dtype} of shape {tuple(image.shape)}, expected 8-bit pixels (height, width,"
            f" {len(config['mean'])}): convert it."
        )
    height, width, channels = image.shape
    return Image((1, channels, height, width), pixel_rows(image, config["mean"], config["std"], dtype), dtype, file)


def _opened(path: Path, channels: int) -> Any:
    """The pixels (height, width, channels) of a file; libvips, if it is installed, reads those that are sliced."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no image at {path}: check the path.")
    advice = ""
    try:
        return VipsPixels(path, channels)
    except ImportError:
        advice = ", or install pyvips, which reads larger images and more formats: `pip install 'linvit[stream]'`"
    except CorruptImageError as error:
        refused = error
    try:
        whole = np.asarray(open_whole_image(path, channels))
    except CorruptImageError as error:
        raise CorruptImageError(f"{str(error).rstrip('.')}{advice}.") if advice else refused from error
    return whole.reshape(*whole.shape[:2], channels)


class VipsPixels:
    """The pixels of a file in any format of libvips, a TIFF pyramid or GeoTIFF for example, as 8-bit grey or RGB.

    channels: 1 for grey, 3 for RGB.

    Raises:
        ImportError: without pyvips.
        CorruptImageError: for a file that libvips cannot open or reads otherwise than Pillow, and for one that is not
            grey, RGB or CMYK of 8 or 16 bits.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path, channels: int) -> None:
        import pyvips

        try:
            image = pyvips.Image.new_from_file(str(path), fail_on="warning").autorot()
            if image.format not in ("uchar", "ushort") or image.bands not in BANDS.get(image.interpretation, ()):
                raise CorruptImageError(
                    f"{path} has {image.bands} bands of the format {image.format} ({image.interpretation}), expected"
                    " grey or RGB of 8 or 16 bits: scale it to 0..255 and save it with 8 bits."
                )
            if image.get("vips-loader").startswith("heif"):  # no rows of AVIF can be read alone; the decoders differ
                raise CorruptImageError(f"{path} is not read by libvips.")
            if image.get_typeof("n-pages") and image.get("n-pages") > 1:
                say_pages(str(path))
            image = _as_pillow(image, channels)
        except pyvips.Error as error:
            raise CorruptImageError(
                f"{path} is not a readable image ({_reason(error)}): replace or remove the file."
            ) from error
        self._image, self._path = image, path
        self.shape = (image.height, image.width, channels)

    def __getitem__(self, rows: slice) -> Any:
        import pyvips

        start, stop, _ = rows.indices(self.shape[0])
        try:
            pixels = self._image.crop(0, start, self.shape[1], stop - start).numpy()
            return pixels.reshape(-1, *self.shape[1:])
        except pyvips.Error as error:
            raise CorruptImageError(
                f"The rows {start:,} to {stop - 1:,} of {self._path} cannot be read ({_reason(error)}): replace the"
                " file."
            ) from error


def _as_pillow(image: Any, channels: int) -> Any:
    """Grey or RGB of 8 bits, as `converted` in linvit.data.images.image; libvips itself would use colour profiles."""
    if image.format == "ushort":
        image = image >> 8
    colours = [image[band].cast("int") for band in range(min(3, image.bands) if image.bands > 2 else 1)]
    if image.interpretation == "cmyk":
        light = 255 - image[3].cast("int")
        rounded = [colour * light + 128 for colour in colours]
        colours = [light - (((product >> 8) + product) >> 8) for product in rounded]
    if channels == 1 and len(colours) == 3:
        red, green, blue = colours
        colours = [(red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16]
    joined = colours[0] if channels == 1 else (colours * 3)[0].bandjoin((colours * 3)[1:3])
    return joined.cast("uchar")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
