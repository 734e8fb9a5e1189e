"""Predictions for images that are larger than memory, at their own size and strip by strip."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linvit.data.images.image import CorruptImageError, check_large_enough
from linvit.files import replacing
from linvit.ranges import check, check_names
from linvit.runs.images import read_image
from linvit.runs.predictions import untaken_name
from linvit.runs.trained import Trained
from linvit.streaming import Streamed, run_in_strips
from linvit.streaming.images import Image, open_image
from linvit.streaming.strip import StoredMap
from linvit.tasks.segmentation import Segmentation

OPTIONS = ("rows", "memory", "spill", "progress")
MULTIPLE = 32


def filled(image: Image, dtype: torch.dtype) -> Image:
    """An image with rows of zeros below it, so that its height is a multiple of 32."""
    batch, channels, height, width = image.shape

    def read(start: int, stop: int) -> Tensor:
        first = min(start, height - 1)
        rows = image.read(first, min(stop, height))[:, :, start - first :]
        return nn.functional.pad(rows, (0, 0, 0, stop - start - rows.shape[2]))

    return Image((batch, channels, -(-height // MULTIPLE) * MULTIPLE, width), read, dtype, image.file)


def in_strips(
    run: Trained,
    network: nn.Module,
    items: Iterable[tuple[str, Any]],
    unreadable: list[str],
    strips: Mapping[str, Any],
) -> Iterator[tuple[str, Streamed, int]]:
    """The name of each image, what a run's network computes from it at its own size, and its height.

    items: names, and paths or images in memory. unreadable: collects a sentence for each that cannot be read. strips:
    OPTIONS of `linvit.run_in_strips`; every image has its own folder in `spill`. Raises as `linvit.run_in_strips`.
    """
    check({"strips": dict}, {"strips": strips})
    check_names("option of strips", strips, OPTIONS)
    check({"spill": str | Path | None}, strips)
    about, taken = run.preprocessing, set[str]()
    config, dtype = {"mean": about.mean, "std": about.std}, next(network.parameters()).dtype
    for name, item in items:
        options = dict(strips)
        if strips.get("spill"):
            options["spill"] = Path(strips["spill"]) / untaken_name(name, taken)
        try:
            if not isinstance(item, Path):
                item = np.asarray(read_image(item, name, about.channels))
                item = item.reshape(*item.shape[:2], about.channels)
            image = open_image(item, config, dtype)
            _, _, height, width = image.shape
            check_large_enough(height, width, name)
            streamed = run_in_strips(
                network, filled(image, dtype) if isinstance(run.task, Segmentation) else image, **options
            )
        except CorruptImageError as error:
            unreadable.append(str(error))
        else:
            yield name, streamed, height


def check_pyramids() -> None:
    """Raises ImportError without pyvips, which writes TIFF pyramids."""
    try:
        importlib.import_module("pyvips")
    except ImportError as error:
        raise ImportError(
            "A label map of a large image is written as a TIFF pyramid by pyvips: `pip install 'linvit[stream]'`."
        ) from error


def save_pyramid(labels: StoredMap, height: int, label_of: Sequence[int], path: Path) -> None:
    """Writes the first rows of a label map as a tiled TIFF pyramid, which viewers of large images open.

    label_of: the number to write for each class, at most 255.
    """
    import pyvips

    _, _, rows, width = labels.shape
    if labels.path is None:
        image = pyvips.Image.new_from_array(labels.read(0, rows)[0, 0].numpy())
    else:
        kind = "uchar" if labels.dtype.itemsize == 1 else "ushort"
        image = pyvips.Image.rawload(str(labels.path), width, rows, 1, format=kind)
    image = image.crop(0, 0, width, height).maplut(pyvips.Image.new_from_array(np.array([label_of], np.uint8)))
    options = {"tile": True, "tile_width": 256, "tile_height": 256, "pyramid": True, "region_shrink": "nearest"}
    with replacing(path) as temporary:
        image.tiffsave(str(temporary), compression="deflate", bigtiff=True, **options)


def class_counts(labels: StoredMap, height: int, classes: int) -> Tensor:
    """The number of pixels of each class."""
    counts = torch.zeros(classes, dtype=torch.int64)
    for start in range(0, height, 256):
        rows = labels.read(start, min(start + 256, height))
        counts += torch.bincount(rows.flatten().int(), minlength=classes)[:classes]
    return counts
