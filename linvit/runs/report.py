"""The report on a run: its page, and the sections on a classifier's answers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics.functional.classification import multiclass_confusion_matrix

from linvit.analysis import answers as figures
from linvit.analysis.answers import BINS, Answers, confused_pairs, expected_calibration_error, per_class
from linvit.analysis.report import figure_image, paragraph, table, write_page
from linvit.analysis.run_figures import training_curve
from linvit.data.source import Source
from linvit.runs.evaluate import Measures
from linvit.runs.trained import Trained

Section = tuple[str, Sequence[str]]
"""A heading of a report and the HTML parts below it, see linvit.analysis.report."""
PAIRS, PAIRS_WITH_IMAGES, EXAMPLES = 20, 8, 6
GRID = 24  # images
MATRIX_CLASSES = 30  # a confusion matrix of more is not readable


def write_report(
    run: Trained, page: Path, measures: Measures, facts: Iterable[str], sections: Iterable[Section]
) -> None:
    """Writes a self-contained HTML page: measures, training curves and the sections of the task.

    facts: what follows the network's name and size in the line below the measures.
    """
    parameters = f"{sum(parameter.numel() for parameter in run.network.parameters()):,} parameters"
    weights = "random weights" if run.path is None else f"weights from {run.path}"
    words = [f"{', '.join((run.name, parameters, *facts, weights))}."]
    if len(measures.by_weights) > 1:
        words.append(f"All sections below are about the {run.weights}.")
    first: list[Section] = [("Measures", [table(measures.table()), *map(paragraph, words)])]
    if run.history:
        figure = training_curve(run.history, run.task.measures)
        first.append(("Training", [figure_image(figure, "losses, measures and learning rate over the epochs")]))
    write_page(page, f"{run.name}, run {run.folder.resolve().name}", [*first, *sections])


def answer_sections(run: Trained, source: Source) -> list[Section]:
    """Accuracies, confused classes and calibration of a classifier on the held-out images."""
    answers = answers_of(run, source)
    return [
        ("Predictions", _predictions(answers, source)),
        ("Accuracy per class", _accuracies(answers)),
        ("Precision, recall and F1 per class", _per_class(answers)),
        ("Most confused classes", _confused(answers, source)),
        ("Calibration", _calibration(answers)),
    ]


class _Numbered(Dataset[Any]):
    """Adds the index to each target, to find its image again; sentences on unreadable images pass unchanged."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        return item if isinstance(item, str) else (item[0], torch.tensor([int(item[1]), index]))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


@torch.inference_mode()
def answers_of(run: Trained, source: Source) -> Answers:
    """The network's predictions for all readable validation images; raises ValueError if there are none."""
    network, device = run.placed_network()
    loader = source.val_dataloader()
    numbered = DataLoader(
        _Numbered(loader.dataset),
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
    )
    batches: list[tuple[Tensor, ...]] = []
    for images, targets, _ in numbered:
        if images is not None:
            confidences, predictions = network(images.to(device)).float().softmax(-1).max(-1)
            batches.append((targets[:, 1], targets[:, 0], predictions.cpu(), confidences.cpu()))
    if not batches:
        raise ValueError("The data contains no readable image: choose other data.")
    indices, targets, predictions, confidences = (torch.cat(column) for column in zip(*batches, strict=True))
    return Answers(indices, targets, predictions, confidences, source.class_names)


def _predictions(answers: Answers, source: Source) -> Sequence[str]:
    """Evenly chosen images with their predictions."""
    number = len(answers.targets)
    places = [step * number // min(number, GRID) for step in range(min(number, GRID))]
    figure = figures.predicted_images(answers, places, _shower(source))
    words = (
        f"{len(places)} of the {number:,} held-out images, evenly chosen, with the predicted class and its confidence."
    )
    return [paragraph(words), figure_image(figure, "held-out images with their predictions")]


def _shower(source: Source) -> Callable[[int], Tensor]:
    """From the index of a held-out image to the pixels that are shown."""
    dataset = source.val_set()
    return lambda index: source.preprocessing.displayed(dataset[index][0])


def _accuracies(answers: Answers) -> Sequence[str]:
    accuracy, counts = per_class(answers)
    present = accuracy[counts > 0]
    words = f"Mean over classes {100 * present.mean():.2f} %, lowest {100 * present.min():.2f} %."
    return [figure_image(figures.class_accuracies(answers), "accuracy per class"), paragraph(words)]


def _per_class(answers: Answers) -> Sequence[str]:
    names = answers.class_names
    confusion = multiclass_confusion_matrix(answers.predictions, answers.targets, len(names))
    right, images, answered = confusion.diag(), confusion.sum(1), confusion.sum(0)
    f1 = 2 * right / (images + answered)  # NaN if a class has no image and is never predicted
    rows = [
        {
            "class": names[index],
            "images": f"{int(images[index]):,}",
            "precision": _percent(right[index] / answered[index]),
            "recall": _percent(right[index] / images[index]),
            "F1": _percent(f1[index]),
        }
        for index in f1.argsort(stable=True).tolist()
    ]
    words = f"Mean F1 over the classes (macro) {_percent(f1.nanmean())}; the lowest are at the top."
    parts = [table(rows), paragraph(words)]
    if len(names) <= MATRIX_CLASSES:
        matrix = figures.confusion_matrix(confusion, names, "images")
        parts.append(figure_image(matrix, "images of each true class by predicted class"))
    return parts


def _percent(share: Tensor) -> str:
    return "–" if share.isnan() else f"{100 * share:.2f} %"


def _confused(answers: Answers, source: Source) -> Sequence[str]:
    pairs = confused_pairs(answers, PAIRS, EXAMPLES)
    wrong = int((~answers.right).sum())
    if not pairs:
        return [paragraph(f"None: all {len(answers.targets):,} images are classified correctly.")]
    rows = [
        {
            "true": answers.class_names[pair.true],
            "predicted": answers.class_names[pair.answered],
            "images": pair.count,
            "of the class": f"{100 * pair.share:.1f} %",
        }
        for pair in pairs
    ]
    figure = figures.confused_images(answers, pairs[:PAIRS_WITH_IMAGES], _shower(source))
    words = f"{wrong:,} of {len(answers.targets):,} images are misclassified; the table shows the most frequent pairs."
    confident = paragraph("Their most confident mistakes:")
    return [paragraph(words), table(rows), confident, figure_image(figure, "misclassified images")]


def _calibration(answers: Answers) -> Sequence[str]:
    confidence, error = answers.confidences.mean().item(), expected_calibration_error(answers)
    words = (
        f"Expected calibration error {100 * error:.2f} % ({BINS} bins of equal width). Mean confidence"
        f" {100 * confidence:.2f} %, accuracy {100 * answers.right.double().mean():.2f} %."
    )
    return [figure_image(figures.calibration_curve(answers), "accuracy against confidence"), paragraph(words)]
