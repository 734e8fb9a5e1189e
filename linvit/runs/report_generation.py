"""`linvit eval --report` of an image generator: its measures, its curve, and what it draws."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from linvit.analysis.report import paragraph, picture, table, write_page
from linvit.runs.draw import draw
from linvit.runs.evaluate import table_rows
from linvit.runs.report import curve
from linvit.runs.restore import Restored

MOST_CLASSES, COUNT = 10, 6
GUIDANCES = (1.0, 2.0)


def write_report(
    restored: Restored,
    measured: dict[str, dict[str, float]],
    path: Path,
    data: str | None = None,
    num_workers: int | None = None,
) -> None:
    """Writes the page of an image generator; measured is what `evaluate` returned."""
    about = "Distances are in the features of a classifier of our own: they compare with no published FID."
    sections: list[tuple[str, Any]] = [
        (
            "What was measured",
            [table([row]) for row in table_rows(measured)] + [paragraph(f"{restored.told()} {about}")],
        ),
        *curve(restored),
        ("What it draws", [picture(drawn_figure(restored), "drawn images, a row a class, at guidance 1 and 2")]),
    ]
    write_page(path, f"linvit: {restored.name}", sections)


def drawn_figure(restored: Restored) -> Figure:
    """Six images of each of the first ten classes, at guidance 1 and 2, 50 steps of DDIM, seed 0."""
    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    for axes, guidance in zip(figure.subplots(1, len(GUIDANCES)), GUIDANCES, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "drawn.png"
            draw(restored, file, restored.class_names[:MOST_CLASSES], COUNT, guidance)
            axes.imshow(np.asarray(Image.open(file)))
        axes.set_title(f"guidance {guidance:g}")
        axes.set_axis_off()
    return figure
