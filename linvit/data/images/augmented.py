"""Image files of any size, cropped and augmented by timm's transforms: what the sources that read them share."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.auto_augment import posterize
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.images.image import Channels, Preprocessing, Side
from linvit.data.source import Source, Workers, listed
from linvit.ranges import Amount, Count, OneOf, Range, Seed, Share

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
AboveZero = Annotated[float, Range(above=0, most=1)]


class AugmentedSource(Source):
    """Size, normalisation and augmentation of a source; defaults are those of the papers' training.

    size: pixels, one number or (height, width). auto_augment, color_jitter, random_erasing, horizontal_flip,
    crop_scale: timm's; color_jitter is without effect where auto_augment is set. interpolation: of the validation
    images, and of the training images where train_interpolation is null; "random" there chooses bilinear or bicubic.
    crop_pct: share of the resized validation image that the centre crop keeps. mean, std: per channel, in 0..1,
    ImageNet's by default. repeats: repeated augmentation, how many differently augmented copies of an image come in a
    row. max_corrupt: how many unreadable images may be left out before the run stops.
    """

    def __init__(
        self,
        size: Side | tuple[Side, Side] = 224,
        channels: Channels = 3,
        batch_size: Count = 128,
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: Annotated[float, Range(0)] = 0.4,
        random_erasing: Share = 0.25,
        horizontal_flip: Share = 0.5,
        crop_scale: tuple[AboveZero, AboveZero] = (0.08, 1.0),
        interpolation: Annotated[str, OneOf(INTERPOLATIONS)] = "bicubic",
        train_interpolation: Annotated[str, OneOf((*INTERPOLATIONS, "random"))] | None = None,
        crop_pct: AboveZero = 0.875,
        mean: tuple[Share, ...] | None = None,
        std: tuple[AboveZero, ...] | None = None,
        repeats: Count = 1,
        max_corrupt: Amount = 0,
        seed: Seed = 0,
        num_workers: Workers = 4,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, max_corrupt, repeats)
        if crop_scale[0] > crop_scale[1]:
            raise ValueError(f"`crop_scale` is {list(crop_scale)}, expected the smaller share first: swap them.")
        for name, values in {"mean": mean, "std": std}.items():
            check_per_channel(name, values, channels)
        self.preprocessing = Preprocessing(
            (size, size) if isinstance(size, int) else tuple(size),
            tuple(mean) if mean else _per_channel(IMAGENET_DEFAULT_MEAN, channels),
            tuple(std) if std else _per_channel(IMAGENET_DEFAULT_STD, channels),
            interpolation,
            crop_pct,
        )
        self.augmentation = {
            "auto_augment": auto_augment,
            "color_jitter": color_jitter,
            "re_prob": random_erasing,
            "re_mode": "pixel",
            "hflip": horizontal_flip,
            "scale": tuple(crop_scale),
            "interpolation": train_interpolation or interpolation,
        }
        try:
            self.train_transform()
        except Exception as error:  # timm asserts, and splits what it reads
            raise ValueError(
                f"`auto_augment` is {auto_augment!r}, which timm does not know: set it to 'rand-m9-mstd0.5-inc1',"
                " 'augmix-m5' or '3a' for example, or to null."
            ) from error

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        """The transformed images of "train" or "val"."""
        raise NotImplementedError

    def train_set(self) -> Dataset[Any]:
        return self.images("train", self.train_transform())

    def val_set(self) -> Dataset[Any]:
        return self.images("val", self.preprocessing.transform())

    def places(self, names: Sequence[str], where: Any) -> list[int]:
        """The numbers of these classes; raises ValueError for one that is none of the source's."""
        place = {name: number for number, name in enumerate(self.class_names)}
        strange = [name for name in names if name not in place]
        if strange:
            raise ValueError(
                f"{where} has the class {strange[0]!r}, but the {self.num_classes} classes known here are"
                f" {listed(self.class_names)}: remove or rename it."
            )
        return [place[name] for name in names]

    def train_transform(self) -> Callable[[Any], Tensor]:
        """The random transform from a PIL image to a float32 tensor (channels, height, width)."""
        pre = self.preprocessing
        transform = create_transform(
            (pre.channels, *pre.size), is_training=True, mean=pre.mean, std=pre.std, **self.augmentation
        )
        for step in transform.transforms:
            for op in (*getattr(step, "ops", ()), *(op for policy in getattr(step, "policy", ()) for op in policy)):
                if op.aug_fn is posterize:
                    op.aug_fn = _posterize
        return transform


def check_per_channel(name: str, values: Sequence[float] | None, channels: int) -> None:
    """Raises ValueError for other than one number for each channel; None is any number of them."""
    if values is not None and len(values) != channels:
        raise ValueError(
            f"`{name}` has {len(values)} numbers, but `channels` is {channels}: give one for each channel."
        )


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return tuple(values) if channels == len(values) else (sum(values) / len(values),) * channels


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Black for no bits at all, as in the papers' training; newer Pillows refuse to."""
    return posterize(image, bits, **options) if bits else Image.new(image.mode, image.size)
