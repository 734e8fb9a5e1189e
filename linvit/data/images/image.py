"""One image: from file to tensor, the same way in training, evaluation and prediction."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import torch
from PIL import Image
from timm.data import create_transform

from linvit.files import reason_of
from linvit.ranges import OneOf, Range

SMALLEST = 32
MODES = {1: "L", 3: "RGB"}
Side = Annotated[int, Range(SMALLEST, because="networks halve an image five times")]
Channels = Annotated[int, OneOf(tuple(MODES))]


class CorruptImageError(ValueError):
    """A file that is not a readable image; the message names it."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a network's input: size is (height, width) in pixels, mean and std are per channel in 0..1.

    Raises ValueError for a size below 32 px, and for channels other than 1 or 3.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875

    def __post_init__(self) -> None:
        if min(self.size) < SMALLEST:
            height, width = self.size
            raise ValueError(
                f"The image size is {height}×{width} px, but these networks halve the image five times and need at"
                f" least {SMALLEST}×{SMALLEST} px: set `size` to {SMALLEST} or more."
            )
        if self.channels not in MODES:
            raise ValueError(
                f"`channels` is {self.channels}, but image files have 1 (grey) or 3 (RGB): set it to 1 or 3."
            )

    @property
    def channels(self) -> int:
        return len(self.mean)

    def transform(self) -> Callable[[Image.Image], torch.Tensor]:
        """The deterministic transform from a PIL image to a float32 tensor (channels, height, width)."""
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
    """Reads an image file of any size and mode and converts it to grey (1 channel) or RGB (3 channels).

    Raises CorruptImageError, naming the file (as name, where that is given), where it cannot be decoded to its last
    pixel.
    """
    try:
        with Image.open(file) as image:
            image.load()
            return converted(image, channels)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptImageError(
            f"{name or file} is not a readable image ({reason_of(error)}): replace or remove the file."
        ) from error


def converted(image: Image.Image, channels: int) -> Image.Image:
    """The image in grey (1 channel) or RGB (3 channels)."""
    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips it to white
        image = image.convert("I").point(lambda value: value / 256)
    return image.convert(MODES[channels])
