"""The 1,797 handwritten digits that come with scikit-learn: nothing to download."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import Dataset

from linvit.data.images.image import Channels, Preprocessing, Side
from linvit.data.source import Source, Workers
from linvit.errors import SettingError
from linvit.ranges import Amount, Count, Range, Seed

CLASSES = 10
MEAN, STD = 0.305, 0.376  # of the 8×8 originals in 0..1


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
        self.class_names = [str(digit) for digit in range(CLASSES)]
        self.preprocessing = Preprocessing((size, size), (MEAN,) * channels, (STD,) * channels, "bilinear", 1.0)
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
            room = pad(image, (self.max_shift,) * 4, value=-MEAN / STD)
            image = room[:, top : top + height, left : left + width]
        return image, self.targets[index]

    def __len__(self) -> int:
        return len(self.targets)
