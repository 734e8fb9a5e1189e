"""Augmentation on the device: what timm's transforms draw for an image is noted, and done later to the whole batch.

Every number is drawn by timm's own code, in the order in which it draws them when it transforms an image at once.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import auto_augment as timms
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms import ColorJitter, Compose, RandomHorizontalFlip
from torchvision.transforms.functional import InterpolationMode, pil_to_tensor

from linvit.errors import refuse

INTERPOLATIONS = ("bilinear", "bicubic", "random")
JITTERED = ("brightness", "contrast", "color")
LEVELED = ("nothing", "auto_contrast", "equalize", "invert", "posterize", "solarize", "solarize_add", *JITTERED[:2])
NUMBER = {name: number for number, name in enumerate((*LEVELED, "color", "sharpness", "affine"))}
REFUSED = (
    "`augment_on` is 'device', where images are neither blurred (policies with 3a) nor mixed with themselves (augmix):"
    " choose another `auto_augment`, or set it to cpu."
)
Step = tuple[float, ...]
"""The number of its kind, its argument, six numbers of an affine map, and whether that is bilinear."""
UNMOVED = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
NOTHING: Step = (0.0, 0.0, *UNMOVED, 0.0)
MOVES: Mapping[Callable[..., Any], Callable[[float, int, int], Sequence[float]]] = {
    timms.shear_x: lambda factor, width, height: (1, factor, 0, 0, 1, 0),
    timms.shear_y: lambda factor, width, height: (1, 0, 0, factor, 1, 0),
    timms.translate_x_abs: lambda pixels, width, height: (1, 0, pixels, 0, 1, 0),
    timms.translate_y_abs: lambda pixels, width, height: (1, 0, 0, 0, 1, pixels),
    timms.translate_x_rel: lambda share, width, height: (1, 0, share * width, 0, 1, 0),
    timms.translate_y_rel: lambda share, width, height: (1, 0, 0, 0, 1, share * height),
    timms.rotate: lambda degrees, width, height: _rotation(math.radians(degrees), width / 2, height / 2),
}
"""From a pixel of the output to its place in the input, by timm's function."""


class Drawn(NamedTuple):
    """An image and what is to be done with it, or a batch of them.

    pixels: uint8 (channels, height, width). crop: int64 (top, left, height, width, whether bilinear), empty if that is
    done. mirrored: bool. steps: float64 (steps, 9), see Step. erased: int64 (top, bottom, left, right). seed: int64, of
    the noise there.
    """

    pixels: Tensor
    crop: Tensor
    mirrored: Tensor
    steps: Tensor
    erased: Tensor
    seed: Tensor


class Draws:
    """A transform from a PIL image to Drawn. transform: of timm. crops: whether to crop here, not on the device.

    Raises SettingError for what cannot be done on the device.
    """

    def __init__(self, transform: Compose, crops: bool) -> None:
        self.crops = crops
        self.first, *self.others = transform.transforms
        self.most = 0  # steps
        for step in self.others:
            if isinstance(step, RandomErasing):
                step.device, step.per_pixel = "cpu", False  # makes no noise
            refuse(isinstance(step, timms.AugMixAugment) and REFUSED)
            policies = getattr(step, "policy", [])
            self.most += getattr(step, "num_layers", max(map(len, policies), default=0))
            self.most += len(JITTERED) if isinstance(step, ColorJitter) else 0
            for operation in (*getattr(step, "ops", ()), *(each for policy in policies for each in policy)):
                operation.aug_fn = Noted(operation.aug_fn)

    def __call__(self, image: Image.Image) -> Drawn:
        assert isinstance(self.first, RandomResizedCropAndInterpolation)
        crop = torch.empty(0, dtype=torch.int64)
        if self.crops:
            image = self.first(image)
        else:
            box = self.first.get_params(image, self.first.scale, self.first.ratio)
            crop = torch.tensor([*box, _is_bilinear(self.first.interpolation)])
        notes, mirrored = Notes(len(image.getbands()), *self.first.size), False
        for step in self.others:
            if isinstance(step, RandomHorizontalFlip):
                mirrored = bool(torch.rand(1) < step.p)
            elif isinstance(step, ColorJitter):
                notes.steps += _jitter(step)
            elif isinstance(step, timms.RandAugment | timms.AutoAugment | RandomErasing):
                step(notes)
        rest = [NOTHING] * (self.most - len(notes.steps))
        steps = torch.tensor([*notes.steps, *rest], dtype=torch.float64).reshape(-1, len(NOTHING))
        seed = torch.empty((), dtype=torch.int64).random_()
        return Drawn(pil_to_tensor(image), crop, torch.tensor(mirrored), steps, torch.tensor(notes.erased), seed)


class Notes:
    """What is to be done, in place of an image of this size (channels, height, width)."""

    dtype = torch.float32

    def __init__(self, *size: int) -> None:
        self.size: Callable[[], tuple[int, ...]] = lambda: size
        self.steps: list[Step] = []
        self.erased = (0, 0, 0, 0)

    def __setitem__(self, place: tuple[slice, slice, slice], noise: Tensor) -> None:
        _, rows, columns = place
        self.erased = (rows.start, rows.stop, columns.start, columns.stop)


class Noted:
    """Notes what one of timm's functions would do. Raises SettingError for a function that the device does not have."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__.removeprefix("_")
        refuse(function not in MOVES and self.name not in NUMBER and REFUSED)

    def __call__(self, notes: Notes, argument: float = 0.0, *, resample: Any, **options: Any) -> Notes:
        if move := MOVES.get(self.function):
            _, height, width = notes.size()
            notes.steps.append((NUMBER["affine"], 0.0, *move(argument, width, height), _is_bilinear(resample)))
        else:
            notes.steps.append((NUMBER[self.name], argument, *UNMOVED, 0.0))
        return notes


def _jitter(step: ColorJitter) -> list[Step]:
    order, *factors = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
    chosen = [(JITTERED[place], factors[place]) for place in order.tolist() if place < len(JITTERED)]
    return [(NUMBER[name], factor, *UNMOVED, 0.0) for name, factor in chosen if factor is not None]


def _is_bilinear(interpolation: Any) -> bool:
    chosen = random.choice(interpolation) if isinstance(interpolation, list | tuple) else interpolation
    return chosen in (InterpolationMode.BILINEAR, Image.Resampling.BILINEAR)


def _rotation(angle: float, x: float, y: float) -> Sequence[float]:
    """Of a picture around (x, y), counterclockwise by an angle in radians."""
    cos, sin = math.cos(angle), math.sin(angle)
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y
