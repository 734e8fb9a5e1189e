"""Objects with boxes and masks, in COCO's layout: image folders and annotations/instances_*.json."""

import os
from pathlib import Path
from typing import Any

from linvit.data.dense.annotations import Annotations, read_annotations
from linvit.data.dense.objects import ObjectSource
from linvit.data.images.image import Side
from linvit.errors import SettingError
from linvit.files import user_path

SPLITS = {"train": ("train2017", "train"), "val": ("val2017", "val", "valid")}
ROBOFLOW = "_annotations.coco.json"  # beside the images of a split
SINGLE = {"annotations/instances_default.json": "images", "result.json": "."}
"""The file that CVAT and Label Studio write for data without splits, and the folder of its images."""


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
        long_side: Side = 1333,
        short_side: Side = 800,
        train: str | None = None,
        val: str | None = None,
        train_images: str | None = None,
        val_images: str | None = None,
        **options: Any,
    ) -> None:
        self.files, self.folders = {"train": train, "val": val}, {"train": train_images, "val": val_images}
        super().__init__(root, long_side, short_side, **options)

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


def find_file(root: Path, split: str, kind: str) -> Path:
    """The path of a split's annotations, whether or not there is such a file. kind: "instances" or "panoptic"."""
    if not root.is_dir():
        raise SettingError(f"The data folder {root} does not exist: set `root` to a folder in COCO's layout.")
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
