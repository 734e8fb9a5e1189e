"""Objects and label maps drawn on images, uint8 (3, height, width); small images are enlarged."""

import colorsys
import math
from collections.abc import Iterable, Sequence

import torch
from matplotlib import font_manager
from PIL import ImageFont
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

READABLE = 640  # pixels: images whose longer side is shorter are enlarged, so that labels fit
LETTERS = 14, 60  # smallest font size in pixels; the longer side divided by the font size
TURN = (math.sqrt(5) - 1) / 2  # part of the colour circle between two classes: every hue is different
TONES = ((0.85, 1.0), (0.5, 1.0), (0.9, 0.65))  # saturation and value, in turn
SHADE = 0.45
MARGIN = 4  # pixels that torchvision needs around a label
ROWS = 8  # classes of a legend that are listed next to an image of any height
IGNORED, IGNORED_COLOR = 255, (128, 128, 128)

Color = tuple[int, int, int]


def class_colors(count: int) -> list[Color]:
    """A colour (red, green, blue in 0..255) for each of `count` classes, always the same."""
    shades = (colorsys.hsv_to_rgb(place * TURN % 1, *TONES[place % len(TONES)]) for place in range(count))
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in shades]


def draw_objects(
    image: Tensor,
    boxes: Tensor,
    labels: Sequence[int],
    words: Sequence[str],
    num_classes: int,
    masks: Iterable[Tensor] | None = None,
) -> Tensor:
    """The image with a labelled box and a mask for each object, in the colour of its class; the first is on top.

    Args:
        image: uint8 (3, height, width).
        boxes: (n, 4) left, top, right, bottom in pixels.
        labels: class of each object, from 0.
        words: the label at each box.
        num_classes: number of classes.
        masks: bool (height, width) for each object.
    """
    owners = torch.full(image.shape[-2:], -1, dtype=torch.int32)
    for number, mask in enumerate(() if masks is None else masks):
        owners[mask & (owners < 0)] = number
    palette = class_colors(num_classes)
    colors = [palette[label] for label in labels]
    image, factor = _shaded(image, owners, colors)
    if not len(boxes):
        return image
    size = _letters(image)
    boxes = boxes.float().cpu() * factor
    image = draw_bounding_boxes(image, boxes.flip(0), colors=colors[::-1], width=max(2, size // 6))
    corners = [(left, top - 1.3 * size) for left, top, _, _ in boxes.tolist()]
    return _labelled(image, corners, words, colors, size)


def draw_map(image: Tensor, labels: Tensor, class_names: Sequence[str]) -> Tensor:
    """The image tinted by the classes of its pixels, with a legend on the right, the largest class first.

    Args:
        image: uint8 (3, height, width).
        labels: integers (height, width), classes from 0; 255 for pixels without a class, which turn grey.
        class_names: one for each class.
    """
    names, colors = [*class_names, "not labelled"], [*class_colors(len(class_names)), IGNORED_COLOR]
    known = torch.where(labels == IGNORED, len(class_names), labels.int())
    image, _ = _shaded(image, known, colors)
    size = _letters(image)
    row = 3 * size // 2
    height = max(image.shape[1], row * (ROWS + 1))
    rows = height // row - 1
    classes = shares(known, len(names))
    words = [f"{names[place]}  {100 * share:.1f} %" for place, share in classes[:rows]]
    fills = [colors[place] for place, _ in classes[:rows]]
    if len(classes) > rows:
        words[-1], fills[-1] = f"and {len(classes) - rows + 1} more", (255, 255, 255)
    width = 2 * size + max(math.ceil(ImageFont.truetype(_font(), size).getlength(word)) for word in words)
    corners = [(size, size // 2 + number * row) for number in range(len(words))]
    legend = torch.full((3, height, width), 255, dtype=torch.uint8)
    return side_by_side(image, _labelled(legend, corners, words, fills, size), 0)


def side_by_side(left: Tensor, right: Tensor, gap: int = 10) -> Tensor:
    """Two images with `gap` white pixels between them; the lower one is padded with white at the bottom."""
    height = max(left.shape[1], right.shape[1])
    left = F.pad(left, [0, 0, gap, height - left.shape[1]], fill=255)
    return torch.cat([left, F.pad(right, [0, 0, 0, height - right.shape[1]], fill=255)], dim=2)


def shares(labels: Tensor, num_classes: int) -> list[tuple[int, float]]:
    """(class, share of the pixels in 0..1) for each class that occurs in a label map, the largest first."""
    return largest_shares(torch.bincount(labels.flatten(), minlength=num_classes)[:num_classes], labels.numel())


def largest_shares(counts: Tensor, pixels: int) -> list[tuple[int, float]]:
    """The same from the number of pixels of each class, and of all."""
    order = counts.argsort(descending=True, stable=True).tolist()
    return [(place, counts[place].item() / pixels) for place in order if counts[place]]


def _shaded(image: Tensor, owners: Tensor, colors: Sequence[Color]) -> tuple[Tensor, int]:
    """The image, enlarged so that labels fit and tinted by the owner of each pixel (−1: none), and the factor."""
    factor = max(1, math.ceil(READABLE / max(image.shape[-2:])))
    size = [factor * side for side in image.shape[-2:]]
    image = F.resize(image, size) if factor > 1 else image
    owners = F.resize(owners[None], size, F.InterpolationMode.NEAREST)[0]
    present = [number for number in owners.unique().tolist() if number >= 0]
    if not present:
        return image, factor
    masks = torch.stack([owners == number for number in present])
    return draw_segmentation_masks(image, masks, SHADE, [colors[number] for number in present]), factor


def _letters(image: Tensor) -> int:
    least, share = LETTERS
    return max(least, max(image.shape[-2:]) // share)


def _font() -> str:
    return font_manager.findfont("DejaVu Sans")


def _labelled(
    image: Tensor, corners: Sequence[tuple[float, float]], words: Sequence[str], colors: Sequence[Color], size: int
) -> Tensor:
    """The image with words at the given upper left corners, moved so that they are inside it and do not overlap."""
    font, row = ImageFont.truetype(_font(), size), 1.4 * size
    lowest = image.shape[1] - row
    taken: list[tuple[float, float, float]] = []
    for (x, y), word in zip(corners, words, strict=True):
        width = font.getlength(word) + MARGIN
        x, y = max(0, min(x, image.shape[2] - width)), max(0, min(y, lowest))
        step = row if 2 * y < lowest else -row
        while 0 <= y + step <= lowest and any(
            abs(y - top) < row and x < left + room and left < x + width for left, top, room in taken
        ):
            y += step
        taken.append((x, y, width))
    return draw_bounding_boxes(
        image,
        torch.tensor([(x, y, x, y) for x, y, _ in taken]),
        list(words),
        list(colors),
        width=0,
        font=_font(),
        font_size=size,
        label_colors=["black" if 0.299 * r + 0.587 * g + 0.114 * b > 140 else "white" for r, g, b in colors],
        fill_labels=True,
    )
