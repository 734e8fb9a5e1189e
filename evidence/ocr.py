"""A recognizer of text lines with linear attention: aligned, distilled, and measured on rendered lines.

Both softmax attentions of `evidence.text_recognizer` become linear. Each first learns the output of the one that it
replaces (align); then all layers after the convolutional network but the classifier learn what the teacher computes
(distill). No labels are used. The convolutional network stays as it is, so its features are computed once.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from evidence.ocr_page import write_results, write_times
from evidence.passages import chosen_books
from evidence.rows import EVIDENCE, Call
from evidence.text_lines import HELD_OUT_FONTS, SEEN_FONTS, Line, by_width, lines_of, normalized
from evidence.text_recognizer import BLANK, Reader, Recognizer, decode, linearized, load_recognizer
from linvit.studies.comparison import Say
from linvit.studies.pool import Ledger

Step = Callable[[Tensor], Tensor]
AT_ONCE = 4


@dataclass(frozen=True)
class Part:
    """Lines of each of `books` books, in the order in which they are chosen; seed: of the lines."""

    books: int
    lines: int
    fonts: tuple[str, ...]
    seed: int


PARTS = {
    "test": Part(20, 250, HELD_OUT_FONTS, 0),
    "development": Part(10, 50, SEEN_FONTS, 1),
    "training": Part(60, 150, SEEN_FONTS, 2),
}


@dataclass(frozen=True)
class Features:
    """What the convolutional network gives for the lines of each width, with the places of these lines among all."""

    lines: list[Line]
    groups: dict[int, tuple[Tensor, Tensor]]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Places (lines,) and features (lines, 480, 1, tokens), each line once."""
        for places, features in self.groups.values():
            for start in range(0, len(places), size):
                yield places[start : start + size], features[start : start + size].float()

    def draws(self, size: int, steps: int, seed: int) -> Iterator[Tensor]:
        """Features of batches in a random order, each line once before any comes again; the last of a width is short."""
        generator = torch.Generator().manual_seed(seed)
        queue: list[tuple[int, Tensor]] = []
        for _ in range(steps):
            if not queue:
                shuffled = {
                    width: torch.randperm(len(places), generator=generator) for width, (places, _) in self.groups.items()
                }
                batches = [(width, rows) for width, order in shuffled.items() for rows in order.split(size)]
                queue = [batches[i] for i in torch.randperm(len(batches), generator=generator)]
            width, rows = queue.pop()
            yield self.groups[width][1][rows].float()


@torch.inference_mode()
def features_of(recognizer: Recognizer, lines: list[Line]) -> Features:
    """In float16."""
    groups = {}
    for width, (places, images) in by_width(lines).items():
        given = [recognizer.features(normalized(part)).half() for part in images.split(AT_ONCE)]
        groups[width] = places, torch.cat(given)
    return Features(lines, groups)


def stored_features(folder: Path, recognizer: Recognizer, books: Path) -> dict[str, Features]:
    """Those of all parts, from files in the folder if they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    count, first = sum(part.books for part in PARTS.values()), 0
    parts = {}
    for name, part in PARTS.items():
        path = folder / f"{name}.pt"
        if not path.exists():
            chosen = chosen_books(books, count)[first : first + part.books]
            features = features_of(recognizer, lines_of(chosen, part.lines, part.fonts, part.seed))
            torch.save({"lines": [asdict(line) for line in features.lines], "groups": features.groups}, path)
        stored = torch.load(path)
        parts[name] = Features([Line(**line) for line in stored["lines"]], stored["groups"])
        first += part.books
    return parts
