"""Shared by alignment and transfer: a student learns to compute what its teacher computes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.ranges import Range
from linvit.tasks.measures import Measure, Measured, counted
from linvit.tasks.task import Task

logger = logging.getLogger(__name__)

ERRORS: Mapping[str, Measure] = {
    "error": Measure("relative error", "number", lower_is_better=True, panel="relative error"),
    "worst": Measure("largest relative error", "number", lower_is_better=True, panel="relative error"),
    "top1": Measure("top-1", panel="accuracy"),
    **counted("images"),
}
"""Mean and largest of the relative errors of all blocks or maps; the accuracy where there are classes."""


def relative_errors(given: Tensor, expected: Tensor) -> Tensor:
    """|given - expected|² / |expected|² of each image, (batch,) in float32 at least; both are (batch, …).

    0 if both are 0 everywhere.
    """
    dtype = torch.promote_types(expected.dtype, torch.float32)
    expected = expected.to(dtype).flatten(1)
    difference = given.to(dtype).flatten(1) - expected
    smallest = torch.finfo(dtype).tiny
    return difference.square().sum(1) / expected.square().sum(1).clamp_min(smallest)


class StudentTask(Task):
    """Trains a student on images without labels; its loss is a relative error.

    A subclass has `lesson`, what the student learns from a teacher without weights.

    Args:
        network: The student.
        original: The teacher as a network; it is stored in checkpoints.
        teacher: Run or file of weights of the teacher; None for initial weights.
        num_classes: Classes of the data. If the student's classifier has as many, its accuracy is measured.
        kwargs: Further arguments of Task.
    """

    measures: Measured = ERRORS
    score = "error"
    headline = ("error", "top1")
    lesson: ClassVar[str]

    def __init__(
        self,
        network: nn.Module,
        original: nn.Module,
        teacher: str | None = None,
        num_classes: Annotated[int, Range(0)] = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.original = original.to(memory_format=self.memory_format).requires_grad_(False).eval()
        self.teacher = teacher
        self.classes = num_classes if getattr(network, "num_classes", None) == num_classes else 0
        self.keep(
            lambda: {
                **{str(index): MeanMetric() for index in range(len(self.names))},
                **({"top1": MulticlassAccuracy(self.classes, average="micro")} if self.classes else {}),
            }
        )

    @property
    def names(self) -> list[str]:
        """What the rows of `errors` belong to."""
        raise NotImplementedError

    def errors(self, network: nn.Module, images: Tensor) -> Tensor:
        """The relative errors (names, batch) of images (batch, channels, height, width), with any weights."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> "StudentTask":
        """The teacher stays in evaluation mode."""
        super().train(mode)
        self.original.eval()
        return self

    def on_fit_start(self) -> None:
        if self.teacher is None:
            logger.warning("There is no `teacher`, so the student learns %s.", self.lesson)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.count.update(len(images))
        for kind, network in self.networks().items():
            metrics = self.kept(kind)
            for index, values in enumerate(self.errors(network, images)):
                metrics[str(index)].update(values)
            if self.classes:
                metrics["top1"].update(network(images.contiguous(memory_format=self.memory_format)), labels)

    def measured(self, kind: str) -> dict[str, Tensor]:
        metrics = self.kept(kind)
        accuracy = {"top1": metrics.pop("top1").compute()} if self.classes else {}
        errors = torch.stack([metric.compute() for metric in metrics.values()])
        return {"error": errors.mean(), "worst": errors.max(), **accuracy}
