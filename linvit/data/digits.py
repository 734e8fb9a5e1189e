"""The 1,797 real handwritten digits that ship with scikit-learn: nothing to download."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import Dataset

from linvit.data.images import Preprocessing
from linvit.data.source import ImageSource

MEAN, STD = 0.305, 0.376  # of the 8×8 originals in 0..1
SPLIT_SEED = 0  # the same 20 % are held out whatever the seed of a run


class Digits(ImageSource):
    """8×8 digits of 43 people's hands, upscaled bilinearly; 80 % train, 20 % never trained on, stratified by class.

    size: side in pixels, 32 or more. channels: 1, or 3 equal ones. max_shift: random shift in pixels while training.
    """

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        batch_size: int = 64,
        max_shift: int = 0,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.class_names = [str(digit) for digit in range(10)]
        self.preprocessing = Preprocessing((size, size), (MEAN,) * channels, (STD,) * channels, "bilinear", 1.0)
        self.max_shift = max_shift
        self._parts: tuple[Tensor, ...] | None = None

    def setup(self, stage: str | None = None) -> None:
        if self._parts is None:
            pixels, labels = load_digits(return_X_y=True)
            indices = torch.arange(len(labels))
            train, val = train_test_split(indices, test_size=0.2, random_state=SPLIT_SEED, stratify=labels)
            images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
            images = interpolate(images, self.preprocessing.size, mode="bilinear", align_corners=False)
            images = ((images - MEAN) / STD).expand(-1, self.channels, -1, -1)
            targets = torch.from_numpy(labels).long()
            self._parts = images[train], targets[train], images[val], targets[val]

    def train_set(self) -> Dataset[Any]:
        self.setup()
        images, targets, _, _ = self._parts
        return Shifted(images, targets, self.max_shift)

    def val_set(self) -> Dataset[Any]:
        self.setup()
        _, _, images, targets = self._parts
        return Shifted(images, targets, 0)


class Shifted(Dataset[Any]):
    """Images and targets held in memory; each image is moved by up to max_shift pixels in both directions."""

    def __init__(self, images: Tensor, targets: Tensor, max_shift: int) -> None:
        self.images = images
        self.targets = targets
        self.max_shift = max_shift

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
