"""Folders of image files: CLASS/*.jpg, a share of them held out, or as ImageNet train/CLASS and val/CLASS."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.image import CorruptImageError, open_image
from linvit.data.source import held_out_of
from linvit.ranges import Seed, Share

SPLITS = ("train", "val")


class ImageFolder(AugmentedSource):
    """Image files under one folder per class, augmented by timm's transforms while training.

    Args:
        root: Folder that holds either the class folders, or train/ and val/ with the class folders in each (for
            evaluation val/ alone will do).
        class_names: Fixes the order of the classes, else it is that of the training folders.
        held_out: Share of each class that is never trained on, where root has neither train/ nor val/; 1 holds out all,
            for evaluation.
        split: Seed that chooses those images by their names, the same on every machine; independent of the run's seed.
        options: See AugmentedSource.

    Raises ValueError for a missing folder, a class folder without images, a class folder that is none of the classes,
    and a share that leaves nothing to train on or to hold out.
    """

    def __init__(
        self,
        root: str,
        class_names: list[str] | None = None,
        held_out: Share = 0.2,
        split: Seed = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.root = Path(root)
        self.held_out = held_out
        self.split = split
        self.class_names = class_names or _class_names(self._folder("train" if self._has("train") else "val"))

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        return ImageFiles(self.files(split), transform, self.channels)

    def files(self, split: str) -> list[tuple[str, int]]:
        """(path, class) of every image file of "train" or "val"."""
        folder = self._folder(split)
        files = _files_by_class(folder) if self.divided else self._divide()[split]
        if not files:
            count = sum(map(len, self._undivided.values()))
            use = "to train on" if split == "train" else "held out"
            raise ValueError(
                f"The data folder {folder} has {count} images, but none of them is {use}: set `held_out` between 0 and"
                " 1, or add images."
            )
        place = dict(zip(files, self.places(list(files), folder), strict=True))
        return [(str(path), place[name]) for name, paths in files.items() for path in paths]

    @property
    def divided(self) -> bool:
        """Whether the folder itself says what is held out, by train/ or val/."""
        return any(map(self._has, SPLITS))

    def digest(self) -> str | None:
        """The same for the same file names and the same split; None for a folder that is divided itself."""
        if self.divided:
            return None
        names = [
            f"{split} {path.relative_to(self.root).as_posix()}"
            for split, files in self._divide().items()
            for paths in files.values()
            for path in paths
        ]
        return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()

    def _divide(self) -> dict[str, dict[str, list[Path]]]:
        """The files of both splits by class, a share of each class held out."""
        splits: dict[str, dict[str, list[Path]]] = {split: {} for split in SPLITS}
        for name, paths in self._undivided.items():
            names = {path.relative_to(self.root).as_posix(): path for path in paths}
            held_out = held_out_of(list(names), self.held_out, self.split)
            for relative, path in names.items():
                splits[SPLITS[relative in held_out]].setdefault(name, []).append(path)
        return splits

    @cached_property
    def _undivided(self) -> dict[str, list[Path]]:
        return _files_by_class(self.root)

    def _has(self, split: str) -> bool:
        return (self.root / split).is_dir()

    def _folder(self, split: str) -> Path:
        if not self.root.is_dir():
            wrong = "is a file" if self.root.exists() else "does not exist"
            raise ValueError(
                f"The data folder {self.root} {wrong}: set `root` to a folder with class folders in it, or with train/"
                " and val/ and the class folders in each."
            )
        if not self.divided:
            return self.root
        if not self._has(split):
            raise ValueError(f"The data folder {self.root} has no {split}/ in it: expected {split}/CLASS/image files.")
        return self.root / split


@dataclass(eq=False)
class ImageFiles(Dataset[Any]):
    """(image, target) of pairs (path, target); a sentence that names the file where it is unreadable."""

    files: Sequence[tuple[str, Any]]
    transform: Callable[[Any], Tensor]
    channels: int

    def __getitem__(self, index: int) -> tuple[Tensor, Any] | str:
        path, target = self.files[index]
        try:
            return self.transform(open_image(path, self.channels)), target
        except CorruptImageError as error:
            return str(error)

    def __len__(self) -> int:
        return len(self.files)


def _class_names(folder: Path) -> list[str]:
    """Sorted as ImageNet's class indices are; folders named by numbers (ImageNet-V2) are sorted as numbers."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if not names:
        raise ValueError(f"{folder} has no class folders in it: expected one folder per class, with image files in it.")
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class folder, at any depth, sorted; raises ValueError for a class that has none."""
    files = {
        name: sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        for name in _class_names(folder)
    }
    empty = [name for name, paths in files.items() if not paths]
    if empty:
        raise ValueError(
            f"The class folder {folder / empty[0]} has no image files in it: add images"
            f" ({', '.join(IMG_EXTENSIONS[:3])} …) or remove the class."
        )
    return files
