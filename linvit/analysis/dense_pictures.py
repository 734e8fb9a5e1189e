"""Objects and maps of labels drawn onto pictures, uint8 (3, height, width); small ones come back enlarged."""

import colorsys
import math
from collections.abc import Iterable, Sequence

import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes

READABLE = 640  # pixels of a picture's longer side, below which words would not fit
LETTERS = 14, 60  # font size in pixels, at least, and the picture's longer side over it
TURN = (math.sqrt(5) - 1) / 2  # of the colour circle from one class to the next: never twice the same hue
TONES = ((0.85, 1.0), (0.5, 1.0), (0.9, 0.65))  # saturation and value, in turn
SHADE = 0.45
LISTED, ROWS = 40, 8  # classes of a legend at most, and how many stand below each other even beside a low picture
IGNORED = 255
IGNORED_COLOR = (128, 128, 128)

Box = tuple[int, int, int, int]


def class_colors(count: int) -> list[tuple[int, int, int]]:
    """A colour (red, green, blue in 0..255) for each of so many classes, the same at every call."""
    shades = (colorsys.hsv_to_rgb(place * TURN % 1, *TONES[place % len(TONES)]) for place in range(count))
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in shades]


def draw_objects(
    picture: Tensor,
    boxes: Tensor,
    labels: Sequence[int],
    words: Sequence[str],
    num_classes: int,
    masks: Iterable[Tensor] | None = None,
) -> Tensor:
    """Boxes with words, over masks in the colours of their classes; where masks overlap, the first one is on top.

    Args:
        picture: uint8 (3, height, width).
        boxes: (n, 4) left, top, right, bottom in pixels.
        labels: class of each object, from 0.
        words: what stands at each box.
        num_classes: how many classes colours are for.
        masks: bool (height, width) of each object.
    """
    factor = _enlargement(picture)
    drawn = _enlarged(picture, factor)
    if not len(boxes):
        return drawn
    palette = class_colors(num_classes)
    colors = [palette[label] for label in labels]
    if masks is not None:
        owners = torch.full(picture.shape[-2:], -1, dtype=torch.int32)
        for number, mask in enumerate(masks):
            owners[mask & (owners < 0)] = number
        drawn = _shaded(drawn, _repeated(owners, factor), torch.tensor(colors, dtype=torch.int16))
    size = _letters(drawn)
    boxes = boxes.float().cpu() * factor
    drawn = draw_bounding_boxes(drawn, boxes.flip(0), colors=colors[::-1], width=max(2, size // 6))
    return _with_words(drawn, boxes.round().int().tolist(), words, colors, size)


def draw_map(picture: Tensor, labels: Tensor, class_names: Sequence[str]) -> Tensor:
    """The picture under the colours of its pixels' classes, with a legend to its right, the largest class first.

    Args:
        picture: uint8 (3, height, width).
        labels: (height, width), classes from 0, and 255 for pixels without one, which stay grey.
        class_names: one a class.
    """
    factor = _enlargement(picture)
    palette = torch.tensor([*class_colors(len(class_names)), IGNORED_COLOR], dtype=torch.int16)
    known = torch.where(labels == IGNORED, len(class_names), labels.int())
    drawn = _shaded(_enlarged(picture, factor), _repeated(known, factor), palette)
    return side_by_side(drawn, _legend(known, class_names, palette, drawn), 0)


def side_by_side(left: Tensor, right: Tensor, gap: int = 10) -> Tensor:
    """Two pictures beside each other, with so many white pixels between; the lower one is filled up below."""
    height = max(left.shape[1], right.shape[1])
    left, right = (
        F.pad(one, [0, 0, between, height - one.shape[1]], fill=255) for one, between in ((left, gap), (right, 0))
    )
    return torch.cat([left, right], dim=2)


def shares(labels: Tensor, num_classes: int) -> list[tuple[int, float]]:
    """(class, share of the pixels in 0..1) of the classes that occur in a map, the largest first."""
    counts = torch.bincount(labels.flatten(), minlength=num_classes)[:num_classes]
    order = counts.argsort(descending=True, stable=True).tolist()
    return [(place, counts[place].item() / labels.numel()) for place in order if counts[place]]


def _enlargement(picture: Tensor) -> int:
    return max(1, math.ceil(READABLE / max(picture.shape[-2:])))


def _enlarged(picture: Tensor, factor: int) -> Tensor:
    height, width = picture.shape[-2:]
    return F.resize(picture, [factor * height, factor * width]) if factor > 1 else picture


def _repeated(owners: Tensor, factor: int) -> Tensor:
    return owners.repeat_interleave(factor, 0).repeat_interleave(factor, 1)


def _letters(picture: Tensor) -> int:
    least, share = LETTERS
    return max(least, max(picture.shape[-2:]) // share)


def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


def _shaded(picture: Tensor, owners: Tensor, palette: Tensor) -> Tensor:
    """Mixes in the colour of each pixel's owner, pure along borders; negative owners leave pixels as they are."""
    colors = palette[owners.clamp(min=0)].movedim(-1, 0)
    border = torch.zeros_like(owners, dtype=torch.bool)
    border[1:] |= owners[1:] != owners[:-1]
    border[:-1] |= owners[1:] != owners[:-1]
    border[:, 1:] |= owners[:, 1:] != owners[:, :-1]
    border[:, :-1] |= owners[:, 1:] != owners[:, :-1]
    weight = torch.where(border, 1.0, SHADE) * (owners >= 0)
    return (picture + weight * (colors - picture)).round().to(torch.uint8)


def _with_words(
    picture: Tensor,
    boxes: Sequence[Sequence[int]],
    words: Sequence[str],
    colors: Sequence[tuple[int, int, int]],
    size: int,
) -> Tensor:
    """Words at the corners of boxes, inside the picture, where they cover no other words if there is such a place."""
    image = F.to_pil_image(picture)
    draw, font = ImageDraw.Draw(image), _font(size)
    taken: list[Box] = []
    for box, word, color in zip(boxes, words, colors, strict=True):
        left, top, right, bottom = draw.textbbox((0, 0), word, font)
        area = right - left + size // 2, bottom - top + size // 3
        places = _places(box, area, (image.width, image.height))
        place = next((one for one in places if not any(_meet(one, other) for other in taken)), places[0])
        taken.append(place)
        draw.rectangle(place, fill=color)
        draw.text((place[0] + size // 4 - left, place[1] + size // 6 - top), word, _ink(color), font)
    return F.pil_to_tensor(image)


def _places(box: Sequence[int], area: tuple[int, int], limits: tuple[int, int]) -> list[Box]:
    """Above the box, below it, then inside at its corners; each moved into the picture."""
    left, top, right, bottom = box
    width, height = area
    corners = [(left, top - height), (left, bottom), (left, top), (right - width, bottom - height)]
    corners.append((right - width, top - height))
    moved = [(max(0, min(x, limits[0] - width - 1)), max(0, min(y, limits[1] - height - 1))) for x, y in corners]
    return [(x, y, x + width, y + height) for x, y in moved]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _ink(color: tuple[int, int, int]) -> str:
    red, green, blue = color
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _legend(labels: Tensor, class_names: Sequence[str], palette: Tensor, picture: Tensor) -> Tensor:
    """White, with a square, name and share of each class, in as many columns as the picture's height makes it."""
    size = _letters(picture)
    font, row = _font(size), 3 * size // 2
    names = [*class_names, "not labelled"]
    entries = [(place, f"{names[place]}  {100 * share:.1f} %") for place, share in shares(labels, len(names))]
    entries, more = entries[:LISTED], len(entries) - LISTED
    column = 3 * size + max(math.ceil(font.getlength(words)) for _, words in entries)
    if more > 0:
        entries.append((-1, f"and {more} more"))
    height = max(picture.shape[1], size + row * min(len(entries), ROWS))
    each = (height - size) // row
    image = Image.new("RGB", (column * math.ceil(len(entries) / each), height), "white")
    draw = ImageDraw.Draw(image)
    for number, (place, words) in enumerate(entries):
        x, y = number // each * column + size // 2, number % each * row + size // 2
        if place >= 0:
            draw.rectangle((x, y, x + size, y + size), fill=tuple(palette[place].int().tolist()), outline="black")
        draw.text((x + 3 * size // 2, y), words, "black", font)
    return F.pil_to_tensor(image)
