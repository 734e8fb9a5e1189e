"""Input images of predictions and analyses: files, folders, and images in memory."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop

from linvit.analysis.scores import evenly
from linvit.data.disk import files_below, say_unread
from linvit.data.images.image import PAGED, SUFFIXES, CorruptImageError, converted, large_enough, open_image
from linvit.data.source import Source
from linvit.files import user_path

PHOTOS = {"china.jpg": "danielbuechele", "flower.jpg": "vultilion"}
"""The photos that come with scikit-learn, and their photographers on Flickr; their licence is CC BY 2.0."""
CROP_SHARE = 0.5  # a crop's side over the image's shorter side
Transform = Callable[[Image.Image], Tensor]


def as_list(inputs: Any) -> list[Any]:
    """The inputs of a prediction: a single path or object in memory becomes a list of one."""
    single = isinstance(inputs, str | Path) or not isinstance(inputs, Sequence | Iterable) or hasattr(inputs, "shape")
    return [inputs] if single else list(inputs)


def find_inputs(inputs: Sequence[Any], suffixes: Sequence[str], kind: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """The (name, path or object in memory) of each input, and a sentence for each path without any.

    Folders are searched recursively, in sorted order, for files with these suffixes; hidden ones are ignored. kind: the
    word for them in messages, "image" or "sound". Raises ValueError if nothing is found.
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

    Raises ValueError if none can be read.
    """
    dataset = source.val_set()
    items = [dataset[place] for place in evenly(len(dataset), count).tolist()]  # type: ignore[arg-type]
    pairs = [item for item in items if not isinstance(item, str)]
    if not pairs:
        raise ValueError("The data contains no readable image: choose other data.")
    many = stacked([image for image, _ in pairs])
    is_class = isinstance(pairs[0][1], int | np.integer | Tensor) and np.ndim(pairs[0][1]) == 0
    labels = torch.tensor([int(label) for _, label in pairs]) if is_class else None
    about = f"{len(many)} held-out images of {type(source).__name__}, evenly chosen."
    places = slice(0, shown * max(1, len(many) // shown), max(1, len(many) // shown))
    unreadable = [item for item in items if isinstance(item, str)]
    return AnalyzedImages(many[places], many, about, unreadable, None if labels is None else labels[places], labels)


def from_files(inputs: Sequence[Any], transform: Transform, channels: int, count: int, shown: int) -> AnalyzedImages:
    """Up to `count` evenly spaced image files; if there are fewer, regular crops of them fill up the number.

    Raises ValueError if the paths contain no images, or none can be used.
    """
    items, unreadable = find_images(inputs)
    items = [items[place] for place in evenly(len(items), count).tolist()]
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
    images: list[Image.Image], transform: Transform, count: int, shown: int, about: str, unreadable: list[str]
) -> AnalyzedImages:
    whole = stacked([transform(image) for image in images[:shown]])
    if len(images) >= count:
        return AnalyzedImages(whole, stacked([transform(image) for image in images[:count]]), f"{about}.", unreadable)
    each = math.ceil(count / len(images))
    many = stacked([transform(crop) for image in images for crop in crops(image, each)])
    words = f"{about}, and for averages {len(many)} regular crops of them (squares of half the shorter side)."
    return AnalyzedImages(whole, many, words, unreadable)
