"""Predictions for images that are larger than memory, at their own size and strip by strip."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from linvit.files import replacing
from linvit.ranges import check_names
from linvit.streaming import Streamed, stream
from linvit.streaming.images import Image, open_image
from linvit.streaming.maps import StoredMap

if TYPE_CHECKING:
    from linvit.runs.run import Run

OPTIONS = ("rows", "memory", "spill", "progress")
MULTIPLE = 32


class Filled:
    """An image with rows of zeros below it, so that its height is a multiple of 32."""

    def __init__(self, image: Image) -> None:
        batch, channels, height, width = image.shape
        self.shape = (batch, channels, -(-height // MULTIPLE) * MULTIPLE, width)
        self._image, self._height = image, height

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from start to stop."""
        first = min(start, self._height - 1)
        rows = self._image.read(first, min(stop, self._height))[:, :, start - first :]
        return nn.functional.pad(rows, (0, 0, 0, stop - start - rows.shape[2]))


def in_strips(run: "Run", network: nn.Module, item: Any, name: str, strips: Mapping[str, Any]) -> tuple[Streamed, int]:
    """What a run's network computes from an image at its own size, and the height of the image.

    item: a path or pixels. strips: OPTIONS of `linvit.stream`; every image has its own folder in `spill`.

    Raises as `linvit.stream`.
    """
    check_names("option of strips", strips, OPTIONS)
    about = run.preprocessing
    given = {**strips, **({"spill": Path(strips["spill"]) / Path(name).name} if strips.get("spill") else {})}
    pixels = item if isinstance(item, str | Path) else np.asarray(item)
    image = open_image(pixels, {"mean": about.mean, "std": about.std}, next(network.parameters()).dtype)
    return stream(network, Filled(image) if run.spec.name == "segmentation" else image, **given), image.shape[2]


def save_pyramid(labels: StoredMap, height: int, label_of: Tensor, path: Path) -> None:
    """Writes a label map as a tiled TIFF pyramid, which viewers of large images open.

    label_of: the number to write for each class, uint8. Raises ImportError without pyvips.
    """
    try:
        import pyvips
    except ImportError as error:
        raise ImportError(
            "A label map of a large image is written as a TIFF pyramid by pyvips: `pip install 'linvit[stream]'`."
        ) from error
    width = labels.shape[3]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, TemporaryDirectory(dir=path.parent) as folder:
        raw = Path(folder) / "labels"
        with open(raw, "wb") as file:
            for start in range(0, height, 256):
                rows = labels.read(start, min(start + 256, height))[0, 0]
                label_of[rows.long()].numpy().tofile(file)
        image = pyvips.Image.rawload(str(raw), width, height, 1)
        options = {"tile": True, "tile_width": 256, "tile_height": 256, "pyramid": True, "region_shrink": "nearest"}
        image.tiffsave(str(temporary), compression="deflate", bigtiff=True, **options)


def class_counts(labels: StoredMap, height: int, classes: int) -> Tensor:
    """The number of pixels of each class."""
    counts = torch.zeros(classes, dtype=torch.int64)
    for start in range(0, height, 256):
        rows = labels.read(start, min(start + 256, height))
        counts += torch.bincount(rows.flatten().int(), minlength=classes)[:classes]
    return counts
