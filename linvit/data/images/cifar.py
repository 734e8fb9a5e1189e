"""CIFAR-10 and CIFAR-100 in their official binary form."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.disk import check_regular, read_text
from linvit.data.images.augmented import AugmentedSource, per_channel
from linvit.data.images.image import Channels, Deviation, Side, converted
from linvit.data.source import check_split, of_split
from linvit.errors import SettingError, refuse
from linvit.files import reason_of, user_path
from linvit.ranges import Seed, Share

SIDE = 32  # pixels; an image is stored as its red, green and blue values, row by row
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images


class Layout(NamedTuple):
    """The files of a data set; the last of the `labels` bytes before each image is its class."""

    folder: str
    names: str
    train: tuple[str, ...]
    test: str
    labels: int


LAYOUTS = (
    Layout(
        "cifar-10-batches-bin",
        "batches.meta.txt",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
        1,
    ),
    Layout("cifar-100-binary", "fine_label_names.txt", ("train.bin",), "test.bin", 2),
)


class Cifar(AugmentedSource):
    """CIFAR-10 or CIFAR-100, kept in memory (150 MB) and augmented by timm's transforms while training.

    Args:
        root: Folder with the binary version's files, or the folder above it.
        class_names: Fixes the order of the classes; by default it is the data set's own. CIFAR-100 has its fine labels.
        held_out: Share of each class of the training images to validate on in place of the test images; 0 validates on
            the test images. For choices that must not be made on the test images.
        split: Seed that chooses the held-out images.
        options: See AugmentedSource.
    """

    def __init__(
        self,
        root: str,
        class_names: list[str] | None = None,
        held_out: Share = 0.0,
        split: Seed = 0,
        size: Side | tuple[Side, Side] = SIDE,
        crop_pct: Share = 1.0,
        channels: Channels = 3,
        mean: tuple[Share, ...] | None = None,
        std: tuple[Deviation, ...] | None = None,
        **options: Any,
    ) -> None:
        mean, std = mean or per_channel(MEAN, channels), std or per_channel(STD, channels)
        super().__init__(size=size, channels=channels, crop_pct=crop_pct, mean=mean, std=std, **options)
        self.root, self.layout = find_layout(user_path(root))
        self.held_out, self.split = held_out, split
        known = [name.strip() for name in read_text(self.root / self.layout.names).splitlines() if name.strip()]
        self.class_names = class_names or known
        self._place = np.array(self.places(known, self.root))

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        try:
            find_layout(root)
        except ValueError:
            return None
        return {"name": "cifar", "root": str(root)}

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        testing = split == "val" and not self.held_out
        files = (self.layout.test,) if testing else self.layout.train
        pixels, labels = zip(*(self._read(self.root / name) for name in files), strict=True)
        images = Pixels(np.concatenate(pixels), self._place[np.concatenate(labels)], transform, self.channels)
        if testing:
            return images
        chosen = [
            int(name)
            for place in np.unique(images.targets)
            for name in of_split(
                list(map(str, np.flatnonzero(images.targets == place))), split, self.held_out, self.split
            )
        ]
        check_split(split, chosen, f"The data folder {self.root} has {len(images):,} images")
        kept = sorted(chosen)
        return Pixels(images.pixels[kept], images.targets[kept], images.transform, images.channels)

    def _read(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Pixels, uint8 (images, 3, 32, 32), and labels (images,) of one file."""
        record = self.layout.labels + 3 * SIDE * SIDE
        try:
            check_regular(file)
            content = np.fromfile(file, np.uint8)
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({reason_of(error)}): copy it again.") from error
        whole = content[: len(content) // record * record].reshape(-1, record)
        labels, classes = whole[:, self.layout.labels - 1], len(self._place)
        refuse(
            (
                not len(whole) or len(content) % record,
                f"{file} has {len(content):,} bytes, expected {record:,} for each image: copy it again.",
            ),
            (
                labels.max(initial=0) >= classes,
                f"{file} has a label of {classes} or more, but {self.layout.names} names {classes} classes: copy both"
                " again.",
            ),
        )
        return whole[:, self.layout.labels :].reshape(-1, 3, SIDE, SIDE), labels


@dataclass(eq=False)
class Pixels(Dataset[Any]):
    """(image, target) of images in memory: pixels uint8 (images, 3, height, width), targets int (images,)."""

    pixels: np.ndarray
    targets: np.ndarray
    transform: Callable[[Any], Tensor]
    channels: int

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.pixels[index].transpose(1, 2, 0).copy())
        return self.transform(converted(image, self.channels)), int(self.targets[index])

    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each image."""
        return [self.pixels.shape[2:]] * len(self)

    def __len__(self) -> int:
        return len(self.targets)


def find_layout(root: Path) -> tuple[Path, Layout]:
    """The folder with the files, and their layout; raises ValueError if there is none."""
    for layout in LAYOUTS:
        for folder in (root, root / layout.folder):
            if (folder / layout.names).is_file():
                return folder, layout
    expected = " or ".join(f"{layout.folder}/ with {layout.names}" for layout in LAYOUTS)
    raise SettingError(f"The data folder {root} has no {expected}: set `root` to the binary version of CIFAR.")
