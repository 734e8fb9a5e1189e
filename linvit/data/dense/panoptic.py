"""COCO's panoptic annotations, read as a class for each pixel: a .json file and maps of segment numbers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linvit.data.dense.coco import SPLITS, find_file, find_images
from linvit.data.dense.label_maps import MapSource, Pair, read_pixels
from linvit.data.dense.transforms import IGNORED
from linvit.data.disk import read_json, stays_inside
from linvit.data.images.image import CorruptImageError, Side
from linvit.files import user_path
from linvit.ranges import allows, shown

FIELDS: dict[str, dict[str, Any]] = {
    "categories": {"id": int, "name": str},
    "images": {"id": int, "file_name": str},
    "annotations": {"image_id": int, "file_name": str, "segments_info": list[dict[str, Any]]},
}
SEGMENT = {"id": int, "category_id": int}


class CocoPanoptic(MapSource):
    """Panoptic annotations of COCO as label maps: objects and surroundings are classes alike.

    root: folder with annotations/panoptic_train2017.json and the maps in annotations/panoptic_train2017/ (or …_train);
    the same for val. images: folder of the images, in train2017, train, images/train2017 or images/train; by default
    root. Pixels without a segment (0 in the maps) are ignored. class_names: fixes the order of the classes; by default
    it is that of the category ids. options: see MapSource.

    Raises ValueError for files that are missing, and for annotations that cannot be used.
    """

    def __init__(
        self,
        root: str,
        long_side: Side = 2048,
        short_side: Side = 512,
        images: str | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, long_side, short_side, **options)
        self.image_root = user_path(images) if images else self.root
        path = find_file(self.root, "val", "panoptic")
        path = path if os.path.exists(path) else find_file(self.root, "train", "panoptic")
        self.class_names = class_names or list(names_of(read_panoptic_json(path)).values())
        self.check_number()
        self.labels = list(range(1, self.num_classes + 1))
        self.read_labels = read_panoptic

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        if not any((root / "annotations").glob("panoptic_*.json")):
            return None
        about = {"name": "coco_panoptic", "root": str(root)}
        above = root.parent / "images"
        inside = any((folder / name).is_dir() for folder in (root, root / "images") for name in SPLITS["val"])
        return about if inside or not above.is_dir() else about | {"images": str(above)}

    def find_pairs(self, split: str) -> tuple[list[Pair], list[str]]:
        path = find_file(self.root, split, "panoptic")
        content = read_panoptic_json(path)
        folder, maps = find_images(self.image_root, split), path.with_suffix("")
        names = names_of(content)
        odd = sorted(set(names.values()) - set(self.class_names))
        if odd:
            raise ValueError(
                f"{path} has the category {odd[0]!r}, which the {self.num_classes} classes known here lack: use files"
                " with the same categories."
            )
        class_of = {number: self.class_names.index(name) for number, name in names.items()}
        annotations = {entry["image_id"]: entry for entry in content["annotations"]}
        pairs, unpaired = [], []
        for image in sorted(content["images"], key=lambda image: image["file_name"]):
            entry = annotations.get(image["id"])
            if entry is None:
                unpaired.append(f"{path}: image {image['id']} has no annotation: add one, or remove the image.")
                continue
            strange = [item for item in entry["segments_info"] if item["category_id"] not in class_of]
            if strange:
                number = strange[0]["category_id"]
                unpaired.append(f"{path}: image {image['id']} has the unknown category {number}: correct it.")
                continue
            segments = {item["id"]: class_of[item["category_id"]] for item in entry["segments_info"]}
            pairs.append(Pair(folder / image["file_name"], maps / entry["file_name"], segments))
        if not pairs:
            raise ValueError(f"{path} has no image with an annotation: set `root` to other data.")
        return pairs, unpaired


def read_panoptic_json(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The categories, images and annotations of a panoptic file; raises ValueError, naming the entry, if one is bad."""
    if not os.path.exists(path):
        raise ValueError(f"The annotation file {path} does not exist: check the path.")
    content = read_json(path)
    for name, fields in FIELDS.items():
        entries = content.get(name) if isinstance(content, dict) else None
        if not allows(list[dict[str, Any]], entries):
            raise ValueError(f"{path} has no list {name!r}: expected COCO's panoptic format with {', '.join(FIELDS)}.")
        for number, entry in enumerate(entries or []):
            wrong = _wrong(entry, fields)
            if wrong:
                raise ValueError(f"{path}: entry {number} of {name} has {wrong}: correct it.")
    names = [entry["name"] for entry in content["categories"]]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path} has {len(names)} categories, expected one or more, each with a name of its own.")
    return {name: content[name] for name in FIELDS}


def names_of(content: Mapping[str, list[dict[str, Any]]]) -> dict[int, str]:
    """The names of the categories by their ids, in the order of the ids."""
    return dict(sorted((entry["id"], entry["name"]) for entry in content["categories"]))


def _wrong(entry: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """The first field of an entry that cannot be used, in words; "" if there is none."""
    for key, kind in fields.items():
        value = entry.get(key)
        if not allows(kind, value) or (kind is str and not isinstance(value, str)):
            return f"{shown(value)} as {key}"
        if key == "file_name" and not stays_inside(str(value)):
            return f"{shown(value)} as {key}, expected a path inside the folder"
        if key == "segments_info":
            return next(filter(None, (_wrong(item, SEGMENT) for item in value or [])), "")
    return ""


def read_panoptic(pair: Pair) -> Tensor:
    """The classes of a panoptic map, uint8 (height, width); 255 where there is no segment.

    A pixel's segment is red + 256 green + 65,536 blue. Raises CorruptImageError, naming the file.
    """
    mode, values = read_pixels(pair.map)
    if mode not in ("RGB", "RGBA"):
        raise CorruptImageError(f"{pair.map} has the mode {mode}, expected RGB: save the segments as an RGB PNG.")
    numbers = values[..., :3].astype(np.int64) @ np.array([1, 256, 256**2])
    present, places = np.unique(numbers, return_inverse=True)
    unknown = [number for number in present.tolist() if number and number not in pair.segments]
    if unknown:
        raise CorruptImageError(
            f"{pair.map} has the segment {unknown[0]}, which its annotation does not list: use files that belong"
            " together."
        )
    classes = np.array([pair.segments.get(number, IGNORED) for number in present.tolist()], np.uint8)
    return torch.from_numpy(classes[places].reshape(numbers.shape))
