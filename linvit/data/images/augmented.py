"""The base of sources that read image files of any size, crop them and augment them by timm's transforms."""

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.auto_augment import posterize
from torch.utils.data import Dataset
from torchvision.transforms import Compose

from linvit.data.images.augmentation_steps import INTERPOLATIONS as ON_DEVICE
from linvit.data.images.augmentation_steps import Drawn, Draws
from linvit.data.images.image import SMALLEST, Channels, Deviation, Preprocessing, Resize, Side
from linvit.data.images.on_device import augmented
from linvit.data.order import batches_of_one_size
from linvit.data.source import Contents, Source, Workers, image_content, listed, untransformed
from linvit.errors import SettingError, refuse
from linvit.ranges import Amount, Count, OneOf, Range, Rule, Seed, Share

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
AboveZero = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True)
class Policy(Rule):
    """An augmentation policy in timm's notation."""

    def holds(self, value: Any) -> bool:
        try:
            create_transform(SMALLEST, is_training=True, auto_augment=value)
        except Exception:  # timm fails an assertion, and numbers that it cannot read each fail in their own way
            return False
        options = str(value).split("-")[1:]
        return bool(value) and all(re.search(r"\d|^tweights$", option) for option in options)  # timm ignores others

    def words(self, noun: str, got: Any = None) -> str:
        return "a policy of timm, such as rand-m9-mstd0.5-inc1, augmix-m5 or 3a"


