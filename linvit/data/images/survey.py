"""What is in a folder of images: counted by their names, measured on a sample."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from linvit.data.images.folder import ImageFolder
from linvit.data.images.image import CorruptImageError, open_image

SAMPLE = 256
LONGEST = 256  # pixels of a measured image's longer side: networks see it smaller too
LEAST_STD = 0.02  # of images of one colour, which would be divided by zero


@dataclass(frozen=True)
class Survey:
    """A folder of images.

    counts: number of training images of each class. held_out: number of validation images. sampled: how many training
    images were measured. side: median of their shorter sides in pixels. mean, std: of their red, green and blue values
    in 0..1. unreadable: a sentence for each sampled image that cannot be read.
    """

    counts: dict[str, int]
    held_out: int
    sampled: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unreadable: list[str]


def survey(source: ImageFolder, sample: int = SAMPLE) -> Survey:
    """Counts the images of a folder and measures up to `sample` training images, evenly chosen over the classes.

    Raises ValueError if the folder cannot be used for training, or if none of the sampled images can be read.
    """
    files = source.files("train")
    counts = Counter(source.class_names[place] for _, place in files)
    looked_at = [files[place * len(files) // sample][0] for place in range(sample)] if len(files) > sample else None
    paths = looked_at or [path for path, _ in files]
    sides, means, squares, unreadable = [], [], [], []
    for path in paths:
        try:
            side, pixels = _measured(path)
        except CorruptImageError as error:
            unreadable.append(str(error))
            continue
        sides.append(side)
        means.append(pixels.mean(0))
        squares.append((pixels**2).mean(0))
    if not sides:
        raise ValueError(f"None of the {len(paths)} sampled images in {source.root} can be read. {unreadable[0]}")
    mean = np.mean(means, 0)
    std = np.sqrt(np.maximum(np.mean(squares, 0) - mean**2, LEAST_STD**2))
    rounded = [tuple(round(float(value), 4) for value in values) for values in (mean, std)]
    return Survey(dict(counts), len(source.files("val")), len(paths), round(median(sides)), *rounded, unreadable)


def _measured(path: str) -> tuple[int, np.ndarray]:
    """The shorter side of an image in pixels, and its colours in 0..1, (pixels, 3)."""
    if not Path(path).is_file():
        raise CorruptImageError(f"{path} is not a file: remove it.")
    image = open_image(path)
    side = min(image.size)
    image.thumbnail((LONGEST, LONGEST))
    return side, np.asarray(image, np.float64).reshape(-1, 3) / 255
