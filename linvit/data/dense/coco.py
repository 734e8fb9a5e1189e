"""COCO's layout: objects with boxes and masks, and panoptic annotations, read as a class for each pixel."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linvit.data.dense.annotations import (
    FILE_NAME,
    ID,
    LIST,
    NAME,
    Annotations,
    check_fields,
    names_by_id,
    read_annotations,
    read_lists,
)
from linvit.data.dense.label_maps import MapSource, Pair, read_pixels
from linvit.data.dense.objects import ObjectSource
from linvit.data.dense.transforms import IGNORED
from linvit.data.images.image import CorruptImageError
from linvit.errors import SettingError
from linvit.files import user_path

SPLITS = {"train": ("train2017", "train"), "val": ("val2017", "val", "valid")}
ROBOFLOW = "_annotations.coco.json"  # beside the images of a split
SINGLE = {"annotations/instances_default.json": "images", "result.json": "."}
"""The file that CVAT and Label Studio write for data without splits, and the folder of its images."""
PANOPTIC = {
    "images": {"id": ID, "file_name": FILE_NAME},
    "annotations": {"image_id": ID, "file_name": FILE_NAME, "segments_info": LIST},
    "categories": {"id": ID, "name": NAME},
}
SEGMENT = {"id": ID, "category_id": ID}


class Coco(ObjectSource):
    """Objects in COCO's format.

    root: folder with annotations/instances_train2017.json (or …_train.json) and the images in train2017, train,
    images/train2017 or images/train; the same for val; or with train/_annotations.coco.json and the images beside it,
    and valid/. train, val: other annotation files; train_images, val_images: the folders of their images; all of them
    relative to root. class_names: fixes the order of the classes; by default it is
    that of the category ids. options: see ObjectSource.
    """

    def __init__(
        self,
        root: str,
        *,
        train: str | None = None,
        val: str | None = None,
        train_images: str | None = None,
        val_images: str | None = None,
        **options: Any,
    ) -> None:
        self.files, self.folders = {"train": train, "val": val}, {"train": train_images, "val": val_images}
        super().__init__(root, **options)

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        about = {"name": "coco", "root": str(root)}
        for file, images in SINGLE.items():
            if (root / file).exists() and (root / "images").is_dir():
                return about | {"train": file, "train_images": images}
        return about if any([*root.glob("annotations/instances_*.json"), *root.glob(f"*/{ROBOFLOW}")]) else None

    def file(self, split: str) -> Path:
        """The annotation file of a split, whether or not it exists."""
        file = self.files[split]
        return self.root / user_path(file) if file else find_file(self.root, split, "instances")

    def read(self, split: str, class_names: list[str] | None) -> Annotations:
        return read_annotations(self.file(split), self.needs_masks, class_names)

    def folder(self, split: str) -> Path:
        folder = self.folders[split]
        return self.root / user_path(folder) if folder else find_images(self.root, split)

    def first_split(self) -> str:
        return "val" if os.path.exists(self.file("val")) else "train"


class CocoPanoptic(MapSource):
    """Panoptic annotations of COCO as label maps: objects and surroundings are classes alike.

    root: folder with annotations/panoptic_train2017.json and the maps in annotations/panoptic_train2017/ (or …_train);
    the same for val. images: folder of the images, in train2017, train, images/train2017 or images/train; by default
    root. Pixels without a segment (0 in the maps) are ignored. class_names: fixes the order of the classes; by default
    it is that of the category ids. options: see MapSource.
    """

    def __init__(
        self, root: str, *, images: str | None = None, class_names: list[str] | None = None, **options: Any
    ) -> None:
        super().__init__(root, **options)
        self.image_root = user_path(images) if images else self.root
        path = find_file(self.root, "val", "panoptic")
        path = path if os.path.exists(path) else find_file(self.root, "train", "panoptic")
        self.class_names = class_names or list(names_by_id(read_lists(path, PANOPTIC)["categories"]).values())
        self.check_classes()
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
        content = read_lists(path, PANOPTIC)
        names = names_by_id(content["categories"])
        folder, maps = find_images(self.image_root, split), path.with_suffix("")
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
            for segment in entry["segments_info"]:
                check_fields(f"{path}: a segment of image {image['id']}", segment, SEGMENT)
            strange = [item for item in entry["segments_info"] if item["category_id"] not in class_of]
            if strange:
                number = strange[0]["category_id"]
                unpaired.append(f"{path}: image {image['id']} has the unknown category {number}: correct it.")
                continue
            segments = {item["id"]: class_of[item["category_id"]] for item in entry["segments_info"]}
            pairs.append(Pair(folder / image["file_name"], maps / entry["file_name"], segments))
        if not pairs:
            raise SettingError(f"{path} has no image with an annotation: set `root` to other data.")
        return pairs, unpaired


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


def find_file(root: Path, split: str, kind: str) -> Path:
    """The path of a split's annotations, whether or not there is such a file. kind: "instances" or "panoptic"."""
    paths = [root / "annotations" / f"{kind}_{name}.json" for name in SPLITS[split]]
    paths += [root / name / ROBOFLOW for name in SPLITS[split] if kind == "instances"]
    return next((path for path in paths if os.path.exists(path)), paths[0])


def find_images(root: Path, split: str) -> Path:
    """The folder of a split's images; raises ValueError if there is none."""
    folders = [folder / name for name in SPLITS[split] for folder in (root, root / "images")]
    for folder in folders:
        if folder.is_dir():
            return folder
    names = ", ".join(str(folder.relative_to(root)) for folder in folders)
    raise ValueError(f"The data folder {root} has no {split} images: expected one of the folders {names}.")
