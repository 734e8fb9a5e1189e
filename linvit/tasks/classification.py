"""Image classification: one network, its moving average, the loss and top-1/top-5."""

import difflib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.tasks.distillation import Distillation
from linvit.tasks.task import Task


class Classification(Task):
    """Trains timm.create_model(**model) on (images, targets), and measures the raw network and its moving average.

    Args:
        model: `name` and further keyword arguments of timm.create_model; the data gives num_classes and in_chans.
        num_classes: Number of classes of the data.
        channels: Number of channels of the data's images.
        label_smoothing: Share of the target spread over all classes.
        mixup: Alpha of mixup, 0 for none.
        cutmix: Alpha of CutMix, 0 for none.
        mix_probability: Share of the batches that are mixed.
        mix_switch: Share of CutMix among the mixed batches where both are on.
        kwargs: Those of Task.

    Raises ValueError for a model that is unknown to timm or contradicts the data.
    """

    score = "top1"

    def __init__(
        self,
        model: dict[str, Any],
        num_classes: int,
        channels: int = 3,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_probability: float = 1.0,
        mix_switch: float = 0.5,
        distillation: Distillation | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(build_network(model, num_classes, channels), **kwargs)
        self.mix = _mixing(mixup, cutmix, mix_probability, mix_switch, label_smoothing, num_classes)
        if self.mix:
            self.loss: nn.Module = SoftTargetCrossEntropy()
        else:
            self.loss = LabelSmoothingCrossEntropy(label_smoothing) if label_smoothing else nn.CrossEntropyLoss()
        self.teacher = distillation.build(self.network, num_classes, channels) if distillation else None
        self.measures = nn.ModuleDict({kind: _measures(num_classes) for kind in self.networks()})
        self.images = SumMetric()

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        if self.mix:
            even = len(targets) // 2 * 2  # Mixup pairs images; an unreadable one can leave an odd batch
            images, targets = self.mix(images[:even].clone(), targets[:even])
        return self.learn(self._loss(images, targets), len(images))

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        if self.teacher is None:
            return self.loss(self(images), targets)
        logits, distilled = self(images)
        return self.teacher.mix(self.loss(logits, targets), distilled, images)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.images.update(len(targets))
        images = images.contiguous(memory_format=self.memory_format)
        for kind, network in self.networks().items():
            logits = network(images)
            measures = self.measures[kind]
            measures["loss"].update(nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
            measures["top1"].update(logits, targets)
            measures["top5"].update(logits, targets)

    def on_validation_epoch_end(self) -> None:
        for kind, measures in self.measures.items():
            self.log_measures(kind, {name: measure.compute() for name, measure in measures.items()})
            for measure in measures.values():
                measure.reset()
        self.log("val/images", self.images.compute())
        self.images.reset()


def build_network(model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
    """timm.create_model(**model) for the data's classes and channels; raises ValueError where they contradict."""
    arguments = dict(model)
    name = arguments.pop("name", None)
    if not name:
        raise ValueError("The recipe names no model: add `model: {name: …}` with a name that `linvit models` lists.")
    for key, given in (("num_classes", num_classes), ("in_chans", channels)):
        if arguments.setdefault(key, given) != given:
            raise ValueError(
                f"model.{key} is {arguments[key]} but the data has {given}: remove model.{key}, the data sets it."
            )
    with known_arguments(name):
        return timm.create_model(name, **arguments)


@contextmanager
def known_arguments(name: str) -> Iterator[None]:
    """Raises ValueError, offering the nearest, for a model that timm does not know and an argument that it lacks."""
    check_model(name)
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        owner = unknown and getattr(inspect.getmodule(timm.model_entrypoint(name)), unknown[1], None)
        if owner is None:
            raise
        near = difflib.get_close_matches(unknown[2], inspect.signature(owner).parameters, n=1, cutoff=0.0)
        raise ValueError(f"{name} has no argument {unknown[2]!r}: did you mean 'model.{near[0]}'?") from error


def check_model(name: str) -> None:
    """Raises ValueError, offering the nearest name, for a model that timm does not know."""
    if not timm.is_model(name) and ":" not in name:
        near = difflib.get_close_matches(name, timm.list_models(), n=1, cutoff=0.0)
        raise ValueError(f"Unknown model {name!r}: did you mean {near[0]!r}? `linvit models` lists ours.")


def _mixing(
    mixup: float, cutmix: float, probability: float, switch: float, smoothing: float, num_classes: int
) -> Mixup | None:
    if not (mixup or cutmix):
        return None
    return Mixup(mixup, cutmix, None, probability, switch, "batch", True, smoothing, num_classes)


def _measures(num_classes: int) -> nn.ModuleDict:
    def accuracy(top_k: int) -> MulticlassAccuracy:
        return MulticlassAccuracy(num_classes, top_k=min(top_k, num_classes), average="micro")

    return nn.ModuleDict({"loss": MeanMetric(), "top1": accuracy(1), "top5": accuracy(5)})
