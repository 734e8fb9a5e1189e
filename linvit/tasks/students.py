"""Students learn what their teacher computes: the base of alignment, and transfer, which trains on features."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.errors import SettingError, refuse
from linvit.ranges import Range, Some
from linvit.tasks.measures import Measure, Measured, counted
from linvit.tasks.task import Task

logger = logging.getLogger(__name__)
BlockIndex = Annotated[int, Range(-1_000, 999)]

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


class StudentTask(Task, ABC):
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
    @abstractmethod
    def names(self) -> list[str]:
        """What the rows of `errors` belong to."""

    @abstractmethod
    def errors(self, network: nn.Module, images: Tensor) -> Tensor:
        """The relative errors (names, batch) of images (batch, channels, height, width), with any weights."""

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


class Transfer(StudentTask):
    """Trains a whole student, end to end, on the features of its frozen teacher; images need no labels.

    Layers after those features, such as a classifier, are not trained. A student of another shape than its teacher
    learns the teacher's last map of normalized features: its own last map goes through a linear layer, which is trained
    with it but is not part of its weights, and is then resized to the teacher's.

    Args:
        network: The student, a linearized network or one of another shape than its teacher.
        original: The teacher as a network; it is stored in checkpoints.
        teacher: Run or file of weights of the teacher; null for initial weights.
        features: Numbers of blocks (in networks with stages, of stages), whose maps are those that a frozen head, such
            as a detector's, reads; -1 is the last. null for the features before pooling and classifier.
        teacher_model: The teacher of a student of another shape, a model of timm by name or with its own arguments,
            {name: …}; null for that of a linearized student.
        kwargs: Further arguments of Task.

    The loss, the measure error, is |student - teacher|² / |teacher|² of each map, averaged over maps and images; worst
    is the largest of the maps.
    """

    lesson = "the features of a new, untrained network"

    def __init__(
        self,
        network: nn.Module,
        original: nn.Module,
        teacher: str | None = None,
        features: Annotated[Sequence[BlockIndex], Some()] | None = None,
        teacher_model: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.features = None if features is None else list(features)
        super().__init__(network, original, teacher, **kwargs)
        self.projection = None if teacher_model is None else self._projection()
        count = 0 if features is None else len(cast(Any, network).feature_info)
        if features is not None and not all(-count <= place < count for place in features):
            raise SettingError(
                f"`features` is {list(features)}, expected numbers from {-count} to {count - 1}: change it."
            )

    def _projection(self) -> nn.Module:
        """From channels of the student to those of its teacher, at each place."""
        for network in (self.network, self.original):
            refuse(
                not hasattr(network, "forward_intermediates")
                and f"timm gives no map of features of {type(network).__name__}: choose another network."
            )
        refuse(
            self.features is not None and "`features` is set, but only maps of a linearized student fit: leave it out."
        )
        return nn.Conv2d(cast(Any, self.network).num_features, cast(Any, self.original).num_features, kernel_size=1)

    def beside(self) -> Iterable[nn.Parameter]:
        """The layer between a student and a teacher of another shape."""
        return () if self.projection is None else self.projection.parameters()

    @property
    def names(self) -> list[str]:
        """The maps."""
        return ["last"] if self.features is None else list(map(str, self.features))

    def setup(self, stage: str) -> None:
        """Leaves what the features do not depend on as it is; processes would wait for its gradients."""
        if stage != "fit":
            return
        about = cast(Any, self.trainer).datamodule.preprocessing
        images = torch.zeros(2, about.channels, *about.size, dtype=next(self.network.parameters()).dtype)
        training, parameters = self.network.training, list(self.network.parameters())
        total = torch.stack([y.sum() for y in self.described(self.network.eval(), images)]).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        self.network.train(training)

    def described(self, network: nn.Module, images: Tensor) -> list[Tensor]:
        """The features of images (batch, channels, height, width), one tensor (batch, …) for each of `names`."""
        images = images.contiguous(memory_format=self.memory_format)
        timms = cast(Any, network)
        if self.projection is not None:
            last, maps = timms.forward_intermediates(images, indices=1, norm=True)
            ours = last.ndim == 4 and getattr(network, "output_fmt", "NCHW") == "NCHW"
            return [last if ours else maps[-1]]  # those of a ViT are without class token
        if self.features is None:
            return [timms.forward_features(images)]
        count = len(timms.feature_info)
        places = [place % count if place < 0 else place for place in self.features]
        unique = sorted(set(places))
        maps = timms.forward_intermediates(images, indices=unique, intermediates_only=True)
        return [maps[unique.index(place)] for place in places]

    def errors(self, network: nn.Module, images: Tensor) -> Tensor:
        """The relative error of each map and image, (maps, batch), for a student with any weights."""
        with torch.no_grad():
            expected = self.described(self.original, images)
        given = self.described(network, images)
        if self.projection is not None:
            given = [interpolate(self.projection(given[0]), expected[0].shape[2:], mode="bilinear")]
        return torch.stack([relative_errors(*pair) for pair in zip(given, expected, strict=True)])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images = batch[0]
        return self.learn(self.errors(self.network, images).mean(), len(images))
