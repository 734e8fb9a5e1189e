"""Digits and CIFAR's images as training images of generators, and the conversion of generated values to pixels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, ToTensor

from linvit.data.images.cifar import SIDE, Cifar
from linvit.data.images.digits import Digits
from linvit.data.images.image import LARGEST
from linvit.data.source import Workers
from linvit.ranges import Count, Range, Seed, Share


@dataclass(frozen=True)
class GenerationPreprocessing:
    """The size (height, width) of generated images or latents, and how a network's output becomes an image.

    mean, std: per channel; output × std + mean are pixels in 0..1, or the input of an autoencoder's decoder. decoder:
    the autoencoder of latents, a folder or a name on the Hugging Face hub; None for pixels.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    decoder: str | None = None

    @property
    def channels(self) -> int:
        return len(self.mean)

    def transform(self) -> Callable[[Any], Tensor]:
        """The transform from a PIL image to a float32 tensor (channels, height, width), for pixels of this size."""
        transform: Callable[[Any], Tensor] = Compose([ToTensor(), Normalize(self.mean, self.std)])
        return transform

    def values(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) × std + mean; pixels are clamped to 0..1."""
        mean, std = (
            torch.tensor(v, dtype=images.dtype, device=images.device)[:, None, None] for v in (self.mean, self.std)
        )
        values = images * std + mean
        return values if self.decoder else values.clamp(0, 1)


class DigitImages(Digits):
    """Real digits, 8×8 grey pixels in −1 … 1, to train generators on.

    Args:
        size: Side in pixels; sizes other than 8 are interpolated bilinearly.
        options: See Digits.
    """

    task = "diffusion"
    preprocessing: GenerationPreprocessing  # type: ignore[assignment]

    def __init__(self, size: Annotated[int, Range(1, LARGEST)] = 8, batch_size: Count = 128, **options: Any) -> None:
        super().__init__(32, 1, batch_size, 0, **options)
        self.preprocessing = GenerationPreprocessing((size, size), (0.5,), (0.5,))


class CifarImages(Cifar):
    """The images of CIFAR-10 or CIFAR-100, RGB pixels in −1 … 1; half of the training images are mirrored.

    Args:
        root, class_names, held_out, split: See Cifar.
        batch_size: Images per batch.
        seed: Seed of order and mirroring of the training images.
        num_workers: Processes that read images.
    """

    task = "diffusion"
    preprocessing: GenerationPreprocessing  # type: ignore[assignment]

    def __init__(
        self,
        root: str,
        class_names: list[str] | None = None,
        held_out: Share = 0.0,
        split: Seed = 0,
        batch_size: Count = 128,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(root, class_names, held_out, split, batch_size=batch_size, seed=seed, num_workers=num_workers)
        self.preprocessing = GenerationPreprocessing((SIDE, SIDE), (0.5,) * 3, (0.5,) * 3)

    def train_transform(self) -> Callable[[Any], Tensor]:
        transform: Callable[[Any], Tensor] = Compose([RandomHorizontalFlip(), self.preprocessing.transform()])
        return transform
