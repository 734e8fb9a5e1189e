"""Transfer: a linear network learns the features of the network that it was made from."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from linvit.ranges import Range, Some
from linvit.tasks.features import ERRORS, relative_errors
from linvit.tasks.measures import Measured
from linvit.tasks.task import Task

Place = Annotated[int, Range(-1_000, 999)]

logger = logging.getLogger(__name__)


class Transfer(Task):
    """Trains a whole student, end to end, on the features of its frozen teacher; images need no labels.

    Layers after those features, such as a classifier, are not trained.

    Args:
        network: The student, a linearized network.
        original: The teacher as a network; it is stored in checkpoints.
        teacher: Run or file of weights of the teacher; null for initial weights.
        features: Numbers of blocks (in networks with stages, of stages), whose maps are those that a frozen head, such
            as a detector's, reads; -1 is the last. null for the features before pooling and classifier.
        kwargs: Further arguments of Task.

    The loss, the measure error, is |student - teacher|² / |teacher|² of each map, averaged over maps and images; worst
    is the largest of the maps.
    """

    measures: Measured = ERRORS
    score = "error"
    headline = ("error",)

    def __init__(
        self,
        network: nn.Module,
        original: nn.Module,
        teacher: str | None = None,
        features: Annotated[Sequence[Place], Some()] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.original = original.to(memory_format=self.memory_format).requires_grad_(False).eval()
        self.teacher = teacher
        self.features = None if features is None else list(features)
        count = 0 if features is None else len(cast(Any, network).feature_info)
        if features is not None and not all(-count <= place < count for place in features):
            raise ValueError(
                f"`features` is {list(features)}, expected numbers from {-count} to {count - 1}: change it."
            )
        self.keep(lambda: {str(place): MeanMetric() for place in range(len(self.maps))})

    @property
    def maps(self) -> list[str]:
        """The names of the features."""
        return ["last"] if self.features is None else list(map(str, self.features))

    def train(self, mode: bool = True) -> "Transfer":
        """The teacher stays in evaluation mode."""
        super().train(mode)
        self.original.eval()
        return self

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

    def on_fit_start(self) -> None:
        if self.teacher is None:
            logger.warning("There is no `teacher`, so the student learns the features of a new, untrained network.")

    def described(self, network: nn.Module, images: Tensor) -> list[Tensor]:
        """The features of images (batch, channels, height, width), one tensor (batch, …) for each of `maps`."""
        images = images.contiguous(memory_format=self.memory_format)
        timms = cast(Any, network)
        if self.features is None:
            return [timms.forward_features(images)]
        count = len(timms.feature_info)
        places = [place % count if place < 0 else place for place in self.features]
        unique = sorted(set(places))
        maps = timms.forward_intermediates(images, indices=unique, intermediates_only=True)
        return [maps[unique.index(place)] for place in places]

    def errors(self, network: nn.Module, images: Tensor) -> Tensor:
        """The relative error of each of `maps` and image, (maps, batch), for a student with any weights."""
        with torch.no_grad():
            expected = self.described(self.original, images)
        given = self.described(network, images)
        return torch.stack([relative_errors(*pair) for pair in zip(given, expected, strict=True)])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images = batch[0]
        return self.learn(self.errors(self.network, images).mean(), len(images))

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images = batch[0]
        self.count.update(len(images))
        for kind, network in self.networks().items():
            for metric, values in zip(self.kept(kind).values(), self.errors(network, images), strict=True):
                metric.update(values)

    def measured(self, kind: str) -> dict[str, Tensor]:
        errors = torch.stack([metric.compute() for metric in self.kept(kind).values()])
        return {"error": errors.mean(), "worst": errors.max()}
