"""Objects of one class from mask images: one file for each object, or maps with a number for each object."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linvit.data.dense.annotations import Annotations, Collected, box_around, to_runs
from linvit.data.dense.objects import HeldOutObjects
from linvit.data.disk import data_folder, files_by_name
from linvit.data.images.image import SUFFIXES, CorruptImageError, opened, size_of
from linvit.errors import SettingError

SPLITS = ("train", "val")
MAPS = (("PNGImages", "PedMasks"), ("images", "masks"))  # folders of images and of their maps
ENDINGS = ("_mask", "")  # of a map's name after that of its image
IMAGES, MASKS = "images", "masks"  # in the folder of each image
LOSSY = ("JPEG", "MPO", "WEBP", "AVIF", "JPEG2000")
WHOLE_NUMBERS = ("1", "L", "P", "I", "I;16", "I;16B")  # modes of Pillow
CLASS = "object"


class InstanceMasks(HeldOutObjects):
    """Objects of one class, whose boxes and areas are those of their masks.

    root: folder with NAME/images/*.png and NAME/masks/*.png, one mask for each object; or with PNGImages/NAME.png and
    PedMasks/NAME_mask.png (or images/NAME.png and masks/NAME.png), maps in which 0 is the background and each other
    value an object. If root contains train/ and val/, they are laid out like this. Otherwise a share held_out of the
    images is held out. class_names: the name of the class, by default "object". held_out, split, options: see
    HeldOutObjects.
    """

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        fits = any(layout_of(folder) for folder in (root, *(root / split for split in SPLITS)))
        return {"name": "instance_masks", "root": str(root)} if fits else None

    def folder(self, split: str) -> Path:
        divided = any((self.root / name).is_dir() for name in SPLITS)
        return data_folder(self.root / split) if divided else self.root

    def read(self, split: str, class_names: list[str] | None) -> Annotations:
        names = class_names or [CLASS]
        if len(names) != 1:
            raise SettingError(f"`class_names` has {len(names)} names, expected one: the masks tell no classes apart.")
        folder = self.folder(split)
        collected = Collected(names)
        pairs, collected.unusable = find_masks(folder)
        by_name = {image.relative_to(folder).as_posix(): (image, masks) for image, masks in pairs}
        for name in by_name if folder != self.root else self.divided(list(by_name), split):
            image, masks = by_name[name]
            try:
                size = size_of(image)
            except CorruptImageError as error:
                collected.unusable.append(str(error))
                continue
            collected.add_image(name, size)
            for place, mask in _masks(masks, collected.complaints):
                runs = to_runs(mask)
                collected.add_object(place, 0, bbox=list(box_around(runs)), area=int(mask.sum()), segmentation=runs)
        return collected.annotations(folder, self.needs_masks)


def layout_of(folder: Path) -> tuple[str, str] | None:
    """The folders of images and maps, ("", "") for one folder for each image, None for anything else."""
    for images, maps in MAPS:
        if (folder / images).is_dir() and (folder / maps).is_dir():
            return images, maps
    return ("", "") if any(len(files_by_name(place / IMAGES, SUFFIXES, [])) == 1 for place in _places(folder)) else None


def _places(folder: Path) -> list[Path]:
    """The folders of a folder that contain masks, sorted."""
    return sorted(path.parent for path in folder.glob(f"[!.]*/{MASKS}"))


def find_masks(folder: Path) -> tuple[list[tuple[Path, Path | list[Path]]], list[str]]:
    """Each image of a folder with its map, or with its masks; and a sentence for each image that cannot be used."""
    layout = layout_of(folder)
    if layout is None:
        raise ValueError(
            f"{folder} has no masks: expected NAME/{IMAGES} and NAME/{MASKS}, or "
            + " or ".join(f"{images} and {maps}" for images, maps in MAPS)
            + "."
        )
    unusable: list[str] = []
    pairs: list[tuple[Path, Path | list[Path]]] = []
    if layout == ("", ""):
        for place in _places(folder):
            images = files_by_name(place / IMAGES, SUFFIXES, [])
            if len(images) == 1:
                pairs.append((next(iter(images.values())), list(files_by_name(place / MASKS, SUFFIXES, []).values())))
            else:
                unusable.append(f"{place / IMAGES} has {len(images)} images, expected one: correct or remove it.")
        return pairs, unusable
    maps = files_by_name(folder / layout[1], SUFFIXES, unusable)
    for name, image in files_by_name(folder / layout[0], SUFFIXES, unusable).items():
        file = next((maps[name + ending] for ending in ENDINGS if name + ending in maps), None)
        if file:
            pairs.append((image, file))
        else:
            unusable.append(f"{image} has no map {folder / layout[1] / name}{ENDINGS[0]}.png: add or remove one.")
    return pairs, unusable


def _masks(files: Path | list[Path], complaints: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """(place, mask) of each object, boolean (height, width); files that cannot be read become complaints."""
    is_map = isinstance(files, Path)
    for file in [files] if isinstance(files, Path) else files:
        try:
            values = read_values(file, lossless=is_map)
        except CorruptImageError as error:
            complaints.append(str(error))
            continue
        if is_map:
            yield from ((f"{file}, object {value}", values == value) for value in np.unique(values).tolist() if value)
        else:
            yield str(file), values > values.max() / 2  # the border of an object may be blurred


def read_values(path: Path, lossless: bool = False) -> np.ndarray:
    """The values of a map of objects (lossless) or of the mask of one, (height, width), with 0 for the background.

    Images of one channel have their own values. Of other images, a map has a number for each colour, and 0 where it is
    transparent; a mask has the opacity if that varies, otherwise the brightest channel.

    Raises CorruptImageError, naming the file, if it cannot be read, or is a map in a lossy format.
    """
    with opened(path, "mask") as image:
        image.load()
        if lossless and image.format in LOSSY:
            raise ValueError(f"{image.format} changes the numbers of the objects, expected a PNG")
        if image.mode in WHOLE_NUMBERS:
            return np.asarray(image)
        *colours, alpha = np.moveaxis(np.asarray(image.convert("RGBA")).astype(np.int64), 2, 0)
        brightness: np.ndarray = alpha if alpha.min() < alpha.max() else np.max(colours, 0)
        numbers = np.where(alpha > 0, colours[0] + 256 * colours[1] + 256**2 * colours[2], 0)
        return numbers if lossless else brightness
