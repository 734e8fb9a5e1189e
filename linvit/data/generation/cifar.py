"""CIFAR's images as training images of generators."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchvision.transforms import Compose, RandomHorizontalFlip

from linvit.data.generation.digits import GenerationPreprocessing
from linvit.data.images.cifar import SIDE, Cifar
from linvit.data.source import Workers
from linvit.ranges import Count, Seed, Share


class CifarImages(Cifar):
    """The images of CIFAR-10 or CIFAR-100, RGB pixels in −1 … 1; half of the training images are mirrored.

    Args:
        root, class_names, held_out, split: See Cifar.
        batch_size: Images per batch.
        seed: Seed of order and mirroring of the training images.
        num_workers: Processes that read images.

    Raises ValueError as Cifar does.
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
