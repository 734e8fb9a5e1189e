"""A classifier's answers image by image: per class, confused pairs, calibration. Numbers only, no figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

BINS = 15


@dataclass(frozen=True)
class Answers:
    """What a classifier answers for every image that could be read.

    indices: (images,) places in the data set; targets, predictions: (images,) class indices; confidences: (images,)
    probability of the predicted class in 0..1. class_names: one for each class.
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
    """A true class that is answered as another one: how often, as a share of the true class, and on which images."""

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
    """The pairs of classes that are confused most often, with at most so many of their images, the surest first."""
    count = len(answers.class_names)
    matrix = multiclass_confusion_matrix(answers.predictions, answers.targets, count)
    errors = (matrix - torch.diag(matrix.diagonal())).flatten()
    largest = errors.argsort(descending=True, stable=True)[:most]
    surest = answers.confidences.argsort(descending=True, stable=True)
    pairs = []
    for place in largest[errors[largest] > 0].tolist():
        true, answered = divmod(place, count)
        places_of_pair = surest[(answers.targets[surest] == true) & (answers.predictions[surest] == answered)]
        share = errors[place].item() / matrix[true].sum().item()
        pairs.append(
            Pair(true, answered, len(places_of_pair), share, answers.indices[places_of_pair[:examples]].tolist())
        )
    return pairs


def calibration(answers: Answers, bins: int = BINS) -> tuple[Tensor, Tensor, Tensor]:
    """(bins,) number of images, mean confidence and accuracy in bins of equal width; NaN where a bin is empty."""
    places = (answers.confidences * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence = torch.bincount(places, answers.confidences.double(), minlength=bins) / counts
    accuracy = torch.bincount(places, answers.right.double(), minlength=bins) / counts
    return counts, confidence, accuracy


def expected_calibration_error(answers: Answers, bins: int = BINS) -> float:
    """ECE in 0..1 (Guo et al. 2017, arXiv 1706.04599, equation 3), the mean over images of |accuracy - confidence|."""
    counts, confidence, accuracy = calibration(answers, bins)
    return ((accuracy - confidence).abs().nan_to_num() * counts).sum().item() / len(answers.targets)
