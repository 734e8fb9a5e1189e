"""Augmentation of whole batches on their device; the number of operators does not depend on that of images.

The results are those of Pillow: levels and blends are the same numbers, moved pixels differ by at most a level of 255.
Crops are rounded once, not after each axis, whose order depends on the version of Pillow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from linvit.data.images.augmentation_steps import LEVELED, NUMBER, Drawn

GREY = (19595, 38470, 7471)  # of red, green and blue in 65,536
LEVELS = 256
MARGIN = 2.5e-4  # of a level: what rounding may take from a whole number before it is cut off


def augmented(drawn: Drawn, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """float32 images (batch, channels, *size), normalized. drawn: a batch."""
    pixels = cropped(drawn.pixels, drawn.crop, size) if drawn.crop.shape[1] else drawn.pixels
    pixels = torch.where(drawn.mirrored[:, None, None, None], pixels.flip(-1), pixels)
    of_channel = pixels.new_tensor([mean, std], dtype=torch.float32)[:, :, None, None]
    fill = (LEVELS - 1) * of_channel[0]
    for step in drawn.steps.unbind(1):
        kind, argument = step[:, 0].long(), step[:, 1]
        pixels = blended(leveled(pixels, kind, argument), kind, argument)
        pixels = moved(pixels, kind, step[:, 2:8], step[:, 8] > 0, fill.round().clamp(max=LEVELS - 1))
    images = (pixels.float() / (LEVELS - 1) - of_channel[0]) / of_channel[1]
    generator = torch.Generator(images.device).manual_seed(int(drawn.seed[0]))
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    top, bottom, left, right = drawn.erased[:, :, None, None, None].unbind(1)
    rows, columns = (torch.arange(side, device=images.device) for side in size)
    rows = rows[:, None]
    return torch.where((rows >= top) & (rows < bottom) & (columns >= left) & (columns < right), noise, images)


def cropped(pixels: Tensor, crop: Tensor, size: tuple[int, int]) -> Tensor:
    """The rectangles (batch, 5), see Drawn, of images (batch, channels, height, width), resized."""
    top, left, height, width, bilinear = crop.double()[:, :, None, None].unbind(1)
    across = _resizing(left, width, pixels.shape[3], size[1], bilinear > 0)
    down = _resizing(top, height, pixels.shape[2], size[0], bilinear > 0)
    levels = down[:, None] @ pixels.float() @ across.mT[:, None]
    return (levels + 0.5).floor().clamp(0, LEVELS - 1).to(torch.uint8)


def _resizing(start: Tensor, length: Tensor, before: int, after: int, bilinear: Tensor) -> Tensor:
    """The matrices (batch, after, before) that resize an axis as Pillow does."""
    scale = length / after
    centre = (torch.arange(after, device=start.device)[:, None] + 0.5) * scale
    place = torch.arange(before, device=start.device) - start
    x = (place + 0.5 - centre) / scale.clamp(min=1)
    weights = torch.where(bilinear, (1 - x.abs()).clamp(min=0), _cubic(x, -0.5)) * ((place >= 0) & (place < length))
    return (weights / weights.sum(-1, keepdim=True)).float()


def _cubic(x: Tensor, slope: float) -> Tensor:
    """Keys' kernel: what a pixel at distance x weighs."""
    x = x.abs()
    near = ((slope + 2) * x - (slope + 3)) * x * x + 1
    far = slope * (((x - 5) * x + 8) * x - 4)
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def leveled(pixels: Tensor, kind: Tensor, argument: Tensor) -> Tensor:
    """The images in which a table of levels replaces each level of a channel; other kinds stay as they are."""
    flat = pixels.flatten(2).long()
    counts = flat.new_zeros(*flat.shape[:2], LEVELS).scatter_add_(2, flat, flat.new_ones(()).expand_as(flat))
    level = torch.arange(LEVELS, device=pixels.device).expand_as(counts)
    least = (counts > 0).int().argmax(-1, keepdim=True)
    most = LEVELS - 1 - (counts > 0).flip(-1).int().argmax(-1, keepdim=True)
    scale = torch.full_like(most, LEVELS - 1, dtype=torch.float64) / (most - least)  # 255 / tensor rounds twice
    stretched = torch.where(most > least, (level * scale - least * scale).clamp(0, LEVELS - 1).nan_to_num(), level)
    share = (flat.shape[2] - counts.gather(2, most)) // (LEVELS - 1)
    below = share // 2 + counts.cumsum(-1) - counts
    argument = argument[:, None, None]
    mean = (_grey(pixels).flatten(1).double().mean(-1)[:, None, None] + 0.5).floor()
    kept = 2 ** (8 - argument.clamp(0, 8)).long()
    tables = {
        "nothing": level,
        "auto_contrast": stretched,
        "equalize": torch.where(share > 0, below // share.clamp(min=1), level),
        "invert": LEVELS - 1 - level,
        "posterize": level // kept * kept,
        "solarize": torch.where(level < argument, level, LEVELS - 1 - level),
        "solarize_add": torch.where(level < LEVELS // 2, level + argument, level),
        "brightness": _between(0.0, level.float(), argument.float()),
        "contrast": _between(mean.float(), level.float(), argument.float()),
    }
    of_kind = torch.stack([tables[name].double() for name in LEVELED]).clamp(0, LEVELS - 1).to(torch.uint8)
    number = torch.where(kind < len(tables), kind, 0)
    table = of_kind[number, torch.arange(len(pixels), device=pixels.device)]
    return table.gather(2, flat).view_as(pixels)


def blended(pixels: Tensor, kind: Tensor, argument: Tensor) -> Tensor:
    """The images between grey or smooth ones and themselves; other kinds stay as they are."""
    kind, argument = kind[:, None, None, None], argument.float()[:, None, None, None]
    levels = pixels.float()
    smooth = levels.clone()
    sums = avg_pool2d(levels, 3, 1, divisor_override=1) + 4 * levels[..., 1:-1, 1:-1]
    smooth[..., 1:-1, 1:-1] = ((2 * sums + 13) / 26 + MARGIN / LEVELS).floor()
    between = torch.where(kind == NUMBER["color"], _grey(pixels).float(), smooth)
    chosen = (kind == NUMBER["color"]) | (kind == NUMBER["sharpness"])
    return torch.where(chosen, _between(between, levels, argument), levels).to(torch.uint8)


def _between(start: float | Tensor, end: Tensor, factor: Tensor) -> Tensor:
    """start for 0, end for 1, cut off to whole levels."""
    return (start + factor * (end - start)).clamp(0, LEVELS - 1).trunc()


def _grey(pixels: Tensor) -> Tensor:
    """(batch, 1, height, width), int32."""
    if pixels.shape[1] == 1:
        return pixels.int()
    weights = torch.tensor(GREY, dtype=torch.int32, device=pixels.device)[:, None, None]
    return ((pixels.int() * weights).sum(1, keepdim=True, dtype=torch.int32) + 2**15) >> 16


def moved(pixels: Tensor, kind: Tensor, matrix: Tensor, bilinear: Tensor, fill: Tensor) -> Tensor:
    """The images mapped by matrices (batch, 6), see MOVES, with `fill` (channels, 1, 1) around them; see `leveled`."""
    height, width = pixels.shape[2:]
    rows, columns = (torch.arange(side, device=pixels.device) + 0.5 for side in (height, width))
    a, b, c, d, e, f = matrix.float()[:, :, None, None].unbind(1)
    x, y = a * columns + b * rows[:, None] + c, d * columns + e * rows[:, None] + f
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    (left, above), (weights_x, weights_y) = _taps(torch.stack((x, y)) - 0.5, bilinear)
    flat = pixels.flatten(2)
    sums = torch.zeros_like(pixels, dtype=torch.float32)
    columns = (left + torch.arange(4, device=pixels.device)[:, None, None]).clamp(0, width - 1)
    for row in range(4):
        place = ((above + row).clamp(0, height - 1) * width + columns).flatten(1)[:, None]
        line = flat.gather(2, place.expand(-1, flat.shape[1], -1)).unflatten(2, weights_x.shape[1:])
        sums += (line * (weights_x * weights_y[:, row : row + 1])[:, None]).sum(2)
    levels = torch.where(inside[:, None], (sums + MARGIN).clamp(0, LEVELS - 1).floor(), fill)
    return torch.where((kind == NUMBER["affine"])[:, None, None, None], levels.to(torch.uint8), pixels)


def _taps(place: Tensor, bilinear: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the four pixels around places (2, batch, height, width), and what each weighs, (2, batch, 4, …).

    Pillow's cubic is steeper here than in `_resizing`.
    """
    first = place.floor()
    x = (place - first)[:, :, None] - torch.arange(-1, 3, device=place.device)[:, None, None]
    weights = torch.where(bilinear[:, None, None, None], (1 - x.abs()).clamp(min=0), _cubic(x, -1.0))
    return first.long()[:, :, None] - 1, weights
