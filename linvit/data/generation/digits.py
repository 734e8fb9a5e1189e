"""Digits as images to generate, and how generated values become pixels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linvit.data.images.digits import Digits
from linvit.ranges import Count


@dataclass(frozen=True)
class GenerationPreprocessing:
    """The size of generated images, in pixels or of latents, and how a network's values become those of an image.

    mean, std: of each channel; values × std + mean are pixels in 0..1, or what an autoencoder's decoder reads.
    decoder: the autoencoder of latents, a folder or a name on the Hugging Face hub; None where these are pixels.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    decoder: str | None = None

    @property
    def channels(self) -> int:
        return len(self.mean)

    def values(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) × std + mean; pixels are kept in 0..1."""
        mean, std = (
            torch.tensor(v, dtype=images.dtype, device=images.device)[:, None, None] for v in (self.mean, self.std)
        )
        values = images * std + mean
        return values if self.decoder else values.clamp(0, 1)


class DigitImages(Digits):
    """The real digits, 8×8 grey pixels in −1 … 1, to be generated; the held-out ones bound how close that can come.

    Args:
        size: Side in pixels; other than 8, they are scaled bilinearly.
        options: See Digits.

    Raises ValueError for no pixels, and as Digits.
    """

    task = "diffusion"
    preprocessing: GenerationPreprocessing  # type: ignore[assignment]

    def __init__(self, size: Count = 8, batch_size: Count = 128, **options: Any) -> None:
        super().__init__(32, 1, batch_size, 0, **options)
        self.preprocessing = GenerationPreprocessing((size, size), (0.5,), (0.5,))
