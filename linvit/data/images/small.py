"""Small images in memory: the 1,797 handwritten digits that come with scikit-learn, and CIFAR in its binary form."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import Dataset

from linvit.data.disk import check_regular, read_text
from linvit.data.images.augmented import AugmentedSource, per_channel
from linvit.data.images.image import Channels, Deviation, Preprocessing, Side, converted
from linvit.data.source import Source, Workers, check_split, of_split
from linvit.errors import SettingError, refuse
from linvit.files import explained, user_path
from linvit.ranges import Amount, Count, Range, Seed, Share

DIGITS_MEAN, DIGITS_STD = 0.305, 0.376  # of the 8×8 originals in 0..1
SIDE = 32  # pixels; an image is stored as its red, green and blue values, row by row
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images


class Digits(Source):
    """8×8 digits, upscaled bilinearly; a share is held out, stratified by class.

    Args:
        size: Side in pixels, 32 or more.
        channels: 1, or 3 for three equal channels.
        batch_size: Images per batch.
        max_shift: Largest random shift of training images, in pixels.
        held_out: Share of the images that is never trained on.
        split: Seed that chooses those images, independent of the run's seed.
        seed: Seed of order and shifts of the training images.
        num_workers: Processes that read images.
    """

    preprocessing: Preprocessing

    def __init__(
        self,
        size: Side = 32,
        channels: Channels = 3,
        batch_size: Count = 64,
        max_shift: Amount = 0,
        held_out: Annotated[float, Range(0.01, 0.99)] = 0.2,
        split: Seed = 0,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        if max_shift >= size:
            raise SettingError(f"`max_shift` is {max_shift} px, but `size` is {size} px: set it lower than that.")
        self.class_names = [str(digit) for digit in range(10)]
        self.preprocessing = Preprocessing(
            (size, size), (DIGITS_MEAN,) * channels, (DIGITS_STD,) * channels, "bilinear", 1.0
        )
        self.max_shift = max_shift
        self.held_out = held_out
        self.split = split

    @cached_property
    def _tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Images and targets of both splits, training first."""
        from sklearn.datasets import load_digits  # a second that other data need not wait for
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        indices = torch.arange(len(labels))
        splits = train_test_split(indices, test_size=self.held_out, random_state=self.split, stratify=labels)
        images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
        images = interpolate(images, self.preprocessing.size, mode="bilinear", align_corners=False)
        images = (images - self.preprocessing.mean[0]) / self.preprocessing.std[0]
        images, targets = images.expand(-1, self.channels, -1, -1), torch.from_numpy(labels).long()
        return [(images[split], targets[split]) for split in splits]

    def train_set(self) -> Dataset[Any]:
        return Shifted(*self._tensors[0], self.max_shift)

    def val_set(self) -> Dataset[Any]:
        return Shifted(*self._tensors[1], 0)


@dataclass(eq=False)
class Shifted(Dataset[Any]):
    """Images and targets in memory; each image is shifted at random by up to max_shift pixels along both axes."""

    images: Tensor
    targets: Tensor
    max_shift: int

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.max_shift:
            height, width = image.shape[-2:]
            top, left = torch.randint(2 * self.max_shift + 1, (2,)).tolist()
            room = pad(image, (self.max_shift,) * 4, value=-DIGITS_MEAN / DIGITS_STD)
            image = room[:, top : top + height, left : left + width]
        return image, self.targets[index]

    def __len__(self) -> int:
        return len(self.targets)


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

    of_one_size = True

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
        with explained(lambda reason: f"{file} cannot be read ({reason}): copy it again.", OSError):
            check_regular(file)
            content = np.fromfile(file, np.uint8)
        whole = content[: len(content) // record * record].reshape(-1, record)
        labels, classes = whole[:, self.layout.labels - 1], len(self._place)
        refuse(
            (not len(whole) or len(content) % record)
            and f"{file} has {len(content):,} bytes, expected {record:,} for each image: copy it again.",
            labels.max(initial=0) >= classes
            and (
                f"{file} has a label of {classes} or more, but {self.layout.names} names {classes} classes: copy both"
                " again."
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
