"""The base of the sources for detection and segmentation: images of any size."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from linvit.data.dense.transforms import Resize, normalize
from linvit.data.images.image import Deviation, Side, open_image
from linvit.data.source import Source, Workers
from linvit.errors import SettingError
from linvit.ranges import Amount, Count, Seed, Share


@dataclass(frozen=True)
class DensePreprocessing:
    """The preparation of an image for evaluation and prediction: sides in pixels; mean and std per channel in 0..1."""

    long_side: int
    short_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3

    def transform(self) -> v2.Transform:
        """From an image to a normalized float32 tensor (3, height, width), scaled to fit both sides."""
        resize = Resize(self.long_side, [self.short_side])
        return v2.Compose([v2.ToImage(), resize, *normalize(self.mean, self.std), v2.ToPureTensor()])


class DenseSource(Source):
    """RGB images scaled to fit long_side and short_side (pixels), keeping their aspect ratio.

    mean, std: per channel in 0..1, ImageNet's by default. max_corrupt: number of unusable images that may be left out.
    Raises ValueError for a short side above the long side.
    """

    preprocessing: DensePreprocessing

    def __init__(
        self,
        long_side: Side,
        short_side: Side,
        batch_size: Count = 2,
        val_batch_size: Count = 1,
        mean: tuple[Share, Share, Share] | None = None,
        std: tuple[Deviation, Deviation, Deviation] | None = None,
        max_corrupt: Amount = 0,
        seed: Seed = 0,
        num_workers: Workers = 4,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, max_corrupt)
        if short_side > long_side:
            raise SettingError(f"`short_side` is {short_side} px, above `long_side` with {long_side} px: swap them.")
        self.val_batch_size = val_batch_size
        self.mean = tuple(mean or IMAGENET_DEFAULT_MEAN)
        self.std = tuple(std or IMAGENET_DEFAULT_STD)
        self.preprocessing = DensePreprocessing(long_side, short_side, self.mean, self.std)


def read_image(path: Any) -> tv_tensors.Image:
    """Reads an image file: uint8 (3, height, width); raises CorruptImageError, naming it."""
    return tv_tensors.Image(F.pil_to_tensor(open_image(path)))


def as_lists(samples: list[Any]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Images of different sizes and their targets, as two lists."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
