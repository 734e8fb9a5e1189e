"""Images with label maps, in ADE20K's layout: images/training/X.jpg and annotations/training/X.png."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from linvit.data.dense.source import DenseSource, read_image
from linvit.data.dense.transforms import IGNORED, PadTo, PhotometricDistortion, Resize, VariedCrop, normalize
from linvit.data.disk import check_regular, read_text
from linvit.data.images.image import CorruptImageError, Side
from linvit.data.unusable import allow
from linvit.files import reason_of
from linvit.ranges import Range, Share

SPLITS = {"train": "training", "val": "validation"}
CLASSES = 150
NAMES_FILE = "objectInfo*.txt"

Factor = Annotated[float, Range(above=0, most=10)]


class Ade20k(DenseSource):
    """Batches (images, maps): float32 (batch, 3, height, width) and int64 (batch, height, width), 255 where ignored.

    Training images are scaled by a random factor from the range ratio, cropped to crop (height, width) so that no label
    has more than cat_max_ratio of the pixels, flipped with probability flip, distorted in colour if distorts_colors,
    and padded to crop. For evaluation only the image is scaled; its map keeps its size, so images of different sizes
    need val_batch_size 1.

    root: folder with images/{training,validation} and annotations/{training,validation}. reduces_zero_label: 0 in the
    files means ignored and 1 is the first class; otherwise 0 is the first class. num_labels: number of classes; by
    default those of the root's objectInfo*.txt, or 150 without that file. class_names: in the order of the labels,
    instead of that file. options: see DenseSource.

    Raises ValueError for a folder without pairs of image and map, and for numbers that do not fit together.
    """

    task = "segmentation"

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
        reduces_zero_label: bool = True,
        num_labels: Annotated[int, Range(1, IGNORED - 1)] | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(long_side, short_side, **options)
        self.root = Path(root)
        self.reduces_zero_label = reduces_zero_label
        self.class_names = class_names or _class_names(self.root, num_labels)
        if num_labels not in (None, self.num_classes):
            raise ValueError(
                f"`num_labels` is {num_labels}, but `class_names` has {self.num_classes} names: leave out one of them."
            )
        if self.num_classes >= IGNORED:
            raise ValueError(
                f"There are {self.num_classes} classes, but maps of 8 bits can have at most {IGNORED - 1}."
            )
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

    def train_set(self) -> Dataset[Any]:
        return self._maps("train", self.transform)

    def val_set(self) -> Dataset[Any]:
        return self._maps("val", partial(_image_alone, self.preprocessing.transform()))

    @staticmethod
    def assemble(samples: list[tuple[Tensor, Tensor]]) -> Any:
        """Stacks images and maps; raises ValueError if their sizes differ."""
        sizes = {(image.shape[-2:], labels.shape) for image, labels in samples}
        if len(sizes) > 1:
            shown = sorted("×".join(map(str, image)) for image, _ in sizes)
            raise ValueError(
                f"Images of {' and '.join(shown[:2])} px do not fit into one batch: set `val_batch_size` to 1."
            )
        return default_collate(samples)

    def _maps(self, split: str, transform: Callable[..., Any]) -> Dataset[Any]:
        pairs, unpaired = find_pairs(self.root, split)
        allow(unpaired, self.max_corrupt, "max_corrupt")
        return LabelledMaps(pairs, transform, self.num_classes, self.reduces_zero_label)


@dataclass(eq=False)
class LabelledMaps(Dataset[Any]):
    """(image, map) for each pair of files; a sentence for a pair that cannot be used."""

    pairs: Sequence[tuple[Path, Path]]
    transform: Callable[..., Any]
    num_classes: int
    reduces_zero_label: bool

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | str:
        image_path, map_path = self.pairs[index]
        try:
            image = read_image(image_path)
            labels = read_map(map_path, self.num_classes, self.reduces_zero_label)
        except CorruptImageError as error:
            return str(error)
        if labels.shape != image.shape[-2:]:
            sizes = ["×".join(map(str, size)) for size in (labels.shape, image.shape[-2:])]
            return (
                f"{map_path} has {sizes[0]} px, but its image {sizes[1]} px (height × width): make them the same size."
            )
        image, labels = self.transform(image, tv_tensors.Mask(labels))
        return image, labels.long()

    def __len__(self) -> int:
        return len(self.pairs)


def _image_alone(transform: Callable[[Any], Tensor], image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return transform(image), labels.as_subclass(Tensor)


def read_map(path: Path, num_classes: int, reduces_zero_label: bool = True) -> Tensor:
    """Reads a label map: uint8 (height, width), classes from 0; 255 for pixels that are 255 or, if reduced, 0.

    Raises CorruptImageError, naming the file, for anything but an image of one 8-bit channel with known labels.
    """
    try:
        check_regular(path)
        with Image.open(path) as image:
            image.load()
            mode, values = image.mode, np.asarray(image)
    except Exception as error:  # the error for a damaged file depends on its format
        raise CorruptImageError(
            f"{path} is not a readable label map ({reason_of(error)}): replace the file."
        ) from error
    if mode not in ("L", "P"):
        raise CorruptImageError(
            f"{path} has the mode {mode}, expected one 8-bit channel: save the labels as a grey or palette PNG."
        )
    first, last = (1, num_classes) if reduces_zero_label else (0, num_classes - 1)
    strange = (values != IGNORED) & (values > last)
    if strange.any():
        row, column = np.argwhere(strange)[0].tolist()
        ignored = "0 and 255 for ignored pixels" if reduces_zero_label else "255 for ignored pixels"
        raise CorruptImageError(
            f"{path} has the label {values[row, column]} at row {row}, column {column}, expected {first} to {last}, and"
            f" {ignored}: correct the map, or set `num_labels`."
        )
    labels = values.astype(np.int16) - first
    return torch.from_numpy(np.where((values == IGNORED) | (labels < 0), IGNORED, labels).astype(np.uint8))


def find_pairs(root: Path, split: str) -> tuple[list[tuple[Path, Path]], list[str]]:
    """The pairs (image, map) of a split, sorted by name, and a sentence for each file that belongs to no pair.

    Raises ValueError for a missing folder and for one without pairs.
    """
    folders = [root / kind / SPLITS[split] for kind in ("images", "annotations")]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"The folder {folder} does not exist: set `root` to a folder in ADE20K's layout.")
    unpaired: list[str] = []
    images = _by_name(folders[0], (".jpg", ".jpeg", ".png"), unpaired)
    maps = _by_name(folders[1], (".png",), unpaired)
    both = [(images[name], maps[name]) for name in images if name in maps]
    if not both:
        raise ValueError(f"{folders[0]} and {folders[1]} have no X.jpg and X.png in common: expected pairs of files.")
    unpaired += [
        f"{path} has no map {folders[1] / name}.png: add or remove one."
        for name, path in images.items()
        if name not in maps
    ]
    unpaired += [
        f"{path} has no image in {folders[0]}: add or remove one." for name, path in maps.items() if name not in images
    ]
    return both, unpaired


def _by_name(folder: Path, suffixes: Sequence[str], complaints: list[str]) -> dict[str, Path]:
    """The files with these endings by their names without ending; a second file of the same name is a complaint."""
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        is_visible = path.suffix.lower() in suffixes and not path.name.startswith(".")
        if is_visible and files.setdefault(path.stem, path) != path:
            complaints.append(f"{path} has the name of {files[path.stem].name}: remove one of them.")
    return files


def _class_names(root: Path, num_labels: int | None) -> list[str]:
    """The last column of the table that comes with ADE20K; without it, numbers from 1."""
    tables = sorted(root.glob(NAMES_FILE))
    if num_labels is None and tables:
        rows = [line.split("\t") for line in read_text(tables[0]).split("\n")[1:] if line.strip()]
        return [row[-1].strip() for row in rows]
    return [str(number) for number in range(1, (num_labels or CLASSES) + 1)]
