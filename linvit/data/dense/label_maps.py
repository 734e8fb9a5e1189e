"""Images with label maps: images of one channel whose values are classes, in several layouts and in ADE20K's."""

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from linvit.data.dense.source import DenseSource, read_image
from linvit.data.dense.transforms import IGNORED, PadTo, PhotometricDistortion, Resize, VariedCrop, normalize
from linvit.data.disk import data_folder, files_by_name, read_lines, warn_or_raise
from linvit.data.images.image import SUFFIXES, CorruptImageError, Side, opened
from linvit.data.source import Content, Contents, listed, untrained, untransformed
from linvit.errors import SettingError, refuse
from linvit.files import user_path
from linvit.ranges import Range, Share

LAYOUTS: tuple[tuple[str, str], ...] = (
    ("{}", "{}annot"),
    ("images/{}", "annotations/{}"),
    ("images/{}", "labels/{}"),
    ("images/{}", "masks/{}"),
    ("{}/images", "{}/annotations"),
    ("{}/images", "{}/labels"),
    ("{}/images", "{}/masks"),
)
ADE20K_SPLITS = {"train": "training", "val": "validation"}
ADE20K_CLASSES = 150
CLASSES_FILE = "classes.txt"
MODES = ("1", "L", "P", "I;16", "I;16B")  # of one channel of whole numbers
PEEKED = 100  # maps whose labels are read to find the number of classes, and classes that no map has

logger = logging.getLogger(__name__)
Factor = Annotated[float, Range(above=0, most=10)]
Label = Annotated[int, Range(0, IGNORED)]
NumLabels = Annotated[int, Range(1, IGNORED - 1)]


class Pair(NamedTuple):
    """An image and its map. segments: the class of each segment of a panoptic map, by its number."""

    image: Path
    map: Path
    segments: Mapping[int, int] = {}


