"""Lines of text from books, rendered in poor quality, with the fonts that come with matplotlib."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import atan, ceil, degrees
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from evidence.passages import paragraphs
from evidence.text_recognizer import HEIGHT

LETTERS = (8, 40)
"""The fewest and the most characters of a line."""
READABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9'-]*[.,;:!?]?")
STEP = 32
"""Widths are multiples of it, so that lines can be read in batches without padding."""
BILINEAR = Image.Resampling.BILINEAR
INVERTED = 0.2
"""The share of lines that are light on dark."""
SEEN_FONTS = tuple(
    f"DejaVu{name}"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for name in (family, f"{family}-Bold", f"{family}-{slanted}", f"{family}-Bold{slanted}")
)
HELD_OUT_FONTS = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")


@dataclass(frozen=True)
class Line:
    """What a line says, the number of its book, its font, and the seed of its appearance."""

    text: str
    book: int
    font: str
    seed: int


def lines_of(books: Sequence[Path], count: int, fonts: Sequence[str], seed: int) -> list[Line]:
    """`count` lines of each book at random places: runs of words of letters, digits and simple punctuation."""
    lines: dict[tuple[int, str], Line] = {}
    for book, path in enumerate(books):
        chosen, words = random.Random(f"{seed} {book}"), " ".join(paragraphs(path)).replace("’", "'").split()
        while sum(number == book for number, _ in lines) < count:
            start = chosen.randrange(len(words))
            text = " ".join(words[start : start + chosen.randint(2, 7)])
            if LETTERS[0] <= len(text) <= LETTERS[1] and all(map(READABLE.fullmatch, text.split())):
                lines[book, text] = Line(text, book, chosen.choice(fonts), chosen.getrandbits(32))
    return list(lines.values())


def render(line: Line) -> np.ndarray:
    """The line in gray, uint8 (HEIGHT, width): turned, blurred, of little contrast and noisy, as its seed decides."""
    drawn = random.Random(line.seed)
    font = _font(line.font, drawn.uniform(27, 38))
    left, top, right, bottom = font.getbbox(line.text, anchor="ls")
    width = ceil((right - left + drawn.uniform(12, 28)) / STEP) * STEP
    paper, contrast = drawn.uniform(150, 255), drawn.uniform(80, 150)
    image = Image.new("L", (width, HEIGHT), round(paper))
    x = drawn.uniform(4, width - (right - left) - 4) - left
    y = (HEIGHT - top - bottom) / 2 + drawn.uniform(-3, 3)
    ImageDraw.Draw(image).text((x, y), line.text, fill=round(paper - contrast), font=font, anchor="ls")
    image = image.rotate(degrees(atan(drawn.uniform(-6, 6) / width)), BILINEAR, fillcolor=round(paper))
    shrunk = drawn.uniform(1, 1.5)
    image = image.resize((round(width / shrunk), round(HEIGHT / shrunk)), BILINEAR).resize((width, HEIGHT), BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(drawn.uniform(0, 0.8)))
    noise = np.random.default_rng(line.seed).normal(0, drawn.uniform(0, 10), (HEIGHT, width))
    gray = np.asarray(image, dtype=np.float64) + noise
    return (255 - gray if drawn.random() < INVERTED else gray).round().clip(0, 255).astype(np.uint8)


def _font(name: str, height: float) -> ImageFont.FreeTypeFont:
    """The font in the size in which an ascender and a descender together span `height` pixels."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    _, top, _, bottom = ImageFont.truetype(path, 100).getbbox("dg")
    return ImageFont.truetype(path, 100 * height / (bottom - top))


def by_width(lines: Sequence[Line]) -> dict[int, tuple[Tensor, Tensor]]:
    """The lines of each width: their places among all, and their images for the recognizer, uint8."""
    groups: dict[int, list[tuple[int, np.ndarray]]] = {}
    for place, line in enumerate(lines):
        image = render(line)
        groups.setdefault(image.shape[1], []).append((place, image))
    return {
        width: (torch.tensor([place for place, _ in group]), torch.from_numpy(np.stack([image for _, image in group])))
        for width, group in sorted(groups.items())
    }


def normalized(images: Tensor) -> Tensor:
    """Gray images (lines, height, width), uint8, as the recognizer reads them, (lines, 3, height, width)."""
    return ((images.float() / 255 - 0.5) / 0.5)[:, None].expand(-1, 3, -1, -1)
