"""Folders of image files: CLASS/*.jpg, a share of them held out, or as ImageNet train/CLASS and val/CLASS.

Tiny ImageNet's validation images, all in one folder with a table of their classes, are read too; and images without
labels, every image file below a folder.
"""

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.disk import data_folder, files_below, none_usable, read_text, say_unread, stays_inside
from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.image import SUFFIXES, CorruptImageError, naming, open_image, size_of
from linvit.data.source import check_split, listed, of_split
from linvit.errors import SettingError, quoted
from linvit.ranges import Seed, Share

SPLITS = ("train", "val")
TABLE = "val_annotations.txt"  # of Tiny ImageNet: file, class and box of each image, separated by tabs
LONGEST = 256  # pixels of a measured image's longer side: networks see it smaller too
LEAST_STD = 0.02  # images of a single colour have a deviation of zero

logger = logging.getLogger(__name__)


class ImageFolder(AugmentedSource):
    """Image files under one folder per class, augmented by timm's transforms while training.

    Args:
        root: Folder that contains either the class folders, or train/ and val/ with the class folders in each (for
            evaluation val/ is enough). As in Tiny ImageNet, val/ may contain images/ and val_annotations.txt instead.
        class_names: Fixes the order of the classes; by default it is that of the training folders.
        held_out: Share of each class that is never trained on, if root has neither train/ nor val/; 1 holds out all,
            for evaluation.
        split: Seed that chooses those images by their names, the same on every machine; independent of the run's seed.
        options: See AugmentedSource.
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
        self.root = data_folder(
            root, "a folder with class folders in it, or with train/ and val/ and the class folders in each"
        )
        self.held_out, self.split = held_out, split
        folder = self._folder("train" if self._has("train") else "val")
        self.class_names = class_names or _class_names(folder)
        if len(self.class_names) < 2:
            raise ValueError(
                f"{folder} has one class, {self.class_names[0]!r}, expected two or more: add class folders."
            )
        stray = [path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
        if stray := sorted(name for name in stray if not name.startswith(".")):
            said = "%d image files next to the class folders of %s are not used: %s"
            logger.warning(said, len(stray), folder, listed(stray))

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        fits = any(files_below(root / name, SUFFIXES) for name in _folders(root))
        return {"name": "imagefolder", "root": str(root)} if fits else None

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        return ImageFiles(self.files(split), transform, self.channels)

    def files(self, split: str) -> list[tuple[str, int]]:
        """(path, class) of every image file of "train" or "val"."""
        folder = self._folder(split)
        files = _files_by_class(folder) if self.divided else self._divide()[split]
        count = sum(map(len, (files or self._undivided).values()))
        check_split(split, files, f"The data folder {folder} has {count} images")
        place = dict(zip(files, self.places(list(files), folder), strict=True))
        return [(str(path), place[name]) for name, paths in files.items() for path in paths]

    @cached_property
    def divided(self) -> bool:
        """Whether the folder says what is held out: by train/ and val/, or by one of them and no other folder."""
        present = [split for split in SPLITS if self._has(split)]
        others = [name for name in _folders(self.root) if name not in SPLITS]
        if len(present) != 1 or not others:
            return bool(present)
        if not _folders(self.root / present[0]):
            return False  # a class of that name
        (missing,) = set(SPLITS) - set(present)
        raise ValueError(
            f"The data folder {self.root} has {present[0]}/ with class folders in it, but no {missing}/ next to it,"
            f" only {listed(others)}: rename one of these folders to {missing}, or move them elsewhere."
        )

    def digest(self) -> str | None:
        """A hash of the file names of both splits; None if the folder has train/ and val/."""
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
        """The files of each split by class, with a share of each class held out."""
        splits: dict[str, dict[str, list[Path]]] = {split: {} for split in SPLITS}
        for name, paths in self._undivided.items():
            names = {path.relative_to(self.root).as_posix(): path for path in paths}
            for split, files in splits.items():
                if chosen := of_split(list(names), split, self.held_out, self.split):
                    files[name] = [names[relative] for relative in chosen]
        return splits

    @cached_property
    def _undivided(self) -> dict[str, list[Path]]:
        return _files_by_class(self.root)

    def _has(self, split: str) -> bool:
        return (self.root / split).is_dir()

    def _folder(self, split: str) -> Path:
        if not self.divided:
            return self.root
        if not self._has(split):
            raise ValueError(f"The data folder {self.root} has no {split}/ in it: expected {split}/CLASS/image files.")
        return self.root / split


class UnlabelledImages(AugmentedSource):
    """Batches (images, zeros) of all image files below a folder, at any depth.

    Args:
        root: The folder. If it contains train/ and val/, these are the splits.
        held_out: Share of the images to validate on, if root is not divided; 1 holds out all, for evaluation.
        split: Seed that chooses those images by their names, the same on every machine; independent of the run's seed.
        options: See AugmentedSource.
    """

    task = "alignment"

    def __init__(self, root: str, held_out: Share = 0.05, split: Seed = 0, **options: Any) -> None:
        super().__init__(**options)
        self.root = data_folder(root, "a folder with images in it")
        self.held_out, self.split = held_out, split
        self.class_names: list[str] = []

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        return ImageFiles([(str(path), 0) for path in self.files(split)], transform, self.channels)

    def files(self, split: str) -> list[Path]:
        """Every image file of "train" or "val", sorted."""
        divided = all((self.root / name).is_dir() for name in SPLITS)
        folder = self.root / split if divided else self.root
        others = Counter[str]()
        files = files_below(folder, SUFFIXES, others)
        if not files:
            raise SettingError(
                f"The data folder {folder} has no image files in it ({', '.join(SUFFIXES[:3])} …), at no depth:"
                " add images, or set `root` to another folder."
            )
        say_unread(folder, others)
        if divided:
            return files
        names = {path.relative_to(self.root).as_posix(): path for path in files}
        chosen = of_split(list(names), split, self.held_out, self.split)
        check_split(split, chosen, f"The data folder {self.root} has {len(files)} images")
        return [names[name] for name in chosen]


@dataclass(eq=False)
class ImageFiles(Dataset[Any]):
    """(image, target) for each pair (path, target); a sentence that names the file if it is unreadable."""

    files: Sequence[tuple[str, Any]]
    transform: Callable[[Any], Tensor]
    channels: int

    def __getitem__(self, index: int) -> tuple[Tensor, Any] | str:
        path, target = self.files[index]
        try:
            return self.transform(open_image(path, self.channels)), target
        except CorruptImageError as error:
            return naming(error, path)

    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each image, from the headers of the files; (0, 0) of one that is unreadable."""
        sizes = dict.fromkeys((path for path, _ in self.files), (0, 0))
        for path in sizes:
            with contextlib.suppress(CorruptImageError):  # reading the image says what is wrong
                sizes[path] = size_of(path)
        return [sizes[path] for path, _ in self.files]

    def __len__(self) -> int:
        return len(self.files)


