"""Predictions as typed rows, which can be read as a table and saved as CSV or JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from linvit.files import check_output_file, write_csv, write_text

ENDINGS = (".csv", ".json")  # of files of predictions


class Prediction(Protocol):
    """The prediction for one input, which `file` names by its path or, for inputs in memory, by a number."""

    @property
    def file(self) -> str: ...

    def shown(self) -> dict[str, str]:
        """Cells of the printed table."""

    def cells(self) -> dict[str, str]:
        """Cells of a CSV file."""

    def entry(self) -> dict[str, Any]:
        """The entry of a JSON file."""


@dataclass(frozen=True)
class ClassPrediction:
    """The classes of an image, most probable first, with their probabilities in 0..1."""

    file: str
    classes: list[str]
    probabilities: list[float]

    @property
    def pairs(self) -> list[tuple[str, float]]:
        """Pairs of class and probability."""
        return list(zip(self.classes, self.probabilities, strict=True))

    def shown(self) -> dict[str, str]:
        words = ", ".join(f"{name} {100 * value:.1f} %" for name, value in self.pairs)
        return {"image": self.file, "classes, most probable first": words or "none"}

    def cells(self) -> dict[str, str]:
        cells = {"image": self.file}
        for rank, (name, value) in enumerate(self.pairs, start=1):
            cells |= {f"class_{rank}": name, f"probability_{rank}": f"{value:.6f}"}
        return cells

    def entry(self) -> dict[str, Any]:
        classes = [{"class": name, "probability": round(value, 6)} for name, value in self.pairs]
        return {"image": self.file, "predictions": classes}


@dataclass(frozen=True)
class Transcript:
    """The text of an audio file."""

    file: str
    text: str

    def shown(self) -> dict[str, str]:
        return {"sound": self.file, "text": self.text}

    cells = entry = shown


@dataclass(frozen=True)
class ObjectPrediction:
    """The objects that a detector finds in an image, best score first, in pixels of the image.

    size: (height, width). boxes: float32 (n, 4), left, top, right, bottom. labels: indices into
    `run.class_names`. masks: COCO's run lengths (RLE), see pycocotools; None for a network without masks, and if
    they were written to a folder. threshold: lowest score of the objects shown.
    """

    file: str
    size: tuple[int, int]
    boxes: Tensor
    labels: list[int]
    classes: list[str]
    scores: list[float]
    masks: list[dict[str, Any]] | None
    threshold: float = 0.5

    def shown(self) -> dict[str, str]:
        best: dict[str, list[float]] = {}
        for name, score in zip(self.classes, self.scores, strict=True):
            if score >= self.threshold:
                best.setdefault(name, []).append(score)
        words = [f"{len(scores)} × {name} ({100 * scores[0]:.1f} %)" for name, scores in best.items()]
        return {
            "image": self.file,
            "objects": first_words(words) or f"nothing with a score of {100 * self.threshold:g} % or more",
        }


@dataclass(frozen=True)
class MapPrediction:
    """The class of each pixel of an image.

    labels: uint8 (height, width), indices into `run.class_names`; None if they were written to a folder. shares: class
    and share of the pixels in 0..1, largest first.
    """

    file: str
    labels: Tensor | None
    shares: list[tuple[str, float]]

    def shown(self) -> dict[str, str]:
        return {
            "image": self.file,
            "regions": first_words([f"{name} {100 * share:.1f} %" for name, share in self.shares]),
        }


def first_words(words: Sequence[str], most: int = 8) -> str:
    """The first ones, joined by commas; … if there are more."""
    return ", ".join([*words[:most], *(["…"] if len(words) > most else [])])


Row = TypeVar("Row", bound=Prediction)


class Predictions(Sequence[Row]):
    """Predictions in the order of the inputs.

    unreadable: a sentence for each file that was left out.
    """

    def __init__(self, rows: Iterable[Row], unreadable: Iterable[str] = ()) -> None:
        self._rows = tuple(rows)
        self.unreadable = tuple(unreadable)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows, {len(self.unreadable)} unreadable)"

    def table(self) -> list[dict[str, str]]:
        """One row per input, formatted for people."""
        return [row.shown() for row in self]

    def to_csv(self, path: str | Path) -> None:
        """Writes one row per input; the file appears when it is complete."""
        write_csv(path, [row.cells() for row in self])

    def to_json(self, path: str | Path) -> None:
        """Writes a list with one object per input; the file appears when it is complete."""
        write_text(path, json.dumps([row.entry() for row in self], indent=1, ensure_ascii=False))

    def save(self, path: str | Path) -> None:
        """Writes a .csv or .json file; raises ValueError for another ending."""
        path = check_output_file(path, ENDINGS)
        self.to_csv(path) if path.suffix.lower() == ".csv" else self.to_json(path)


def untaken_name(file: str, taken: set[str]) -> str:
    """The file's stem, numbered if it is taken (ignoring case), and adds it to those taken."""
    stem = name = Path(file).stem
    number = 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name.lower())
    return name
