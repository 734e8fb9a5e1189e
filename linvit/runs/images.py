"""Input images of predictions and analyses: files, folders, images in memory, and those larger than memory."""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop

from linvit.analysis.scores import evenly
from linvit.data.disk import files_below, say_unread
from linvit.data.images.image import (
    PAGED,
    SUFFIXES,
    CorruptImageError,
    check_large_enough,
    converted,
    large_enough,
    open_image,
)
from linvit.data.source import Source
from linvit.files import explained, replacing, user_path
from linvit.ranges import check, check_names
from linvit.runs.predictions import untaken_name
from linvit.runs.trained import Trained
from linvit.streaming import Streamed, run_in_strips
from linvit.streaming.images import Image as LargeImage
from linvit.streaming.images import open_image as open_large
from linvit.streaming.strip import StoredMap
from linvit.tasks.segmentation import Segmentation

PHOTOS = {"china.jpg": "danielbuechele", "flower.jpg": "vultilion"}
"""The photos that come with scikit-learn, and their photographers on Flickr; their licence is CC BY 2.0."""
CROP_SHARE = 0.5  # a crop's side over the image's shorter side
OPTIONS = ("rows", "memory", "spill", "progress")  # of images read in strips
MULTIPLE = 32  # pixels
Transform = Callable[[Image.Image], Tensor]


def as_list(inputs: Any) -> list[Any]:
    """The inputs of a prediction: a single path or object in memory becomes a list of one."""
    single = isinstance(inputs, str | Path) or not isinstance(inputs, Sequence | Iterable) or hasattr(inputs, "shape")
    return [inputs] if single else list(inputs)


