"""Image classification: cross entropy with label smoothing, mixup, CutMix or a teacher; top-1 and top-5."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from timm.data import Mixup
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.ranges import Count, Range, Share
from linvit.tasks.distillation import Distillation
from linvit.tasks.measures import LOSS, Measure, counted
from linvit.tasks.task import Task


class Classification(Task):
    """Trains a network on (images, class labels); measures loss, top-1 and top-5.

    Args:
        network: Images (batch, channels, height, width) to logits (batch, classes).
        num_classes: Number of classes of the data.
        channels: Number of channels of the data's images.
        label_smoothing: Share of the target spread over all classes.
        mixup: Alpha of mixup; 0 for none.
        cutmix: Alpha of CutMix; 0 for none.
        mix_probability: Share of the batches that are mixed.
        mix_switch: Share of CutMix among the mixed batches, if both are on.
        distillation: Settings of the teacher; None for none.
        kwargs: Further arguments of Task.
    """

    measures: Mapping[str, Measure] = {
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
        num_classes: Count,
        channels: Count = 3,
        label_smoothing: Annotated[float, Range(0, below=1)] = 0.0,
        mixup: Annotated[float, Range(0)] = 0.0,
        cutmix: Annotated[float, Range(0)] = 0.0,
        mix_probability: Share = 1.0,
        mix_switch: Share = 0.5,
        distillation: Distillation | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.mix = None
        if mixup or cutmix:
            self.mix = Mixup(
                mixup, cutmix, None, mix_probability, mix_switch, "batch", True, label_smoothing, num_classes
            )
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.0 if self.mix else label_smoothing)  # mixing smooths itself
        self.teacher = distillation.build(self.network, num_classes, channels) if distillation else None
        self.keep(
            lambda: {
                "loss": MeanMetric(),
                "top1": MulticlassAccuracy(num_classes, average="micro"),
                "top5": MulticlassAccuracy(num_classes, top_k=min(5, num_classes), average="micro"),
            }
        )

    def forward(self, images: Tensor) -> Any:
        """The network's logits (batch, classes), or a pair of them from two heads that are distilled."""
        return self.network(images.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        if self.mix:
            even = len(targets) // 2 * 2  # Mixup pairs images; an unreadable one can leave an odd batch
            images, targets = self.mix(images[:even].clone(), targets[:even])
        return self.learn(self._loss(images, targets), len(images))

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        if self.teacher is None:
            return cast(Tensor, self.loss(self(images), targets))
        answers = self(images)
        logits, distilled = (answers, answers) if isinstance(answers, Tensor) else answers
        return self.teacher.mix(self.loss(logits, targets), distilled, images)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.count.update(len(targets))
        images = images.contiguous(memory_format=self.memory_format)
        for kind, network in self.networks().items():
            logits = network(images)
            metrics = self.kept(kind)
            metrics["loss"].update(nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
            metrics["top1"].update(logits, targets)
            metrics["top5"].update(logits, targets)
