"""Colours of figures, and how a figure is written."""

import io
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from linvit.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#555555", "#CC79A7", "#E69F00")
SUFFIXES = (".svg", ".png")

CURVE_PANELS = (
    (
        "loss",
        1,
        {
            "train_loss": "training",
            "val_loss": "validation",
            "ema_loss": "validation, moving average",
            "bits_per_byte": "bits per byte, validation",
        },
    ),
    (
        "score, %",
        100,
        {
            f"{prefix}{name}": f"{label}{suffix}"
            for name, label in {
                "top1": "top-1",
                "top5": "top-5",
                "box_ap": "box AP",
                "mask_ap": "mask AP",
                "miou": "mIoU",
                "pixel_accuracy": "right pixels",
                "next_accuracy": "next token",
                "recall_accuracy": "answers",
                "wer": "word error rate",
                "drawn_accuracy": "drawn right",
                "guided_accuracy": "drawn right, guided",
            }.items()
            for prefix, suffix in {"": "", "ema_": ", moving average"}.items()
        },
    ),
    ("learning rate", 1, {"lr": "lr"}),
)


def training_curve(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Losses, scores in percent and learning rate of one run over its epochs; rows as in its metrics.csv."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    panels = zip(figure.subplots(1, 3, sharex=True), CURVE_PANELS, strict=True)
    for axes, (heading, factor, columns) in panels:
        known = {column: [row for row in rows if column in row] for column in columns}  # some epochs do not validate
        for column, colour in zip(filter(known.get, columns), COLOURS, strict=False):
            epochs, values = zip(*((row["epoch"], factor * row[column]) for row in known[column]), strict=True)
            axes.plot(epochs, values, color=colour, label=columns[column], marker="." if len(epochs) < 40 else "")
        axes.set(xlabel="epoch", ylabel=heading)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.lines and len(columns) > 1:
            axes.legend(frameon=False)
    return figure


def write_training_curve(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Writes training_curve(rows) as a PNG file, whatever the file is called."""
    training_curve(rows).savefig(path, format="png", dpi=110)


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG image."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def write_figure(figure: Figure, stem: Path) -> None:
    """Writes stem.png and stem.svg, each whole or not at all."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not for every file
    for kind in SUFFIXES:
        save_figure(figure, stem.with_name(f"{stem.name}{kind}"))


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the kind of file that the ending says, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=130)


def figure_path(given: str) -> Path:
    """The argument of a command line that names a figure; raises ArgumentTypeError for an ending not in SUFFIXES."""
    path = Path(given)
    if path.suffix not in SUFFIXES:
        raise ArgumentTypeError(f"the figure {path} has another ending than {' or '.join(SUFFIXES)}: name one of them")
    return path
