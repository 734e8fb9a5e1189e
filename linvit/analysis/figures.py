"""Figures of trained classifiers, each a matplotlib figure that a report embeds."""

import io
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis.probe import Probe, probe
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


@dataclass(frozen=True)
class Trained:
    """A trained classifier and what it did.

    epochs, losses, accuracies: one entry an epoch: its number, mean training loss, top-1 in percent on the images that
    were never trained on. predictions: (images,) class indices on those images.
    """

    name: str
    network: nn.Module
    epochs: Sequence[int]
    losses: Sequence[float]
    accuracies: Sequence[float]
    predictions: Tensor


def learning_curves(trained: Sequence[Trained]) -> Figure:
    """Training loss and the share of images read wrongly, both on a logarithmic axis."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for one, colour in zip(trained, COLOURS, strict=False):
        left.plot(one.epochs, one.losses, color=colour, label=one.name)
        right.plot(one.epochs, [100 - a for a in one.accuracies], color=colour, label=one.name)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.set(xlabel="epoch", ylabel="images read wrongly, %", yscale="symlog")
    right.set_yscale("symlog", linthresh=1)
    right.set_yticks([0, 0.5, 1, 2, 5, 10, 20, 50, 100], [f"{t:g}" for t in (0, 0.5, 1, 2, 5, 10, 20, 50, 100)])
    right.set_ylim(0, 100)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(frameon=False)
    return figure


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


def confusion_matrices(trained: Sequence[Trained], targets: Tensor, class_names: Sequence[str]) -> Figure:
    """Counts of true against predicted class; the diagonal is left pale so that errors stand out."""
    count = len(class_names)
    figure = Figure(figsize=(3.1 * len(trained), 3.4), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(trained), squeeze=False)[0], trained, strict=True):
        matrix = torch.zeros(count, count, dtype=torch.long)
        matrix.index_put_((targets, one.predictions), torch.tensor(1), accumulate=True)
        errors = matrix - torch.diag(matrix.diagonal())
        axes.imshow(errors, cmap="Reds", vmin=0, vmax=max(3, int(errors.max())))
        for row, column in matrix.nonzero().tolist():
            tone = "#999999" if row == column else "black"
            axes.text(column, row, str(matrix[row, column].item()), ha="center", va="center", fontsize=7, color=tone)
        axes.set_xticks(range(count), class_names, fontsize=8)
        axes.set_yticks(range(count), class_names, fontsize=8)
        axes.set(title=one.name, xlabel="predicted", ylabel="true")
    return figure


def wrongly_read(trained: Sequence[Trained], images: Tensor, targets: Tensor, class_names: Sequence[str]) -> Figure:
    """The images that each network reads wrongly, at most twelve, with the true and the predicted class."""
    most = 12
    figure = Figure(figsize=(10, 1.1 * len(trained)), layout="constrained")
    for row, one in zip(figure.subplots(len(trained), 1 + most, squeeze=False), trained, strict=True):
        wrong = (one.predictions != targets).nonzero().flatten().tolist()
        for axes in row:
            axes.axis("off")
        for axes, index in zip(row[1:], wrong[:most], strict=False):
            axes.imshow(_displayed(images[index]), cmap="gray")
            true, read = class_names[targets[index]], class_names[one.predictions[index]]
            axes.set_title(f"{true} read as {read}", fontsize=7)
        more = f"\n{most} shown" if len(wrong) > most else ""
        row[0].text(0, 0.5, f"{one.name}\n{len(wrong)} of {len(targets)}{more}", fontsize=8, va="center")
    return figure


def score_maps(trained: Sequence[Trained], images: Tensor) -> Figure:
    """One query's row of the score matrix in each network's first attention, mean over heads, and the image's outline.

    Red stands for positive scores and blue for negative ones; each map has its own scale. The query is the brightest
    place of the image, or the token that covers it.
    """
    figure = Figure(figsize=(1.5 * (1 + len(trained)), 1.5 * len(images) + 0.3), layout="constrained")
    grid = figure.subplots(len(images), 1 + len(trained), squeeze=False)
    firsts = [probe(one.network, images)[0] for one in trained]
    for axes, title in zip(
        grid[0], ["query", *(f"{o.name}\n{_size(f)}" for o, f in zip(trained, firsts, strict=True))], strict=True
    ):
        axes.set_title(title, fontsize=8)
    for index, row in enumerate(grid):
        shown = _displayed(images[index])
        point = _brightest_point(shown)
        row[0].imshow(shown, cmap="gray")
        row[0].plot(point[1], point[0], "s", color="#D55E00", markersize=5)
        for axes, first in zip(row[1:], firsts, strict=True):
            _draw_scores(axes, shown, first, index, point)
        for axes in row:
            axes.set(xticks=[], yticks=[])
    return figure


def singular_values(trained: Sequence[Trained], images: Tensor) -> Figure:
    """Singular values of each image's attention outputs (tokens × width of a head), over the largest, mean over images
    and heads, for every attention over more than one token; the last ones of all networks stand in the same panel."""
    probes = [[p for p in probe(one.network, images) if p.grid != (1, 1)] for one in trained]
    depth = max(len(layers) for layers in probes)
    figure = Figure(figsize=(2.9 * depth, 3.0), layout="constrained")
    panels = figure.subplots(1, depth, sharey=True, squeeze=False)[0]
    for one, colour, layers in zip(trained, COLOURS, probes, strict=False):
        for panel, layer in zip(panels[depth - len(layers) :], layers, strict=True):
            values = torch.linalg.svdvals(layer.outputs().double())
            spectrum = (values / values[..., :1].clamp_min(1e-300)).mean((0, 1))
            panel.plot(
                range(1, len(spectrum) + 1), spectrum, marker=".", color=colour, label=f"{one.name} {_size(layer)}"
            )
    for number, panel in enumerate(panels, start=1):
        panel.set(yscale="log", xlabel="singular value", title=f"attention {number} of {depth}", ylim=(1e-6, 1.5))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=6)
    panels[0].set_ylabel("relative to the largest")
    return figure


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


def _draw_scores(axes: Axes, shown: Tensor, first: Probe, index: int, point: tuple[int, int]) -> None:
    height, width = shown.shape
    rows, columns = first.grid
    token = point[0] * rows // height * columns + point[1] * columns // width
    scores = first.scores()[index, :, token].mean(0).unflatten(0, first.grid)
    largest = scores.abs().max().item()
    axes.imshow(scores, cmap="RdBu_r", norm=TwoSlopeNorm(0, -largest, largest), extent=(0, columns, rows, 0))
    x = (torch.arange(width) + 0.5) * columns / width
    y = (torch.arange(height) + 0.5) * rows / height
    axes.contour(x, y, shown, [0.5], colors="black", linewidths=0.8)
    axes.plot(token % columns + 0.5, token // columns + 0.5, "s", color="black", markersize=4, fillstyle="none")


def _brightest_point(shown: Tensor) -> tuple[int, int]:
    """Centre of the brightest of 8 × 8 cells, in pixels."""
    cells = nn.functional.adaptive_avg_pool2d(shown[None], 8)[0]
    cell = cells.argmax().item()
    height, width = shown.shape
    return (2 * (cell // 8) + 1) * height // 16, (2 * (cell % 8) + 1) * width // 16


def _displayed(image: Tensor) -> Tensor:
    grey = image.float().mean(0)
    return (grey - grey.min()) / (grey.max() - grey.min()).clamp_min(1e-6)


def _size(layer: Probe) -> str:
    return f"{layer.grid[0]}×{layer.grid[1]}"
