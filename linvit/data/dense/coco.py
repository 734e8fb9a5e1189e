"""Objects with boxes and masks, in COCO's layout: image folders and annotations/instances_*.json."""

import os
from pathlib import Path
from typing import Any

from linvit.data.dense.annotations import Annotations, read_annotations
from linvit.data.dense.objects import ObjectSource

SPLITS = {"train": ("train2017", "train"), "val": ("val2017", "val")}


class Coco(ObjectSource):
    """Objects in COCO's format.

    root: folder with annotations/instances_train2017.json (or …_train.json) and the images in train2017, train,
    images/train2017 or images/train; the same for val. class_names: fixes the order of the classes; by default it is
    that of the category ids. options: see ObjectSource.

    Raises ValueError for files that are missing or cannot be used.
    """

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        if not any((root / "annotations").glob("instances_*.json")):
            return None
        return {"name": "coco", "root": str(root)}

    def read(self, split: str, class_names: list[str] | None) -> Annotations:
        return read_annotations(find_file(self.root, split), self.needs_masks, class_names)

    def folder(self, split: str) -> Path:
        return find_images(self.root, split)

    def first_split(self) -> str:
        return "val" if os.path.exists(find_file(self.root, "val")) else "train"


def find_file(root: Path, split: str) -> Path:
    """The path annotations/instances_*.json of a split, whether or not there is such a file."""
    if not root.is_dir():
        raise ValueError(f"The data folder {root} does not exist: set `root` to a folder in COCO's layout.")
    paths = [root / "annotations" / f"instances_{name}.json" for name in SPLITS[split]]
    return next((path for path in paths if os.path.exists(path)), paths[0])


def find_images(root: Path, split: str) -> Path:
    """The folder of a split's images; raises ValueError if there is none."""
    folders = [folder / name for name in SPLITS[split] for folder in (root, root / "images")]
    for folder in folders:
        if folder.is_dir():
            return folder
    names = ", ".join(str(folder.relative_to(root)) for folder in folders)
    raise ValueError(f"The data folder {root} has no {split} images: expected one of the folders {names}.")
