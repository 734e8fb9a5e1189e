"""Folders of image files in ImageNet's layout: root/train/CLASS/*.jpg and root/val/CLASS/*.jpg."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.image import CorruptImageError, open_image


class ImageFolder(AugmentedSource):
    """Image files under one folder per class, augmented by timm's transforms while training.

    root: folder that holds train/ and val/ (for evaluation, val/ or the class folders alone will do). class_names:
    fixes the order of the classes, else it is that of the training folders. options: see AugmentedSource. Raises
    ValueError for a missing folder, a class folder without images, and a class folder that is none of the classes.
    """

    def __init__(self, root: str, class_names: list[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root)
        self.class_names = class_names or _class_names(self._folder("train" if self._has("train") else "val"))

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        return ImageFiles(self.files(split), transform, self.channels)

    def files(self, split: str) -> list[tuple[str, int]]:
        """(path, class) of every image file of "train" or "val"."""
        folder = self._folder(split)
        names = _class_names(folder)
        files = []
        for name, place in zip(names, self.places(names, folder), strict=True):
            paths = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
            if not paths:
                raise ValueError(
                    f"The class folder {folder / name} has no image files in it: add images"
                    f" ({', '.join(IMG_EXTENSIONS[:3])} …) or remove the class."
                )
            files += [(str(path), place) for path in paths]
        return files

    def _has(self, split: str) -> bool:
        return (self.root / split).is_dir()

    def _folder(self, split: str) -> Path:
        if not self.root.is_dir():
            raise ValueError(
                f"The data folder {self.root} does not exist: set `root` to a folder with train/ and val/ in it."
            )
        if split == "val" and not (self._has("train") or self._has("val")):
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
