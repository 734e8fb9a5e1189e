"""A classifier's predictions, image by image: accuracy per class, confused pairs, calibration. No figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

BINS = 15


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