def find_inputs(inputs: Sequence[Any], suffixes: Sequence[str], kind: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """The (name, path or object in memory) of each input, and a sentence for each path without any.

    Folders are searched recursively, in sorted order, for files with these suffixes; hidden ones are ignored. kind: the
    word for them in messages, "image" or "sound".
    """
    items: list[tuple[str, Any]] = []
    missing: list[str] = []
    for number, item in enumerate(inputs, start=1):
        if not isinstance(item, str | Path):
            items.append((f"{kind} {number}", item))
            continue
        path = user_path(item)
        others = Counter[str]()
        files = [path] if path.is_file() else files_below(path, suffixes, others)
        if files:
            say_unread(path, others, kind)
        items += [(str(file), file) for file in files]
        if path.is_dir() and not files:
            endings = ", ".join(suffixes[:3]) + " …" * (len(suffixes) > 3)
            missing.append(f"The folder {path} contains no {kind} files ({endings}): give another one.")
        elif not files:
            missing.append(f"There is no {kind} file or folder at {path}: check the path.")
    if not items:
        raise ValueError(missing[0] if missing else f"There is nothing to predict: give {kind} files or folders.")
    return items, missing


def find_images(inputs: Sequence[Any]) -> tuple[list[tuple[str, Any]], list[str]]:
    """`find_inputs` for images."""
    PAGED.clear()
    return find_inputs(inputs, SUFFIXES, "image")


def read_image(item: Any, name: str, channels: int = 3) -> Image.Image:
    """Converts a path, PIL image or uint8 array (height, width[, 3]) to a grey or RGB image.

    Raises CorruptImageError if the file cannot be read, and ValueError for any other array.
    """
    if isinstance(item, Path):
        return open_image(item, channels)
    if not isinstance(item, Image.Image):
        array = np.asarray(item)
        if array.dtype != np.uint8 or (array.ndim != 2 and array.shape[2:] != (3,)):
            raise ValueError(
                f"The {name} is an array of {array.dtype} {array.shape}, expected uint8 (height, width) or (height,"
                " width, 3): convert it."
            )
        item = Image.fromarray(array)
    return converted(item, channels)


@dataclass(frozen=True)
class AnalyzedImages:
    """Normalized images, ready for a network.

    whole: a few whole images to show; many: the images to average over; both (images, channels, height, width).
    whole_labels, many_labels: their classes, int64 (images,); None if unknown. about: a sentence on their origin.
    unreadable: a sentence for each file that was left out.
    """

    whole: Tensor
    many: Tensor
    about: str
    unreadable: list[str]
    whole_labels: Tensor | None = None
    many_labels: Tensor | None = None


def from_source(source: Source, count: int, shown: int) -> AnalyzedImages:
    """Up to `count` evenly spaced images of the held-out split.

    Images of different sizes are center-cropped to the smallest height and width.
    """
    dataset = source.val_set()
    items = [dataset[index] for index in evenly(len(dataset), count).tolist()]  # type: ignore[arg-type]
    pairs = [item for item in items if not isinstance(item, str)]
    if not pairs:
        raise ValueError("The data contains no readable image: choose other data.")
    many = stacked([image for image, _ in pairs])
    is_class = isinstance(pairs[0][1], int | np.integer | Tensor) and np.ndim(pairs[0][1]) == 0
    labels = torch.tensor([int(label) for _, label in pairs]) if is_class else None
    summary = f"{len(many)} held-out images of {type(source).__name__}, evenly chosen."
    places = slice(0, shown * max(1, len(many) // shown), max(1, len(many) // shown))
    unreadable = [item for item in items if isinstance(item, str)]
    return AnalyzedImages(many[places], many, summary, unreadable, None if labels is None else labels[places], labels)


def from_files(inputs: Sequence[Any], transform: Transform, channels: int, count: int, shown: int) -> AnalyzedImages:
    """Up to `count` evenly spaced image files; if there are fewer, regular crops of them fill up the number."""
    items, unreadable = find_images(inputs)
    items = [items[index] for index in evenly(len(items), count).tolist()]
    images: list[Image.Image] = []
    for name, item in items:
        try:
            images.append(large_enough(read_image(item, name, channels), name))
        except CorruptImageError as error:
            unreadable.append(str(error))
    if not images:
        raise ValueError(f"None of the {len(items)} image files can be used. The first: {unreadable[0]}")
    return _with_crops(images, transform, count, shown, f"{len(images)} image files", unreadable)


def photos(channels: int = 3) -> list[Image.Image]:
    """The images of PHOTOS, grey (1 channel) or RGB (3)."""
    from sklearn.datasets import load_sample_image

    return [converted(Image.fromarray(load_sample_image(name)), channels) for name in PHOTOS]


def from_photos(transform: Transform, channels: int, count: int, shown: int) -> AnalyzedImages:
    """The two photos that come with scikit-learn, and regular crops from them."""
    images = photos(channels)
    return _with_crops(images, transform, count, shown, f"scikit-learn's photos {' and '.join(PHOTOS)}", [])


def crops(image: Image.Image, count: int) -> list[Image.Image]:
    """At least `count` squares of half the image's shorter side, on a regular grid that reaches every edge."""
    side = max(1, round(CROP_SHARE * min(image.size)))
    width, height = image.size
    rows = max(1, math.floor(math.sqrt(count * height / width)))
    columns = math.ceil(count / rows)
    lefts = [round(x) for x in torch.linspace(0, width - side, columns).tolist()]
    tops = [round(y) for y in torch.linspace(0, height - side, rows).tolist()]
    return [image.crop((left, top, left + side, top + side)) for top in tops for left in lefts]


def stacked(images: Sequence[Tensor]) -> Tensor:
    """Stacks images of different sizes, center-cropped to the smallest, as (images, channels, height, width)."""
    size = [min(image.shape[side] for image in images) for side in (-2, -1)]
    return torch.stack([center_crop(image, size) for image in images])


def _with_crops(
    images: list[Image.Image], transform: Transform, count: int, shown: int, summary: str, unreadable: list[str]
) -> AnalyzedImages:
    whole = stacked([transform(image) for image in images[:shown]])
    if len(images) >= count:
        return AnalyzedImages(whole, stacked([transform(image) for image in images[:count]]), f"{summary}.", unreadable)
    each = math.ceil(count / len(images))
    many = stacked([transform(crop) for image in images for crop in crops(image, each)])
    words = f"{summary}, and for averages {len(many)} regular crops of them (squares of half the shorter side)."
    return AnalyzedImages(whole, many, words, unreadable)


def filled(image: LargeImage, dtype: torch.dtype) -> LargeImage:
    """An image with rows of zeros below it, so that its height is a multiple of 32."""
    batch, channels, height, width = image.shape

    def read(start: int, stop: int) -> Tensor:
        first = min(start, height - 1)
        rows = image.read(first, min(stop, height))[:, :, start - first :]
        return nn.functional.pad(rows, (0, 0, 0, stop - start - rows.shape[2]))

    return LargeImage((batch, channels, -(-height // MULTIPLE) * MULTIPLE, width), read, dtype, image.file)


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
    preprocessing, taken = run.preprocessing, set[str]()
    config, dtype = {"mean": preprocessing.mean, "std": preprocessing.std}, next(network.parameters()).dtype
    for name, item in items:
        options = dict(strips)
        if strips.get("spill"):
            options["spill"] = Path(strips["spill"]) / untaken_name(name, taken)
        try:
            if not isinstance(item, Path):
                item = np.asarray(read_image(item, name, preprocessing.channels))
                item = item.reshape(*item.shape[:2], preprocessing.channels)
            image = open_large(item, config, dtype)
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
    missing = "A label map of a large image is written as a TIFF pyramid by pyvips: `pip install 'linvit[stream]'`."
    with explained(missing, ImportError, ImportError):
        importlib.import_module("pyvips")


def save_pyramid(labels: StoredMap, height: int, label_of: Sequence[int], path: Path) -> None:
    """Writes the first rows of a label map as a tiled TIFF pyramid, which viewers of large images open.

    label_of: the number to write for each class, at most 255.
    """
    import pyvips

    _, _, rows, width = labels.shape
    if labels.path is None:
        image = pyvips.Image.new_from_array(labels.read(0, rows)[0, 0].numpy())
    else:
        pixel_format = "uchar" if labels.dtype.itemsize == 1 else "ushort"
        image = pyvips.Image.rawload(str(labels.path), width, rows, 1, format=pixel_format)
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
