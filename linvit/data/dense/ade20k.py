"""Images with label maps, in ADE20K's layout: images/training/X.jpg and annotations/training/X.png."""

from pathlib import Path
from typing import Any

from linvit.data.dense.label_maps import LAYOUTS, LabelMaps, NumLabels, folders_of
from linvit.data.disk import read_text
from linvit.data.images.image import Side

SPLITS = {"train": "training", "val": "validation"}
CLASSES = 150


class Ade20k(LabelMaps):
    """Images and label maps in ADE20K's layout.

    root: folder with images/{training,validation} and annotations/{training,validation}. reduces_zero_label: 0 in the
    files means ignored and 1 is the first class; otherwise 0 is the first class. num_labels: number of classes; by
    default those of the root's objectInfo*.txt, or 150 without that file. class_names: in the order of the labels,
    instead of that file. options: see MapSource.

    Raises ValueError for a folder without pairs of image and map, and for numbers that do not fit together.
    """

    layouts = LAYOUTS[1:2]

    def __init__(
        self,
        root: str,
        long_side: Side = 2048,
        short_side: Side = 512,
        reduces_zero_label: bool = True,
        num_labels: NumLabels | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            root,
            long_side,
            short_side,
            train=SPLITS["train"],
            val=SPLITS["val"],
            void=(0,) if reduces_zero_label else (),
            classes=None,
            num_labels=num_labels,
            class_names=class_names,
            **options,
        )

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        fits = any(folders_of(root, name, cls.layouts) for name in SPLITS.values())
        return {"name": "ade20k", "root": str(root)} if fits else None

    def read_names(self, classes: str | None, num_labels: int | None) -> list[str]:
        """The last column of the table that comes with ADE20K; without it, numbers from 1."""
        tables = sorted(self.root.glob("objectInfo*.txt"))
        if num_labels is None and tables:
            rows = [line.split("\t") for line in read_text(tables[0]).split("\n")[1:] if line.strip()]
            return [row[-1].strip() for row in rows]
        return [str(number) for number in range(1, (num_labels or CLASSES) + 1)]
