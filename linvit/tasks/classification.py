"""Image classification: one network, its moving average, the loss and top-1/top-5."""

from functools import partial
from typing import Any, ClassVar

from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.tasks.distillation import Distillation
from linvit.tasks.measures import LOSS, Measure, Measured, counted
from linvit.tasks.task import Task


class Classification(Task):
    """Trains a network on (images, targets), and measures it and its moving average.

    Args:
        network: Images (batch, channels, height, width) to logits (batch, classes).
        num_classes: Number of classes of the data.
        channels: Number of channels of the data's images.
        label_smoothing: Share of the target spread over all classes.
        mixup: Alpha of mixup, 0 for none.
        cutmix: Alpha of CutMix, 0 for none.
        mix_probability: Share of the batches that are mixed.
        mix_switch: Share of CutMix among the mixed batches where both are on.
        distillation: The teacher, if any.
        kwargs: Those of Task.
    """

    measures: ClassVar[Measured] = {
        **LOSS,
        "top1": Measure("top-1", panel="accuracy"),
        "top5": Measure("top-5", panel="accuracy"),
        **counted("images"),
    }
    score = "top1"
    headline = ("top1",)

    def __init__(
        self,
        network: nn.Module,
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
        super().__init__(network, **kwargs)
        self.mix = _mixing(mixup, cutmix, mix_probability, mix_switch, label_smoothing, num_classes)
        if self.mix:
            self.loss: nn.Module = SoftTargetCrossEntropy()
        else:
            self.loss = LabelSmoothingCrossEntropy(label_smoothing) if label_smoothing else nn.CrossEntropyLoss()
        self.teacher = distillation.build(self.network, num_classes, channels) if distillation else None
        self.keep(partial(_metrics, num_classes))

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
        self.count.update(len(targets))
        images = images.contiguous(memory_format=self.memory_format)
        for kind, network in self.networks().items():
            logits = network(images)
            metrics = self.metrics[kind]
            metrics["loss"].update(nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
            metrics["top1"].update(logits, targets)
            metrics["top5"].update(logits, targets)

    def measured(self, kind: str) -> dict[str, Tensor]:
        return {name: metric.compute() for name, metric in self.metrics[kind].items()}


def _mixing(
    mixup: float, cutmix: float, probability: float, switch: float, smoothing: float, num_classes: int
) -> Mixup | None:
    if not (mixup or cutmix):
        return None
    return Mixup(mixup, cutmix, None, probability, switch, "batch", True, smoothing, num_classes)


def _metrics(num_classes: int) -> dict[str, nn.Module]:
    def accuracy(top_k: int) -> MulticlassAccuracy:
        return MulticlassAccuracy(num_classes, top_k=min(top_k, num_classes), average="micro")

    return {"loss": MeanMetric(), "top1": accuracy(1), "top5": accuracy(5)}