class MapSource(DenseSource):
    """Batches (images, maps): float32 (batch, 3, height, width) and int64 (batch, height, width), 255 where ignored.

    Training images are scaled by a random factor from the range ratio, cropped to crop (height, width) so that no label
    has more than cat_max_ratio of the pixels, flipped with probability flip, distorted in colour if distorts_colors,
    and padded to crop. For evaluation only the image is scaled; its map keeps its size, so images of different sizes
    need val_batch_size 1.

    root: folder of the data. options: see DenseSource.

    A subclass sets class_names, labels (the label of each class in the files) and read_labels, and has find_pairs.
    """

    task = "segmentation"
    labels: list[int]
    read_labels: Callable[[Pair], Tensor]

    def __init__(
        self,
        root: str,
        long_side: Side = 2048,
        short_side: Side = 512,
        ratio: tuple[Factor, Factor] = (0.5, 2.0),
        crop: tuple[Side, Side] = (512, 512),
        cat_max_ratio: Annotated[float, Range(above=0, most=1)] = 0.75,
        flip: Share = 0.5,
        distorts_colors: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(long_side, short_side, **options)
        self.root = data_folder(root)
        self.transform = v2.Compose(
            [
                Resize(long_side, [short_side], (ratio[0], ratio[1])),
                VariedCrop((crop[0], crop[1]), cat_max_ratio),
                v2.RandomHorizontalFlip(flip),
                *([PhotometricDistortion()] if distorts_colors else []),
                *normalize(self.mean, self.std),
                PadTo((crop[0], crop[1])),
                v2.ToPureTensor(),
            ]
        )

    @abstractmethod
    def find_pairs(self, split: str) -> tuple[list[Pair], list[str]]:
        """The pairs of a split, sorted by name, and a sentence for each file that belongs to no pair."""

    def maps(self, split: str, transform: Callable[..., Any]) -> "LabelledMaps":
        """The transformed images and maps of "train" or "val"."""
        pairs, unpaired = self.find_pairs(split)
        warn_or_raise(unpaired, self.max_corrupt, "max_corrupt")
        return LabelledMaps(pairs, transform, self.read_labels)

    def contents(self, split: str) -> Contents:
        return Contents(self.maps(split, untransformed), _content)

    def train_set(self) -> Dataset[Any]:
        """Warns of classes that no map has; of many maps some are read, until one of them has a second class."""
        maps = self.maps("train", self.transform)
        chosen = maps.pairs[:: max(1, len(maps.pairs) // PEEKED)]
        present: set[int] = set()
        for pair in chosen:
            with contextlib.suppress(CorruptImageError):
                present |= set(self.read_labels(pair).unique().tolist())
            if len(chosen) < len(maps.pairs) and len(present - {IGNORED}) > 1:
                return maps
        if present and (absent := untrained(self.class_names, present - {IGNORED}, "image", IGNORED in present)):
            read = "" if len(chosen) == len(maps.pairs) else f" ({len(chosen)} of {len(maps.pairs):,} maps were read)"
            logger.warning(f"{absent}{read}")
        return maps

    def val_set(self) -> Dataset[Any]:
        return self.maps("val", partial(_image_alone, self.preprocessing.transform()))

    @staticmethod
    def assemble(samples: list[tuple[Tensor, Tensor]]) -> Any:
        """Stacks images and maps; raises ValueError if their sizes differ."""
        sizes = {(image.shape[-2:], labels.shape) for image, labels in samples}
        if len(sizes) > 1:
            shown = sorted("×".join(map(str, image)) for image, _ in sizes)
            raise SettingError(
                f"Images of {' and '.join(shown[:2])} px do not fit into one batch: set `val_batch_size` to 1."
            )
        return default_collate(samples)

    def check_classes(self, *faults: object) -> None:
        """Refuses further faults, and no classes or more than a map of 8 bits can have."""
        too_many = (
            f"{self.root} has {self.num_classes} classes, but maps of 8 bits can have 1 to {IGNORED - 1}: set"
            " `class_names`, or correct the file with their names."
        )
        refuse(not 0 < self.num_classes < IGNORED and too_many, *faults)


class LabelMaps(MapSource):
    """Images and label maps of the same name, 8-bit grey or palette, in separate folders.

    root: folder with train/ and trainannot/ (as CamVid), images/train and annotations/train (or labels/ or masks/), or
    train/images and train/annotations (or labels, masks); the same for val. train, val: names of the splits. void:
    labels that are ignored; 255 is, too. The other labels, from 0 in their order, are the classes; or values: the label
    of each class, such as [0, 255]. classes: file with the name of each class on a line, by default root/classes.txt.
    num_labels: number of classes, if they have no names. class_names: in the order of the labels, instead of that file.
    options: see MapSource.
    """

    layouts = LAYOUTS
    splits = ("train", "val")

    def __init__(
        self,
        root: str,
        *,
        train: str = splits[0],
        val: str = splits[1],
        void: Sequence[Label] = (),
        values: list[Label] | None = None,
        classes: str | None = None,
        num_labels: NumLabels | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.names = {"train": train, "val": val}
        if values and not (class_names or classes or (self.root / CLASSES_FILE).exists()):
            class_names = list(map(str, values))
        self.class_names = class_names or self.read_names(classes, num_labels)
        number, usable = self.num_classes, values or [label for label in range(IGNORED) if label not in void]
        self.check_classes(
            num_labels not in (None, number)
            and f"`num_labels` is {num_labels}, but `class_names` has {number} names: leave out one of them.",
            values
            and len({*values} - {*void}) != number
            and f"`values` has {len(values)} labels, expected {number}, one for each class, none of them twice or in"
            " `void`: correct it.",
            len(usable) < number
            and f"`void` leaves {len(usable)} labels for {number} classes: leave out some of its labels.",
        )
        self.labels = usable[:number]
        ignored = [label for label in (*void, IGNORED) if label not in self.labels]
        self.read_labels = partial(_read_pair, tuple(self.labels), tuple(ignored))

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        folders = filter(None, (folders_of(root, name) for name in cls.splits))
        maps = [path for _, folder in folders for path in files_by_name(folder, (".png",), []).values()]
        labels: set[int] = set()
        for path in maps[:: max(1, len(maps) // PEEKED)]:
            with contextlib.suppress(CorruptImageError):
                mode, values = read_pixels(path)
                labels |= set(np.unique(values).tolist()) if mode in MODES else set()
        if not labels - {IGNORED} or max(labels) > IGNORED:
            return None
        about = {"name": "label_maps", "root": str(root)}
        if labels == {0, IGNORED}:  # one class and its background, as most programs draw them
            return about | {"values": [0, IGNORED]}
        number = {} if (root / CLASSES_FILE).exists() else {"num_labels": max(labels - {IGNORED}) + 1}
        return about | number

    def read_names(self, classes: str | None, num_labels: int | None) -> list[str]:
        """The names of the classes, from a file with one on each line or numbered from 0."""
        path = user_path(classes) if classes else self.root / CLASSES_FILE
        if classes or (num_labels is None and path.exists()):
            return read_lines(path)
        if num_labels is None:
            raise SettingError(
                f"The classes of {self.root} have no names: set `class_names`, `classes` or `num_labels`, or add"
                f" {CLASSES_FILE}."
            )
        return list(map(str, range(num_labels)))

    def find_pairs(self, split: str) -> tuple[list[Pair], list[str]]:
        name = self.names[split]
        folders = folders_of(self.root, name, self.layouts)
        if folders is None:
            expected = " or ".join(f"{images} and {maps}".format(name, name) for images, maps in self.layouts[:2])
            raise ValueError(
                f"The data folder {self.root} has no {split} images with maps: expected the folders {expected}."
            )
        unpaired: list[str] = []
        images, maps = (
            files_by_name(folder, suffixes, unpaired)
            for folder, suffixes in zip(folders, (SUFFIXES, (".png",)), strict=True)
        )
        pairs = [Pair(images[name], maps[name]) for name in images if name in maps]
        if not pairs:
            both = " and ".join(map(str, folders))
            raise ValueError(f"{both} have no X.jpg and X.png in common: expected pairs of files.")
        for name in images.keys() - maps.keys():
            unpaired.append(f"{images[name]} has no map {folders[1] / name}.png: add or remove one.")
        for name in maps.keys() - images.keys():
            unpaired.append(f"{maps[name]} has no image in {folders[0]}: add or remove one.")
        return pairs, sorted(unpaired)


class Ade20k(LabelMaps):
    """Images and label maps in ADE20K's layout.

    root: folder with images/{training,validation} and annotations/{training,validation}. reduces_zero_label: 0 in the
    files means ignored and 1 is the first class; otherwise 0 is the first class. num_labels: number of classes; by
    default those of the root's objectInfo*.txt, or 150 without that file. class_names: in the order of the labels,
    instead of that file. options: see MapSource.
    """

    layouts = LAYOUTS[1:2]
    fixed = ("train", "val", "void", "classes")

    def __init__(
        self,
        root: str,
        *,
        reduces_zero_label: bool = True,
        num_labels: NumLabels | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        options |= {"void": (0,) if reduces_zero_label else (), "num_labels": num_labels, "class_names": class_names}
        super().__init__(root, **options, **ADE20K_SPLITS)  # type: ignore[arg-type]

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        fits = any(folders_of(root, name, cls.layouts) for name in ADE20K_SPLITS.values())
        return {"name": "ade20k", "root": str(root)} if fits else None

    def read_names(self, classes: str | None, num_labels: int | None) -> list[str]:
        """The last column of the table that comes with ADE20K; without it, numbers from 1."""
        tables = sorted(self.root.glob("objectInfo*.txt"))
        if num_labels is None and tables:
            return [line.split("\t")[-1].strip() for line in read_lines(tables[0])[1:]]
        return [str(number) for number in range(1, (num_labels or ADE20K_CLASSES) + 1)]


def folders_of(root: Path, name: str, layouts: Sequence[tuple[str, str]] = LAYOUTS) -> tuple[Path, Path] | None:
    """The folders of images and maps of the split of this name, None if there are none."""
    for shapes in layouts:
        images, maps = (root / shape.format(name) for shape in shapes)
        if images.is_dir() and maps.is_dir():
            return images, maps
    return None


@dataclass(eq=False)
class LabelledMaps(Dataset[Any]):
    """(image, map) for each pair of files; a sentence for a pair that cannot be used.

    read_labels: returns the labels of a pair, uint8 (height, width), or raises CorruptImageError.
    """

    pairs: Sequence[Pair]
    transform: Callable[..., Any]
    read_labels: Callable[[Pair], Tensor]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | str:
        pair = self.pairs[index]
        try:
            image, labels = read_image(pair.image), self.read_labels(pair)
        except CorruptImageError as error:
            return str(error)
        if labels.shape != image.shape[-2:]:
            sizes = ["×".join(map(str, size)) for size in (labels.shape, image.shape[-2:])]
            return (
                f"{pair.map} has {sizes[0]} px, but its image {sizes[1]} px (height × width): make them the same size."
            )
        image, labels = self.transform(image, tv_tensors.Mask(labels))
        return image, labels.long()

    def __len__(self) -> int:
        return len(self.pairs)


def _content(sample: tuple[Tensor, Tensor]) -> Content:
    counts = torch.bincount(sample[1].as_subclass(Tensor).flatten(), minlength=IGNORED + 1).tolist()
    pixels = {label: count for label, count in enumerate(counts[:IGNORED]) if count}
    ignored = counts[IGNORED]
    amounts = {"images": dict.fromkeys(pixels, 1), "pixels": pixels}
    return Content((sample[1].shape[-2], sample[1].shape[-1]), amounts, {"ignored pixels": ignored})


def _image_alone(transform: Callable[[Any], Tensor], image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return transform(image), labels.as_subclass(Tensor)


def _read_pair(labels: Sequence[int], void: Sequence[int], pair: Pair) -> Tensor:
    return read_map(pair.map, labels, void)


def read_map(path: Path, labels: Sequence[int], void: Sequence[int] = (IGNORED,)) -> Tensor:
    """Reads a label map: uint8 (height, width), the place in `labels` of each pixel's label; 255 for labels in `void`.

    Raises CorruptImageError, naming the file, for anything but an image of one channel with known labels.
    """
    mode, values = read_pixels(path)
    if mode not in MODES:
        raise CorruptImageError(
            f"{path} has the mode {mode}, expected one channel: save the labels as a grey or palette PNG."
        )
    unknown = IGNORED + 1
    class_of = np.full(2**16, unknown, np.int16)
    class_of[list(labels)] = np.arange(len(labels))
    class_of[list(void)] = IGNORED
    values = values.astype(np.uint16)
    classes = class_of[values]
    if (classes == unknown).any():
        row, column = np.argwhere(classes == unknown)[0].tolist()
        is_range = labels[-1] - labels[0] in range(len(labels))
        known = f"{labels[0]} to {labels[-1]}" if is_range else listed([*map(str, labels)])
        ignored = f", and {' and '.join(map(str, sorted(set(void))))} for ignored pixels" if void else ""
        raise CorruptImageError(
            f"{path} has the label {values[row, column]} at row {row}, column {column}, expected"
            f" {known}{ignored}: correct the map, or set `num_labels` or `values`."
        )
    return torch.from_numpy(classes.astype(np.uint8))


def read_pixels(path: Path) -> tuple[str, np.ndarray]:
    """Mode and values of a map; raises CorruptImageError, naming the file, if it cannot be read."""
    with opened(path, "label map") as image:
        image.load()
        return image.mode, np.asarray(image)
