"""Transforms of images with boxes, masks and label maps, on torchvision's v2; the others follow mmdetection 2.11
and mmsegmentation 0.13, whose numbers the papers' recipes use.

Long and short side are in pixels. Label maps are masks of shape (height, width) with 255 for ignored pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

IGNORED = 255
SHORT_SIDES = tuple(range(480, 801, 32))
CROP_SHORT_SIDES = (400, 500, 600)
CROP_RANGE = (384, 600)
HUES = 180  # steps of the colour circle in 8-bit HSV
TRIES = 10


class Resize(v2.Transform):
    """Scales images so that they just fit the long and the short side given, keeping their ratio.

    short_sides: one of them is chosen. ratio: the range of a random factor for both sides. Sizes are rounded
    (torchvision's RandomShortestSize cuts), images are interpolated bilinearly without antialiasing, masks by the
    nearest pixel, as mmcv does with OpenCV.
    """

    def __init__(self, long_side: int, short_sides: Sequence[int], ratio: tuple[float, float] | None = None) -> None:
        super().__init__()
        self.long_side = long_side
        self.short_sides = list(short_sides)
        self.ratio = ratio

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        short = self.short_sides[_randint(0, len(self.short_sides))]
        long = max(self.long_side, short)
        if self.ratio:
            factor = _uniform(*self.ratio)
            long, short = int(long * factor), int(short * factor)
        scale = min(long / max(height, width), short / min(height, width))
        return {"size": [max(int(side * scale + 0.5), 1) for side in (height, width)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.resize, inpt, size=params["size"], antialias=False)


class RandomSizeCrop(v2.Transform):
    """Cuts out a window whose height and width are random between smallest and largest (pixels) or the image's."""

    def __init__(self, smallest: int, largest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.largest = largest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = (
            _randint(min(side, self.smallest), min(side, self.largest) + 1) for side in v2.query_size(flat_inputs)
        )
        return _window(v2.query_size(flat_inputs), (height, width))

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.crop, inpt, **params)


class VariedCrop(v2.Transform):
    """Cuts out a window of up to size (height, width) in which no label covers most of the pixels that count.

    Up to ten windows are tried until one has two labels or more and none of them above largest_share; otherwise the
    eleventh is used unchecked. With 1.0 the first is used.
    """

    def __init__(self, size: tuple[int, int], largest_share: float = 0.75) -> None:
        super().__init__()
        self.size = size
        self.largest_share = largest_share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        whole = v2.query_size(flat_inputs)
        labels = next((value for value in flat_inputs if isinstance(value, tv_tensors.Mask)), None)
        window = _window(whole, self.size)
        if labels is None or self.largest_share >= 1:
            return window
        for _ in range(TRIES):
            counts = torch.bincount(F.crop(labels, **window).flatten().int(), minlength=IGNORED + 1)[:IGNORED]
            if (counts > 0).sum() > 1 and counts.max() < self.largest_share * counts.sum():
                break
            window = _window(whole, self.size)
        return window

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(F.crop, inpt, **params)


class PadTo(v2.Transform):
    """Fills images with zeros and masks with 255, to the right and below, up to size (height, width)."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, max(self.size[1] - width, 0), max(self.size[0] - height, 0)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        fill = IGNORED if isinstance(inpt, tv_tensors.Mask) else 0
        return self._call_kernel(F.pad, inpt, padding=params["padding"], fill=fill)


class PhotometricDistortion(v2.Transform):
    """Shifts brightness by up to ±32 of 255, scales contrast and saturation by 0.5 to 1.5, turns hue by up to ±36°.

    Each happens with probability 1/2, contrast second or last, on uint8 images, rounded after each step. torchvision's
    RandomPhotometricDistort differs: brightness is a factor there, contrast and saturation are mixtures with grey, hue
    turns by ±18°, and channels change places.
    """

    _transformed_types = (tv_tensors.Image,)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        steps: list[Callable[[Tensor], Tensor]] = []
        if _randint(0, 2):
            steps.append(partial(_scale, factor=1.0, shift=_uniform(-32, 32)))
        contrast = [partial(_scale, factor=_uniform(0.5, 1.5), shift=0.0)] if _randint(0, 2) else []
        contrast_is_second = bool(_randint(0, 2))
        if contrast_is_second:
            steps += contrast
        if _randint(0, 2):
            steps.append(partial(scale_saturation, factor=_uniform(0.5, 1.5)))
        if _randint(0, 2):
            steps.append(partial(F.adjust_hue, hue_factor=_randint(-18, 18) / HUES))
        return {"steps": steps if contrast_is_second else steps + contrast}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        image = inpt.as_subclass(Tensor)
        for step in params["steps"]:
            image = step(image)
        return tv_tensors.wrap(image, like=inpt)


class KeepVisible(torch.nn.Module):
    """Drops the objects of a target whose box or mask is empty after a crop.

    Boxes narrower than a pixel stay, as in mmdetection; SanitizeBoundingBoxes drops those and ignores masks.
    """

    def forward(self, image: Any, target: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        boxes = target["boxes"]
        visible = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        if "masks" in target:
            visible &= target["masks"].flatten(1).amax(1) > 0
        kept = {
            key: tv_tensors.wrap(value[visible], like=value)
            if isinstance(value, tv_tensors.TVTensor)
            else value[visible]
            for key, value in target.items()
            if key in ("boxes", "labels", "masks", "iscrowd", "area")
        }
        return image, {**target, **kept}


def scale_saturation(image: Tensor, factor: float) -> Tensor:
    """Scales the saturation of HSV, up to 1, of a uint8 image (3, height, width); value and hue stay."""
    values = image.float()
    brightest = values.amax(-3, keepdim=True)
    spread = brightest - values.amin(-3, keepdim=True)
    factor_within = torch.minimum(torch.full_like(spread, factor), brightest / spread.clamp(min=1))
    return (brightest - (brightest - values) * factor_within).round().to(torch.uint8)


def normalize(mean: Sequence[float], std: Sequence[float]) -> list[v2.Transform]:
    """From uint8 to float32 in 0..1, minus mean, over std."""
    return [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True), v2.Normalize(mean, std)]


def detection_transform(
    resizing: Sequence[v2.Transform], flip: float, mean: Sequence[float], std: Sequence[float]
) -> v2.Transform:
    """The training transform of (image, target): resizing (see RESIZINGS), flip with a probability, normalization."""
    flips = [v2.RandomHorizontalFlip(flip)] if flip else []
    return v2.Compose([*flips, *resizing, KeepVisible(), *normalize(mean, std), v2.ToPureTensor()])


def single(long_side: int, short_side: int, **_: Any) -> list[v2.Transform]:
    """One size, as in the 1× schedules."""
    return [Resize(long_side, [short_side])]


def multiscale(long_side: int, short_side: int, short_sides: Sequence[int], **_: Any) -> list[v2.Transform]:
    """The short side is random."""
    return [Resize(long_side, short_sides)]


def detr(
    long_side: int,
    short_side: int,
    short_sides: Sequence[int],
    crop_short_sides: Sequence[int],
    crop_range: tuple[int, int],
    **_: Any,
) -> list[v2.Transform]:
    """Two policies, equally likely: a random short side; or shrink and crop first. The 3× schedules' (DETR's)."""
    several = Resize(long_side, short_sides)
    cropped = v2.Compose([Resize(long_side, crop_short_sides), RandomSizeCrop(*crop_range), several])
    return [v2.RandomChoice([several, cropped])]


def jitter(long_side: int, short_side: int, jitter_size: int, mean: Sequence[float], **_: Any) -> list[v2.Transform]:
    """Large-scale jitter: 0.1 to 2.0 times a square's size, cropped or filled with the mean colour to the square."""
    filled: dict[Any, Any] = {tv_tensors.Image: [round(255 * value) for value in mean], "others": 0}
    square = (jitter_size, jitter_size)
    return [v2.ScaleJitter(square, antialias=False), v2.RandomCrop(square, pad_if_needed=True, fill=filled)]


RESIZINGS: Mapping[str, Callable[..., list[v2.Transform]]] = {
    resizing.__name__: resizing for resizing in (single, multiscale, detr, jitter)
}


def _randint(low: int, high: int) -> int:
    """A whole number from low to high − 1."""
    return int(torch.randint(low, high, ()))


def _uniform(low: float, high: float) -> float:
    return float(torch.empty(()).uniform_(low, high))


def _window(whole: tuple[int, int], size: tuple[int, int]) -> dict[str, int]:
    """A random window of up to size (height, width) within an image of size `whole`."""
    height, width = min(size[0], whole[0]), min(size[1], whole[1])
    top, left = _randint(0, whole[0] - height + 1), _randint(0, whole[1] - width + 1)
    return {"top": top, "left": left, "height": height, "width": width}


def _scale(image: Tensor, factor: float, shift: float) -> Tensor:
    """Cut to 0..255 and rounded down, as a conversion to 8 bits does."""
    return (image.float() * factor + shift).clamp(0, 255).to(torch.uint8)
