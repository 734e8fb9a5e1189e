"""Multi-label images: image files and a table of their labels."""

import csv
import io
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.disk import read_text, stays_inside
from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.folder import ImageFiles
from linvit.data.source import listed, share_of_name, untrained
from linvit.errors import SettingError, refuse
from linvit.files import explained, user_path
from linvit.ranges import Share

FILE, LABELS, SPLIT = "file", "labels", "split"
SPLITS = ("train", "val")
TABLE = "labels.csv"

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """One image of the table."""

    file: str
    labels: list[str]
    split: str


class MultiLabelImages(AugmentedSource):
    """Batches (images, targets): float32 (batch, channels, height, width) and 0 or 1, float32 (batch, classes).

    Args:
        root: Folder of the image files, at any depth.
        labels: CSV table with a header, by default root/labels.csv. Columns: `file`, relative to root; either one per
            class with 0 or 1, or `labels` with names joined by "|"; and optionally `split` with train or val.
        held_out: Share of the images to validate on, chosen by a hash of their names, if there is no column `split`.
        class_names: Fixes the order of the classes; by default it is that of the columns, or alphabetical.
        options: See AugmentedSource.
    """

    task = "multilabel"

    def __init__(
        self,
        root: str,
        labels: str | None = None,
        held_out: Share = 0.2,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.root = user_path(root)
        self.table = user_path(labels) if labels else self.root / TABLE
        classes, entries = read_table(self.table, held_out)
        self.class_names = class_names or classes
        self.places(classes, self.table)
        missing = [entry.file for entry in entries if not os.path.exists(self.root / entry.file)]
        if missing:
            raise ValueError(
                f"{self.table} lists {len(missing)} images that are not in {self.root} ({listed(missing)}): add the"
                " files, or remove their rows."
            )
        self.entries = {split: [entry for entry in entries if entry.split == split] for split in SPLITS}

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        return {"name": "labelled", "root": str(root)} if (root / TABLE).exists() else None

    def train_set(self) -> Dataset[Any]:
        names = {name for entry in self.entries["train"] for name in entry.labels}
        present = [label for label, name in enumerate(self.class_names) if name in names]
        if absent := untrained(self.class_names, present, "image"):
            logger.warning(absent)
        return super().train_set()

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        entries = self.entries[split]
        if not entries:
            raise SettingError(
                f"{self.table} has no image for the split {split!r}: set `held_out` between 0 and 1, or correct the"
                f" column {SPLIT!r}."
            )
        place = {name: number for number, name in enumerate(self.class_names)}
        files = [(str(self.root / entry.file), [place[name] for name in entry.labels]) for entry in entries]
        return LabelledImages(files, transform, self.channels, self.num_classes)


@dataclass(eq=False)
class LabelledImages(ImageFiles):
    """(image, targets) for each pair (path, classes): targets float32 (num_classes,), 1 for the classes, else 0."""

    num_classes: int

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | str:
        sample = super().__getitem__(index)
        if isinstance(sample, str):
            return sample
        image, classes = sample
        targets = torch.zeros(self.num_classes)
        targets[classes] = 1
        return image, targets


def read_table(table: Path, held_out: float) -> tuple[list[str], list[Entry]]:
    """The classes and the entries of a table in the format of MultiLabelImages; the image files are not opened."""
    if not os.path.exists(table):
        raise SettingError(
            f"The table {table} does not exist: set `root` to the folder that contains it, or `labels` to its path."
        )
    reader = csv.reader(io.StringIO(read_text(table)))
    with explained(lambda reason: f"{table}, line {reader.line_num} is not CSV ({reason}): correct it.", csv.Error):
        rows = [(f"{table}, line {reader.line_num}", [value.strip() for value in row]) for row in reader if row]
    header = rows[0][1] if rows else []
    columns = [name for name in header if name not in (FILE, LABELS, SPLIT)]
    odd = "" in header or len(set(header)) < len(header)
    refuse(
        len(rows) < 2 and f"{table} lists no images: expected a header and one row for each image.",
        (odd or FILE not in header or (LABELS in header) == bool(columns))
        and (
            f"{table} has the columns {listed(header)}, expected {FILE!r}, then either {LABELS!r} or one for each"
            f" class, and optionally {SPLIT!r}, each once."
        ),
    )
    entries: dict[str, Entry] = {}
    for where, values in rows[1:]:
        row = dict(zip(header, values, strict=False))
        name = row.get(FILE, "")
        file = Path(name).as_posix()
        split = row.get(SPLIT, SPLITS[share_of_name(file) < held_out])
        wrong = next((column for column in columns if row.get(column) not in ("0", "1")), "")
        refuse(
            len(values) != len(header) and f"{where} has {len(values)} values, expected {len(header)}: correct it.",
            not stays_inside(name)
            and f"{where} has the file {name!r}, expected a path relative to the data folder: correct it.",
            file in entries and f"{where} lists {file} a second time: remove one of the rows.",
            wrong and f"{where} has {row.get(wrong)!r} for the class {wrong!r}, expected 0 or 1: correct it.",
            split not in SPLITS and f"{where} has the split {split!r}, expected {' or '.join(SPLITS)}: correct it.",
        )
        labels = [column for column in columns if row[column] == "1"]
        if LABELS in header:
            labels = [label.strip() for label in row[LABELS].split("|") if label.strip()]
        entries[file] = Entry(file, labels, split)
    classes = columns or sorted({label for entry in entries.values() for label in entry.labels})
    if not classes:
        raise ValueError(f"{table} names no classes: add labels to its images.")
    return classes, list(entries.values())
