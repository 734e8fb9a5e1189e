"""A classifier's predictions, image by image, and their figures, readable for two classes and for a thousand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from linvit.analysis.figures import COLOURS, SMALL, WIDTH, literal, style, subplots

BINS = 15
SHOWN = 20  # classes at either end
LONGEST = 24  # characters of a class name
COLUMNS, ACROSS = 4, 5.0  # of a grid of images, and its inches: the words stay readable on a phone
WRONG = "#d0342c"  # legible on black and on white
CONFUSED, WRITTEN = 30, 16  # most classes of a confusion matrix, and most with written numbers


@dataclass(frozen=True)
class Answers:
    """The predictions of a classifier for every readable image.

    indices: int64 (images,) the images' indices in the data set. targets, predictions: int64 (images,) class indices.
    confidences: float (images,) probability of the predicted class in 0..1. class_names: one per class.
    """

    indices: Tensor
    targets: Tensor
    predictions: Tensor
    confidences: Tensor
    class_names: Sequence[str]

    @property
    def right(self) -> Tensor:
        """(images,) whether the predicted class is the true one."""
        return self.predictions == self.targets


@dataclass(frozen=True)
class Pair:
    """Images of the class `true` that are predicted as `answered`: their count, their share of the true class, and the
    indices of some of them."""

    true: int
    answered: int
    count: int
    share: float
    indices: list[int]


def per_class(answers: Answers) -> tuple[Tensor, Tensor]:
    """(classes,) accuracy in 0..1, NaN for a class without images, and (classes,) number of images."""
    counts = torch.bincount(answers.targets, minlength=len(answers.class_names))
    right = torch.bincount(answers.targets[answers.right], minlength=len(answers.class_names))
    return right / counts, counts


def confused_pairs(answers: Answers, most: int, examples: int) -> list[Pair]:
    """The pairs of classes that are confused most often, each with its images of highest confidence.

    most: maximum number of pairs. examples: maximum number of images per pair.
    """
    count = len(answers.class_names)
    matrix = multiclass_confusion_matrix(answers.predictions, answers.targets, count)
    errors = (matrix - torch.diag(matrix.diagonal())).flatten()
    largest = errors.argsort(descending=True, stable=True)[:most]
    confident = answers.confidences.argsort(descending=True, stable=True)
    pairs = []
    for place in largest[errors[largest] > 0].tolist():
        true, answered = divmod(place, count)
        places_of_pair = confident[(answers.targets[confident] == true) & (answers.predictions[confident] == answered)]
        share = errors[place].item() / matrix[true].sum().item()
        pairs.append(
            Pair(true, answered, len(places_of_pair), share, answers.indices[places_of_pair[:examples]].tolist())
        )
    return pairs


def calibration(answers: Answers, bins: int = BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Number of images, mean confidence and accuracy, each (bins,), in bins of equal width; NaN in empty bins."""
    places = (answers.confidences * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence = torch.bincount(places, answers.confidences.double(), minlength=bins) / counts
    accuracy = torch.bincount(places, answers.right.double(), minlength=bins) / counts
    return counts, confidence, accuracy


def expected_calibration_error(answers: Answers, bins: int = BINS) -> float:
    """ECE in 0..1 (Guo et al. 2017, arXiv 1706.04599, equation 3): the mean over images of their bin's
    |accuracy - confidence|."""
    counts, confidence, accuracy = calibration(answers, bins)
    return ((accuracy - confidence).abs().nan_to_num() * counts).sum().item() / len(answers.targets)


def class_accuracies(answers: Answers) -> Figure:
    """The accuracy of every class, drawn as by `class_shares`."""
    return class_shares(per_class(answers)[0], answers.class_names, "accuracy")


def class_shares(shares: Tensor, class_names: Sequence[str], measure: str) -> Figure:
    """A measure of every class, or of the 20 worst and the 20 best with the distribution over all.

    shares: (classes,) the measure in 0..1; classes where it is NaN are left out.
    """
    known = (~shares.isnan()).nonzero().flatten()
    order = known[shares[known].argsort(stable=True)].tolist()

    def bars(axes: Axes, places: Sequence[int], title: str) -> None:
        axes.barh(range(len(places)), (100 * shares[places]).tolist(), color=COLOURS[0])
        axes.set_yticks(range(len(places)), [_short(class_names[place]) for place in places])
        axes.set(xlabel=f"{measure}, %", xlim=(0, 100), ylim=(len(places) - 0.4, -0.6))
        axes.set_title(title, fontsize=SMALL)
        axes.grid(visible=False, axis="y")

    if len(order) <= 2 * SHOWN:
        figure, axes = subplots((WIDTH, 0.9 + 0.24 * len(order)))
        bars(axes, order, "")
        return figure
    figure = Figure(figsize=(WIDTH, 7.5), layout="constrained")
    panels = figure.subplot_mosaic([["worst", "best"], ["every", "every"]], height_ratios=(3, 1))
    for axes in panels.values():
        style(axes)
    bars(panels["worst"], order[:SHOWN], f"the {SHOWN} worst")
    bars(panels["best"], order[: -SHOWN - 1 : -1], f"the {SHOWN} best")
    panels["every"].hist(100 * shares[known].numpy(), bins=20, range=(0, 100), color=COLOURS[0])
    panels["every"].set(xlabel=f"{measure}, %", ylabel="classes")
    panels["every"].set_title(f"all {len(order):,} classes", fontsize=SMALL)
    return figure


def confused_images(answers: Answers, pairs: Sequence[Pair], image: Callable[[int], Tensor]) -> Figure:
    """A row per pair, with its images; `image(index)` returns one in 0..1, (height, width, 3) or (height, width)."""
    columns = max(COLUMNS, *(len(pair.indices) for pair in pairs))
    figure = Figure(figsize=(ACROSS, (0.45 + ACROSS / columns) * len(pairs)), layout="constrained")
    grid = figure.subplots(len(pairs), columns, squeeze=False)
    for row, pair in zip(grid, pairs, strict=True):
        for axes in row:
            axes.axis("off")
        true, answered = (_short(answers.class_names[place]) for place in (pair.true, pair.answered))
        words = f"true: {true}, {pair.count:,} image{'s' * (pair.count != 1)}\npredicted: {answered}"
        row[0].set_title(words, loc="left", fontsize=SMALL)
        for axes, index in zip(row, pair.indices, strict=False):
            axes.imshow(image(index), cmap="gray", vmin=0, vmax=1)
    return figure


def predicted_images(answers: Answers, places: Sequence[int], image: Callable[[int], Tensor]) -> Figure:
    """The images at these places with what they are taken for; `image(index)` as in `confused_images`."""
    rows = math.ceil(len(places) / COLUMNS)
    figure = Figure(figsize=(ACROSS, 1.5 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes in grid:
        axes.axis("off")
    for axes, place in zip(grid, places, strict=False):
        true, answered = (
            _short(answers.class_names[int(chosen[place])]) for chosen in (answers.targets, answers.predictions)
        )
        right = bool(answers.right[place])
        words = f"{answered} {100 * answers.confidences[place]:.0f} %" + ("" if right else f"\nnot {true}")
        axes.set_title(words, fontsize=SMALL, color="black" if right else WRONG)
        axes.imshow(image(int(answers.indices[place])), cmap="gray", vmin=0, vmax=1)
    return figure


def calibration_curve(answers: Answers) -> Figure:
    """Accuracy against confidence in 15 bins, and the number of images in each bin."""
    counts, confidence, accuracy = calibration(answers)
    edges = torch.arange(len(counts)) / len(counts)
    full = counts > 0
    figure, (left, right) = subplots((WIDTH, 3), 1, 2)
    left.plot([0, 100], [0, 100], color="#999999", linestyle="--", label="perfect calibration")
    left.plot(100 * confidence[full], 100 * accuracy[full], "o-", color=COLOURS[1], label="network", clip_on=False)
    left.set(xlabel="mean confidence, %", ylabel="accuracy, %", xlim=(0, 100), ylim=(0, 100))
    left.set_title(f"expected calibration error {100 * expected_calibration_error(answers):.2f} %", fontsize=SMALL)
    left.legend(frameon=False, fontsize=SMALL)
    left_edges, heights = (100 * edges).tolist(), counts.tolist()
    right.bar(left_edges, heights, width=100 / len(counts), align="edge", color=COLOURS[0], edgecolor="white")
    right.set(xlabel="confidence, %", ylabel="images", xlim=(0, 100))
    return figure


def confusion_matrix(confusion: Tensor, class_names: Sequence[str], item: str = "pixels") -> Figure:
    """The share of each true class that is predicted as each class; of many classes, those with most errors.

    confusion: counts (true class, predicted class), of pixels or images.
    """
    counts = confusion.double()
    wrong = counts.sum(1) + counts.sum(0) - 2 * counts.diag()
    places = wrong.argsort(descending=True, stable=True)[:CONFUSED].sort().values
    rows = 100 * (counts / counts.sum(1, keepdim=True))[places][:, places]
    names = [_short(class_names[place]) for place in places.tolist()]
    side = 1.8 + (0.36 if len(names) <= WRITTEN else 0.19) * len(names)
    figure, axes = subplots((side + 0.8, side))
    axes.grid(visible=False)
    edges = torch.arange(len(names) + 1) - 0.5
    cells = axes.pcolormesh(edges, edges, rows.numpy(), cmap="Blues", vmin=0, vmax=100)  # a picture would stay bright
    axes.set(aspect="equal", ylim=(len(names) - 0.5, -0.5))  # on dark pages
    bar = figure.colorbar(cells, label=f"{item} of the true class, %", shrink=0.8)
    cast(Any, bar.solids).set(rasterized=False, edgecolor="face")
    for row, column in (rows >= 0.5).nonzero().tolist() if len(names) <= WRITTEN else []:
        tone = "white" if rows[row, column] > 50 else "#111111"
        axes.text(column, row, f"{rows[row, column]:.0f}", ha="center", va="center", fontsize=SMALL, color=tone)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="true")
    if len(names) < len(class_names):
        axes.set_title(f"the {len(names)} of {len(class_names)} classes with most wrong {item}", fontsize=SMALL)
    return figure


def _short(name: str) -> str:
    return literal(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")
