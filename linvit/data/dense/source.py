"""What the sources of dense tasks share: images of any size with boxes and masks, or with label maps."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from linvit.data.dense.transforms import Resize, normalize
from linvit.data.images.image import Side, open_image
from linvit.data.source import Source, Workers
from linvit.ranges import Amount, Count, Range, Seed, Share

Deviation = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True)
class DensePreprocessing:
    """What evaluation and prediction do to an image: sides in pixels; mean and std per channel, in 0..1."""

    long_side: int
    short_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3

    def transform(self) -> v2.Transform:
        """Scaled to fit both sides, float32 (3, height, width), normalized."""
        resize = Resize(self.long_side, [self.short_side])
        return v2.Compose([v2.ToImage(), resize, *normalize(self.mean, self.std), v2.ToPureTensor()])


class DenseSource(Source):
    """RGB images scaled to fit long_side and short_side (pixels), keeping their ratio.

    mean, std: per channel, in 0..1, ImageNet's by default. max_corrupt: how many images that cannot be used may be left
    out before the run stops. Raises ValueError for sides out of range.
    """

    preprocessing: DensePreprocessing  # type: ignore[assignment]

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
            raise ValueError(f"`short_side` is {short_side} px, above `long_side` with {long_side} px: swap them.")
        self.val_batch_size = val_batch_size
        self.mean = tuple(mean or IMAGENET_DEFAULT_MEAN)
        self.std = tuple(std or IMAGENET_DEFAULT_STD)
        self.preprocessing = DensePreprocessing(long_side, short_side, self.mean, self.std)


def read_image(path: Any) -> tv_tensors.Image:
    """uint8 (3, height, width) of an image file; raises CorruptImageError, naming it."""
    return tv_tensors.Image(F.pil_to_tensor(open_image(path)))


def as_lists(samples: list[Any]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Images of different sizes and their targets, side by side."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
