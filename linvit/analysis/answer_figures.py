"""Figures on the answers of one network; readable for two classes and for a thousand."""

from collections.abc import Callable, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from linvit.analysis.answers import Answers, Pair, calibration, expected_calibration_error, per_class
from linvit.analysis.figures import COLOURS, subplots

SHOWN = 20  # classes at either end
LONGEST = 28  # characters of a class name
CONFUSED, WRITTEN = 30, 16  # classes of a confusion matrix at most, and those whose numbers are written


def class_accuracies(answers: Answers) -> Figure:
    """Accuracy of every class, or of the best and the worst 20 beside the distribution over all of them."""
    return class_shares(per_class(answers)[0], answers.class_names, "accuracy")


def class_shares(shares: Tensor, class_names: Sequence[str], measure: str) -> Figure:
    """A measure in 0..1 of every class that has one (not NaN), or of the best and the worst 20 and their distribution.

    shares: (classes,).
    """
    known = (~shares.isnan()).nonzero().flatten()
    order = known[shares[known].argsort(stable=True)].tolist()

    def bars(axes: Axes, places: Sequence[int], title: str) -> None:
        axes.barh(range(len(places)), (100 * shares[places]).tolist(), color=COLOURS[0])
        axes.set_yticks(range(len(places)), [_short(class_names[place]) for place in places], fontsize=8)
        axes.set(xlabel=f"{measure}, %", xlim=(0, 100), ylim=(len(places) - 0.4, -0.6), title=title)
        axes.grid(visible=False, axis="y")

    if len(order) <= 2 * SHOWN:
        figure, axes = subplots((8, 0.9 + 0.24 * len(order)))
        bars(axes, order, "")
        return figure
    figure, (worst, best, every) = subplots((12, 6.2), 1, 3, width_ratios=(1, 1, 0.9))
    bars(worst, order[:SHOWN], f"the {SHOWN} worst")
    bars(best, order[: -SHOWN - 1 : -1], f"the {SHOWN} best")
    every.hist(100 * shares[known].numpy(), bins=20, range=(0, 100), color=COLOURS[0])
    every.set(xlabel=f"{measure}, %", ylabel="classes", title=f"all {len(order):,} classes")
    return figure


def confused_images(answers: Answers, pairs: Sequence[Pair], image: Callable[[int], Tensor]) -> Figure:
    """A row for each pair, with its images; `image(index)` gives one in 0..1, (height, width, 3) or (height, width)."""
    most = max(len(pair.indices) for pair in pairs)
    figure = Figure(figsize=(3.6 + 1.25 * most, 1.3 * len(pairs)), layout="constrained")
    grid = figure.subplots(len(pairs), 1 + most, squeeze=False, width_ratios=(2.6, *[1] * most))
    for row, pair in zip(grid, pairs, strict=True):
        for axes in row:
            axes.axis("off")
        true, answered = (_short(answers.class_names[place]) for place in (pair.true, pair.answered))
        row[0].text(0, 0.5, f"{true}\nanswered as {answered}\n{pair.count}×", va="center", fontsize=9)
        for axes, index in zip(row[1:], pair.indices, strict=False):
            axes.imshow(image(index), cmap="gray", vmin=0, vmax=1)
    return figure


def calibration_curve(answers: Answers) -> Figure:
    """Accuracy against confidence in 15 bins, and how many images fall into each."""
    counts, confidence, accuracy = calibration(answers)
    edges = torch.arange(len(counts)) / len(counts)
    full = counts > 0
    figure, (left, right) = subplots((10, 3.8), 1, 2)
    left.plot([0, 100], [0, 100], color="#999999", linestyle="--", label="as sure as right")
    left.plot(100 * confidence[full], 100 * accuracy[full], "o-", color=COLOURS[1], label="network", clip_on=False)
    left.set(xlabel="mean confidence, %", ylabel="accuracy, %", xlim=(0, 100), ylim=(0, 100))
    left.set_title(f"expected calibration error {100 * expected_calibration_error(answers):.2f} %", fontsize=10)
    left.legend(frameon=False)
    right.bar(100 * edges, counts, width=100 / len(counts), align="edge", color=COLOURS[0], edgecolor="white")
    right.set(xlabel="confidence, %", ylabel="images", xlim=(0, 100))
    return figure


def confusion_matrix(confusion: Tensor, class_names: Sequence[str], item: str = "pixels") -> Figure:
    """Shares of each true class's items by the class answered; of many classes, those most often wrong.

    confusion: counts (true class, answered class).
    """
    counts = confusion.double()
    wrong = counts.sum(1) + counts.sum(0) - 2 * counts.diag()
    places = wrong.argsort(descending=True, stable=True)[:CONFUSED].sort().values
    rows = 100 * (counts / counts.sum(1, keepdim=True))[places][:, places]
    names = [_short(class_names[place]) for place in places.tolist()]
    side = 1.8 + (0.5 if len(names) <= WRITTEN else 0.27) * len(names)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(
        axes.imshow(rows.numpy(), cmap="Blues", vmin=0, vmax=100), label=f"of the true class's {item}, %", shrink=0.8
    )
    for row, column in (rows >= 0.5).nonzero().tolist() if len(names) <= WRITTEN else []:
        tone = "white" if rows[row, column] > 50 else "black"
        axes.text(column, row, f"{rows[row, column]:.0f}", ha="center", va="center", fontsize=8, color=tone)
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=90)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="answered", ylabel="true")
    if len(names) < len(class_names):
        axes.set_title(f"the {len(names)} of {len(class_names)} classes with most wrong {item}", fontsize=10)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
