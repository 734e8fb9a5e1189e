"""One image: from file to tensor, the same way in training, evaluation and prediction."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from timm.data import create_transform
from timm.data.transforms import MaybeToTensor
from torch.utils.data import get_worker_info
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import Compose, Normalize

from linvit.data.disk import check_regular
from linvit.errors import SettingError
from linvit.files import reason_of
from linvit.ranges import OneOf, Range

SMALLEST, LARGEST = 32, 16_384  # pixels
THINNEST = 1000  # long side over short side; scaled to a short side of 256 px, a row of 65,000 px would take 13 GB
MODES = {1: "L", 3: "RGB"}
UNNAMED = "The image"
PAGED: list[str] = []  # the first file of a list that has several pages
MORE = ".gif .apng .jfif .jpe .mpo .jp2 .j2k .jpx .avif .tga .dib .pnm .pbm .qoi .pcx .psd .sgi .ico .dds"
SUFFIXES = (*IMG_EXTENSIONS, *MORE.split())  # of image files in folders
PHOTOMETRIC, WHITE_IS_ZERO, SAMPLE_FORMAT, SIGNED = 262, 0, 339, 2  # tags of TIFF, and values of theirs
ORIENTATION, SIDEWAYS = ExifTags.Base.Orientation, (5, 6, 7, 8)
Side = Annotated[int, Range(SMALLEST, LARGEST, because="networks halve an image five times")]
Deviation = Annotated[float, Range(0.001, 1)]  # below that, normalized pixels leave the range of half precision
Channels = Annotated[int, OneOf(tuple(MODES))]
Resize = Annotated[str, OneOf(("crop", "none"))]

logger = logging.getLogger(__name__)


class CorruptImageError(ValueError):
    """A file that is not a readable image; the message names it, except if a transform that got an image raised it."""


def naming(error: CorruptImageError, name: str) -> str:
    """The sentence of an error, with the name of the image."""
    return str(error).replace(UNNAMED, name, 1)


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of images to a network's input: size (height, width) in pixels, mean and std per channel in 0..1.

    resize: "crop" resizes an image and crops its centre to `size`; "none" keeps the size of every image.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    resize: Resize = "crop"

    def __post_init__(self) -> None:
        if self.channels not in MODES:
            raise SettingError(
                f"`channels` is {self.channels}, but image files have 1 (grey) or 3 (RGB): set it to 1 or 3."
            )

    @property
    def channels(self) -> int:
        return len(self.mean)

    def transform(self) -> Callable[[Image.Image], torch.Tensor]:
        """The deterministic transform from a PIL image to a float32 tensor (channels, height, width).

        With resize="none" it raises CorruptImageError for an image that is too small.
        """
        if self.resize == "none":
            return Compose([large_enough, MaybeToTensor(), Normalize(self.mean, self.std)])
        return create_transform(
            (self.channels, *self.size),
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
        )

    def displayed(self, image: torch.Tensor) -> torch.Tensor:
        """(height, width, 3) in 0..1, or (height, width) for one channel: an image before normalization."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        pixels = (image.float().cpu() * std + mean).clamp(0, 1).movedim(0, -1)
        return pixels[..., 0] if self.channels == 1 else pixels


def open_image(file: str | Path | IO[bytes], channels: int = 3, name: str | None = None) -> Image.Image:
    """Reads an image file, rotates it as its EXIF data say, and converts it to grey (1 channel) or RGB (3).

    Raises CorruptImageError, naming the file (as name, if given), if it cannot be decoded to its last pixel, has more
    pixels than Pillow allows, or is over 1,000 times as long as wide.
    """
    with opened(file, name=name) as image:
        width, height = image.size
        if max(width, height) > THINNEST * min(width, height):
            raise ValueError(f"{height:,}×{width:,} px, over {THINNEST:,} times as long as wide")
        if image.format != "MPO" and getattr(image, "is_animated", False):  # photos of phones contain previews
            say_pages(str(name or file))
        image.load()
        upright: Image.Image = image
        with contextlib.suppress(Exception):  # damaged EXIF data with intact pixels
            upright = ImageOps.exif_transpose(image)
        return converted(upright, channels, image)


@contextlib.contextmanager
def opened(file: str | Path | IO[bytes], contents: str = "image", name: str | None = None) -> Iterator[Image.Image]:
    """Opens an image file; whatever fails meanwhile is a CorruptImageError that names it. contents: what it should be.

    Only regular files are opened.
    """
    try:
        if isinstance(file, str | Path):
            check_regular(file)
        with Image.open(file) as image:
            yield image
    except CorruptImageError as error:
        raise CorruptImageError(naming(error, str(name or file))) from None
    except Exception as error:  # the error for a damaged file depends on its format
        reason = "its format is unknown" if isinstance(error, UnidentifiedImageError) else reason_of(error)
        raise CorruptImageError(
            f"{name or file} is not a readable {contents} ({reason}): replace or remove the file."
        ) from error


def say_pages(name: str) -> None:
    """Warns, once until `PAGED` is cleared, that only the first page or frame of an image is read."""
    if not PAGED and get_worker_info() is None:
        PAGED.append(name)
        logger.warning("%s has several pages or frames: of it, and of others like it, only the first is read.", name)


def large_enough(image: Image.Image, name: str = UNNAMED) -> Image.Image:
    """The image, if networks can read it in its own size; raises CorruptImageError for a side below 32 px."""
    check_large_enough(image.height, image.width, name)
    return image


def check_large_enough(height: int, width: int, name: str) -> None:
    """Raises CorruptImageError for a side below 32 px."""
    if min(width, height) < SMALLEST:
        raise CorruptImageError(
            f"{name} is {height}×{width} px, expected {SMALLEST}×{SMALLEST} px or more: leave it out or take a larger"
            " one."
        )


def size_of(file: str | Path) -> tuple[int, int]:
    """Height and width of an image file as `open_image` returns it, from its header."""
    with opened(file) as image:
        width, height = image.size
        return (width, height) if image.getexif().get(ORIENTATION, 1) in SIDEWAYS else (height, width)


def converted(image: Image.Image, channels: int, opened: Image.Image | None = None) -> Image.Image:
    """The image in grey (1 channel) or RGB (3 channels); of 16-bit values the upper 8 bits.

    opened: the image as its file says, if this one is a copy.

    Raises CorruptImageError for floating-point, signed and 32-bit values, whose range is unknown.
    """
    opened = opened or image
    tags = getattr(opened, "tag_v2", {})
    is_wide = image.mode == "I" and opened.format not in ("PPM", "PNG")  # these have 16 bits
    if image.mode == "F" or is_wide or SIGNED in tags.get(SAMPLE_FORMAT, ()):
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise CorruptImageError(
            f"{UNNAMED} has {kind} values, whose range is unknown, expected 8 bits, or 16 bits without a sign: scale"
            " them to 0..255 and save them with 8 bits."
        )
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips it to white
        inverted = tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
        scale, white = (-1, 65535) if inverted else (1, 0)
        image = image.convert("I").point(lambda value: value * (scale / 256) + white / 256)
    return image.convert(MODES[channels])