class AugmentedSource(Source):
    """Size, normalization and augmentation of images; the defaults are those of the papers' training.

    size: in pixels, one number or (height, width). auto_augment: a policy in timm's notation. color_jitter: strength,
    used only if auto_augment is null. random_erasing, horizontal_flip: probabilities. crop_scale: range of the share of
    the image's area that a training crop covers. interpolation: for validation images, and for training images if
    train_interpolation is null, where "random" chooses bilinear or bicubic. crop_pct: share of the resized validation
    image that the centre crop keeps. resize: "none" keeps the size of validation images; a batch then has images of one
    size, with the pixels of at most batch_size images of `size`. mean, std: per channel in 0..1, ImageNet's by default.
    augment_on: "device" moves uint8 images to the device, which augments whole batches: faster than "cpu" where few
    cores feed a GPU. The numbers drawn are the same, and so are the images, up to a level of 255 and the noise that
    erases; files are cropped where they are read. repeats: augmented copies of each image in a row (repeated
    augmentation). max_corrupt: number of unreadable images that may be left out.
    """

    preprocessing: Preprocessing
    of_one_size = False
    """Whether all images have one size before they are cropped, so that the device can do that too."""

    def __init__(
        self,
        size: Side | tuple[Side, Side] = 224,
        channels: Channels = 3,
        batch_size: Count = 128,
        auto_augment: Annotated[str, Policy()] | None = "rand-m9-mstd0.5-inc1",
        color_jitter: Annotated[float, Range(0, 10)] = 0.4,
        random_erasing: Share = 0.25,
        horizontal_flip: Share = 0.5,
        crop_scale: tuple[AboveZero, AboveZero] = (0.08, 1.0),
        interpolation: Annotated[str, OneOf(INTERPOLATIONS)] = "bicubic",
        train_interpolation: Annotated[str, OneOf((*INTERPOLATIONS, "random"))] | None = None,
        crop_pct: Annotated[float, Range(0.1, 1)] = 0.875,
        resize: Resize = "crop",
        mean: tuple[Share, ...] | None = None,
        std: tuple[Deviation, ...] | None = None,
        augment_on: Annotated[str, OneOf(("cpu", "device"))] = "cpu",
        repeats: Count = 1,
        max_corrupt: Amount = 0,
        seed: Seed = 0,
        num_workers: Workers = 4,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, max_corrupt, repeats)
        wrong = [(name, len(values)) for name, values in {"mean": mean, "std": std}.items() if values is not None]
        refuse(
            crop_scale[0] > crop_scale[1]
            and f"`crop_scale` is {list(crop_scale)}, expected the smaller share first: swap them.",
            *(
                count != channels
                and f"`{name}` has {count} numbers, but `channels` is {channels}: set one per channel."
                for name, count in wrong
            ),
        )
        self.preprocessing = Preprocessing(
            (size, size) if isinstance(size, int) else (size[0], size[1]),
            tuple(mean) if mean else per_channel(IMAGENET_DEFAULT_MEAN, channels),
            tuple(std) if std else per_channel(IMAGENET_DEFAULT_STD, channels),
            interpolation,
            crop_pct,
            resize,
        )
        self.augmentation: dict[str, Any] = {
            "auto_augment": auto_augment,
            "color_jitter": color_jitter,
            "re_prob": random_erasing,
            "re_mode": "pixel",
            "hflip": horizontal_flip,
            "scale": tuple(crop_scale),
            "interpolation": train_interpolation or interpolation,
        }
        self.augment_on = augment_on
        if augment_on == "device":
            chosen = self.augmentation["interpolation"]
            refuse(
                chosen not in ON_DEVICE
                and f"`augment_on` is 'device', where training images are not resized by {chosen!r}: set"
                f" `train_interpolation` to one of {', '.join(ON_DEVICE)}, or `augment_on` to cpu."
            )
            self.train_transform()

    @abstractmethod
    def images(self, split: str, transform: Callable[[Any], Any]) -> Dataset[Any]:
        """The transformed images of "train" or "val"."""

    def contents(self, split: str) -> Contents:
        return Contents(self.images(split, untransformed), image_content)

    def train_set(self) -> Dataset[Any]:
        return self.images("train", self.train_transform())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch, augmented if it has yet to be; its device is that of the network."""
        if not isinstance(batch[0], Drawn):
            return batch
        pre = self.preprocessing
        return augmented(batch[0], pre.size, pre.mean, pre.std), *batch[1:]

    def val_set(self) -> Dataset[Any]:
        return self.images("val", self.preprocessing.transform())

    def val_order(self, dataset: Any) -> dict[str, Any]:
        if getattr(self.preprocessing, "resize", "crop") == "crop":  # images to generate are never resized
            return super().val_order(dataset)
        sizes = getattr(dataset, "sizes", None)
        if sizes is None:
            raise SettingError(
                "`resize` is 'none', but this data does not say how large its images are: set it to crop, or use a"
                " folder of images."
            )
        height, width = self.preprocessing.size
        order = batches_of_one_size(sizes(), self.val_batch_size, self.val_batch_size * height * width)
        return {"batch_size": 1, "batch_sampler": order}

    def places(self, names: Sequence[str], where: Any) -> list[int]:
        """The numbers of these classes; raises ValueError for a class that the source does not have."""
        place = {name: number for number, name in enumerate(self.class_names)}
        strange = [name for name in names if name not in place]
        if strange:
            raise ValueError(
                f"{where} has the class {strange[0]!r}, but the {self.num_classes} classes known here are"
                f" {listed(self.class_names)}: remove or rename it."
            )
        return [place[name] for name in names]

    def train_transform(self) -> Callable[[Any], Any]:
        """The random transform from a PIL image to a float32 tensor (channels, height, width), or to Drawn."""
        pre = self.preprocessing
        transform: Compose = create_transform(
            (pre.channels, *pre.size), is_training=True, mean=pre.mean, std=pre.std, **self.augmentation
        )
        for step in transform.transforms:
            for op in (*getattr(step, "ops", ()), *(op for policy in getattr(step, "policy", ()) for op in policy)):
                if op.aug_fn is posterize:
                    op.aug_fn = _posterize
        return Draws(transform, not self.of_one_size) if self.augment_on == "device" else transform


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """The values; for another number of channels, their mean for each."""
    return tuple(values) if channels == len(values) else (sum(values) / len(values),) * channels


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Black if no bits are kept, as in the papers' training; newer versions of Pillow refuse that."""
    return posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)