def _class_names(folder: Path) -> list[str]:
    """Sorted like ImageNet's class indices; folders named by numbers (ImageNet-V2) are sorted as numbers."""
    names = sorted(set(_table(folder).values())) if (folder / TABLE).exists() else _folders(folder)
    if not names:
        raise ValueError(f"{folder} has no class folders in it: expected one folder per class, with image files in it.")
    return sorted(names, key=lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else names


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class, sorted; raises ValueError for a class folder that has none at any depth."""
    if (folder / TABLE).exists():
        tabled: dict[str, list[Path]] = {}
        for file, name in sorted(_table(folder).items()):
            tabled.setdefault(name, []).append(folder / "images" / file)
        return tabled
    others = Counter[str]()
    files = {name: files_below(folder / name, SUFFIXES, others) for name in _class_names(folder)}
    empty = [name for name, paths in files.items() if not paths]
    if empty:
        raise ValueError(
            f"The class folder {folder / empty[0]} has no image files in it: add images"
            f" ({', '.join(SUFFIXES[:3])} …) or remove the class."
        )
    say_unread(folder, others)
    return files


def _table(folder: Path) -> dict[str, str]:
    """File name → class of the images of a folder like Tiny ImageNet's val/; raises ValueError for a bad line."""
    table: dict[str, str] = {}
    for number, line in enumerate(read_text(folder / TABLE).splitlines(), start=1):
        file, _, rest = line.partition("\t")
        name = rest.split("\t")[0]
        if not name or not stays_inside(file) or file in table:
            raise ValueError(
                f"{folder / TABLE}, line {number} is {quoted(line)}, expected the name of an image that no line before"
                " has and its class, separated by a tab: correct it."
            )
        table[file] = name
    return table


@dataclass(frozen=True)
class Survey:
    """Counts of a folder of images, and measurements of a sample of its training images.

    counts: number of training images per class. held_out: number of validation images. sampled: size of the sample.
    side: median of the shorter sides in pixels. mean, std: per channel (RGB) in 0..1. unreadable: a sentence for each
    image of the sample that cannot be read.
    """

    counts: dict[str, int]
    held_out: int
    sampled: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unreadable: list[str]


def survey(source: ImageFolder, sample: int = 256) -> Survey:
    """Counts the images of a folder and measures up to `sample` training images, evenly chosen over the classes."""
    files = source.files("train")
    counts = Counter(source.class_names[place] for _, place in files)
    chosen = [files[place * len(files) // sample][0] for place in range(sample)] if len(files) > sample else None
    paths = chosen or [path for path, _ in files]
    sides, means, squares, unreadable = [], [], [], []
    for path in paths:
        try:
            image = open_image(path)
        except CorruptImageError as error:
            unreadable.append(str(error))
            continue
        sides.append(min(image.size))
        image.thumbnail((LONGEST, LONGEST))
        pixels = np.asarray(image, np.float64).reshape(-1, 3) / 255
        means.append(pixels.mean(0))
        squares.append((pixels**2).mean(0))
    if not sides:
        raise none_usable(unreadable, "sampled image")
    mean = np.mean(means, 0)
    std = np.sqrt(np.maximum(np.mean(squares, 0) - mean**2, LEAST_STD**2))
    mean, std = (tuple(round(float(value), 4) for value in values) for values in (mean, std))
    return Survey(dict(counts), len(source.files("val")), len(paths), round(median(sides)), mean, std, unreadable)
