"""A survey of a folder of images: number of images per class, and sizes and colours of a sample."""

from collections import Counter
from dataclasses import dataclass
from statistics import median

import numpy as np

from linvit.data.images.folder import ImageFolder
from linvit.data.images.image import CorruptImageError, open_image
from linvit.data.unusable import none_usable

LONGEST = 256  # pixels of a measured image's longer side: networks see it smaller too
LEAST_STD = 0.02  # images of a single colour have a deviation of zero


@dataclass(frozen=True)
class Survey:
    """Counts of a folder of images, and measurements of a sample of its training images.

    counts: number of training images per class. held_out: number of validation images. sampled: size of the sample.
    side: median of the shorter sides in pixels. mean, std: per channel (RGB) in 0..1. unreadable: a sentence for each
    image of the sample that cannot be read.
    """

    counts: dict[str, int]
    held_out: int
    sampled: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unreadable: list[str]


def survey(source: ImageFolder, sample: int = 256) -> Survey:
    """Counts the images of a folder and measures up to `sample` training images, evenly chosen over the classes.

    Raises ValueError if the folder cannot be used for training, or if none of the sampled images can be read.
    """
    files = source.files("train")
    counts = Counter(source.class_names[place] for _, place in files)
    chosen = [files[place * len(files) // sample][0] for place in range(sample)] if len(files) > sample else None
    paths = chosen or [path for path, _ in files]
    sides, means, squares, unreadable = [], [], [], []
    for path in paths:
        try:
            image = open_image(path)
        except CorruptImageError as error:
            unreadable.append(str(error))
            continue
        sides.append(min(image.size))
        image.thumbnail((LONGEST, LONGEST))
        pixels = np.asarray(image, np.float64).reshape(-1, 3) / 255
        means.append(pixels.mean(0))
        squares.append((pixels**2).mean(0))
    if not sides:
        raise none_usable(unreadable, "sampled image")
    mean = np.mean(means, 0)
    std = np.sqrt(np.maximum(np.mean(squares, 0) - mean**2, LEAST_STD**2))
    rounded_mean, rounded_std = (tuple(round(float(value), 4) for value in values) for values in (mean, std))
    return Survey(
        dict(counts),
        len(source.files("val")),
        len(paths),
        round(median(sides)),
        rounded_mean,
        rounded_std,
        unreadable,
    )
