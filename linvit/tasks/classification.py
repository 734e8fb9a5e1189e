"""Image classification: one class for each image, or a yes or no for each class.

One class: cross entropy with label smoothing, mixup, CutMix or a teacher; top-1 and top-5. Several: mean average
precision and F1.
"""

import warnings
from collections.abc import Mapping
from typing import Annotated, Any

from timm.data import Mixup
from timm.loss import AsymmetricLossMultiLabel
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelStatScores

from linvit.ranges import Count, Range, Share
from linvit.tasks.distillation import Distillation
from linvit.tasks.measures import LOSS, Measure, counted
from linvit.tasks.task import Task


class Classification(Task):
    """Trains a network on (images, class labels); measures loss, top-1 and, of more than five classes, top-5.

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
        accuracies = {"top1": 1, "top5": 5}
        if num_classes <= 5:  # always 100 %
            del accuracies["top5"]
            self.measures = {name: measure for name, measure in self.measures.items() if name != "top5"}
        self.accuracies = tuple(accuracies)
        self.keep(
            lambda: {
                "loss": MeanMetric(),
                **{
                    name: MulticlassAccuracy(num_classes, top_k=most, average="micro")
                    for name, most in accuracies.items()
                },
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
            return self.loss(self(images), targets)
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
            for name in self.accuracies:
                metrics[name].update(logits, targets)


class MultiLabel(Task):
    """Trains a network on (images, targets) in which an image may belong to any number of classes.

    Args:
        network: Images (batch, channels, height, width) to logits (batch, classes).
        num_classes: Number of classes of the data.
        asymmetric: Whether to train on the asymmetric loss (Ridnik et al., ICCV 2021), which gives easy negatives less
            weight, instead of binary cross entropy.
        gamma_negative: Focusing exponent of the asymmetric loss for negatives.
        gamma_positive: Focusing exponent of the asymmetric loss for positives.
        clip: Probability below which the asymmetric loss ignores a negative.
        kwargs: Further arguments of Task.

    Targets are float32 (batch, classes), 0 or 1. map is the mean, over the classes that occur, of the area under the
    precision-recall curve; f1 is of all decisions together, at a probability of 0.5. The measured loss is binary cross
    entropy, whatever the network was trained on.
    """

    measures: Mapping[str, Measure] = {
        **LOSS,
        "map": Measure("mAP", panel="accuracy"),
        "f1": Measure("F1", panel="accuracy"),
        **counted("images"),
    }
    score = "map"
    headline = ("map",)

    def __init__(
        self,
        network: nn.Module,
        num_classes: Count,
        asymmetric: bool = False,
        gamma_negative: Annotated[float, Range(0)] = 4.0,
        gamma_positive: Annotated[float, Range(0)] = 1.0,
        clip: Annotated[float, Range(0, below=1)] = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        if num_classes < 2:
            raise ValueError("The data has 1 class, expected 2 or more: sort the images into two classes instead.")
        self.loss: nn.Module = nn.BCEWithLogitsLoss()
        if asymmetric:
            self.loss = AsymmetricLossMultiLabel(gamma_negative, gamma_positive, clip, reduction="mean")
        self.keep(
            lambda: {
                "loss": MeanMetric(),
                "precision": MultilabelAveragePrecision(num_classes, average="none"),
                "decisions": MultilabelStatScores(num_classes, average="none"),
            }
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.network(images.contiguous(memory_format=self.memory_format))
        return self.learn(self.loss(logits, targets), len(images))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.count.update(len(targets))
        images = images.contiguous(memory_format=self.memory_format)
        for kind, network in self.networks().items():
            logits = network(images).float()
            metrics = self.kept(kind)
            losses = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            metrics["loss"].update(losses.mean(1))
            metrics["precision"].update(logits.sigmoid(), targets.int())
            metrics["decisions"].update(logits.sigmoid(), targets.int())

    def measured(self, kind: str) -> dict[str, Tensor]:
        metrics = self.kept(kind)
        precision, decisions = by_class(metrics)
        right, wrong, _, missed, _ = decisions.sum(0)
        mean = precision[decisions[:, -1] > 0].mean()
        return {"loss": metrics["loss"].compute(), "map": mean, "f1": 2 * right / (2 * right + wrong + missed)}


def by_class(metrics: Mapping[str, Metric]) -> tuple[Tensor, Tensor]:
    """(classes,) average precision in 0..1, of classes that occur; and counts of decisions, int64 (classes, 5).

    The columns of the counts: true and false positives, true and false negatives, images of the class.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No positive samples")  # such classes are left out
        return metrics["precision"].compute(), metrics["decisions"].compute()
