"""The images that an analysis looks at: held-out data of a run, files of the user, or two photos, cut up if few."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from linvit.analysis.scores import evenly
from linvit.data import Preprocessing, Source
from linvit.data.images.image import SMALLEST, CorruptImageError, open_image
from linvit.runs.predict import find_images

PHOTOS = ("china.jpg", "flower.jpg")
CROP_SHARE = 0.5  # a crop's side over the picture's shorter side


@dataclass(frozen=True)
class Pictures:
    """Normalized images, as a network takes them.

    whole: a few whole pictures, to be shown; many: what is averaged over; both (images, channels, height, width).
    about: a sentence on where they come from. complaints: a sentence for each file that was left out.
    """

    whole: Tensor
    many: Tensor
    about: str
    complaints: list[str]


def from_source(source: Source, count: int, shown: int) -> Pictures:
    """Images of the held-out part, evenly chosen, `count` of them or all that there are.

    Raises:
        ValueError: if none can be read.
    """
    dataset = source.val_set()
    items = [dataset[place] for place in evenly(len(dataset), count).tolist()]  # type: ignore[arg-type]
    images = [item[0] for item in items if not isinstance(item, str)]
    if not images:
        raise ValueError("The data has no readable image in it: nothing can be looked at.")
    many = torch.stack(images)
    about = f"{len(many)} held-out images of {type(source).__name__}, evenly chosen"
    whole = many[:: max(1, len(many) // shown)][:shown]
    return Pictures(whole, many, f"{about}.", [item for item in items if isinstance(item, str)])


def from_files(paths: Sequence[str | Path], preprocessing: Preprocessing, count: int, shown: int) -> Pictures:
    """Image files and folders, evenly chosen; where there are fewer than `count`, as many regular crops of them.

    Raises:
        ValueError: for paths without images, and if none of the files can be used.
    """
    files = find_images(paths)
    files = [files[place] for place in evenly(len(files), count).tolist()]
    pictures: list[Image.Image] = []
    complaints: list[str] = []
    for file in files:
        try:
            pictures.append(_large_enough(open_image(file, preprocessing.channels), file))
        except CorruptImageError as error:
            complaints.append(str(error))
    if not pictures:
        raise ValueError(f"None of the {len(files)} image files can be used, the first because {complaints[0]}")
    return _arranged(pictures, preprocessing, count, shown, f"{len(pictures)} image files", complaints)


def from_photos(preprocessing: Preprocessing, count: int, shown: int) -> Pictures:
    """The two photos that come with scikit-learn, and regular crops of them."""
    from sklearn.datasets import load_sample_image

    pictures = [Image.fromarray(load_sample_image(name)) for name in PHOTOS]
    if preprocessing.channels == 1:
        pictures = [picture.convert("L") for picture in pictures]
    return _arranged(pictures, preprocessing, count, shown, f"scikit-learn's photos {' and '.join(PHOTOS)}", [])


def crops(picture: Image.Image, count: int) -> list[Image.Image]:
    """At least `count` squares of half the picture's shorter side, on a regular grid that reaches every edge."""
    side = max(1, round(CROP_SHARE * min(picture.size)))
    width, height = picture.size
    rows = max(1, math.floor(math.sqrt(count * height / width)))
    columns = math.ceil(count / rows)
    lefts = [round(x) for x in torch.linspace(0, width - side, columns).tolist()]
    tops = [round(y) for y in torch.linspace(0, height - side, rows).tolist()]
    return [picture.crop((left, top, left + side, top + side)) for top in tops for left in lefts]


def _arranged(
    pictures: list[Image.Image],
    preprocessing: Preprocessing,
    count: int,
    shown: int,
    about: str,
    complaints: list[str],
) -> Pictures:
    transform = preprocessing.transform()
    whole = torch.stack([transform(picture) for picture in pictures[:shown]])
    if len(pictures) >= count:
        return Pictures(whole, torch.stack([transform(one) for one in pictures[:count]]), f"{about}.", complaints)
    each = math.ceil(count / len(pictures))
    cut = [transform(crop) for picture in pictures for crop in crops(picture, each)]
    told = f"{about}, and for averages {len(cut)} regular crops of them (squares of half the shorter side)."
    return Pictures(whole, torch.stack(cut), told, complaints)


def _large_enough(picture: Image.Image, file: Path) -> Image.Image:
    width, height = picture.size
    if min(width, height) < SMALLEST:
        raise CorruptImageError(
            f"{file} is {height}×{width} px, but at least {SMALLEST}×{SMALLEST} px are needed to see anything in it:"
            " leave it out or take a larger one."
        )
    return picture
