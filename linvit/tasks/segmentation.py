"""Semantic segmentation: cross entropy over pixels, and the mean intersection over union."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchmetrics.classification import MulticlassConfusionMatrix

from linvit.errors import refuse
from linvit.ranges import Count, Range
from linvit.tasks.measures import Measure, counted
from linvit.tasks.task import Task

IGNORED = 255


class Segmentation(Task):
    """Trains a segmentor on (images, label maps) and measures it at the original size of the maps.

    Args:
        network: Maps images to logits; in training optionally with those of an auxiliary head: {"out": …, "aux": …}.
        num_classes: Number of classes of the data.
        aux_weight: Weight of the auxiliary head's loss.
        class_weights: Weight of each class's pixels in the loss; null for 1.
        class_names: Names of all classes; the intersection over union of each is then a measure, iou_NAME. Null for
            the mean alone.
        kwargs: Further arguments of Task.

    miou is the intersection over union over all pixels of all images, averaged over the classes that occur in truth or
    prediction; pixel_accuracy is the share of correct pixels, class_accuracy its mean over classes.
    """

    measures: Mapping[str, Measure] = {
        "miou": Measure("mIoU", panel="accuracy"),
        "pixel_accuracy": Measure("pixel accuracy", panel="accuracy"),
        "class_accuracy": Measure("mean class accuracy", panel="accuracy"),
        **counted("images"),
    }
    score = "miou"
    headline: tuple[str, ...] = ("miou",)

    class_weights: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        num_classes: Count,
        aux_weight: Annotated[float, Range(0)] = 0.4,
        class_weights: Sequence[Annotated[float, Range(0)]] | None = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        refuse(
            num_classes < 2 and f"The data has {num_classes} class, expected 2 or more: add the background as a class.",
            *(
                given is not None
                and len(given) != num_classes
                and f"`{name}` has {len(given)} entries, but the data has {num_classes} classes: give one for each."
                for name, given in (("class_weights", class_weights), ("class_names", class_names))
            ),
        )
        self.aux_weight = aux_weight
        self.by_class = {f"iou_{name}": Measure(f"IoU of {name}") for name in class_names or ()}
        self.measures = {**self.measures, **self.by_class}
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)
        self.keep(lambda: {"confusion": MulticlassConfusionMatrix(num_classes, ignore_index=IGNORED)})

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, maps = batch
        logits = self.network(images.contiguous(memory_format=self.memory_format))
        if isinstance(logits, dict):
            loss = self._loss(logits["out"], maps) + self.aux_weight * self._loss(logits["aux"], maps)
        else:
            loss = self._loss(logits, maps)
        return self.learn(loss, len(images))

    def _loss(self, logits: Tensor, maps: Tensor) -> Tensor:
        return pixel_loss(logits, maps, self.class_weights)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, maps = batch
        self.count.update(len(images))
        images = images.contiguous(memory_format=self.memory_format)
        for kind, network in self.networks().items():
            logits = network(images).float()
            if logits.shape[-2:] != maps.shape[-2:]:
                logits = interpolate(logits, maps.shape[-2:], mode="bilinear", align_corners=False)
            self.kept(kind)["confusion"].update(logits.argmax(1), maps)

    def measured(self, kind: str) -> dict[str, Tensor]:
        confusion = self.kept(kind)["confusion"].compute()
        overlap, _, _ = overlaps_by_class(confusion)
        return overlaps(confusion) | dict(zip(self.by_class, overlap.float(), strict=False))


def pixel_loss(logits: Tensor, maps: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Cross entropy summed over labelled pixels and divided by the number of all pixels, as in mmsegmentation 0.13."""
    total = cross_entropy(logits.float(), maps, class_weights, ignore_index=IGNORED, reduction="sum")
    return total / maps.numel()


def overlaps(confusion: Tensor) -> dict[str, Tensor]:
    """miou, pixel_accuracy and class_accuracy in 0..1 of counts (true class, predicted class).

    Classes that occur nowhere are left out of miou, classes without true pixels out of class_accuracy.
    """
    overlap, accuracy, true = overlaps_by_class(confusion)
    return {
        "miou": torch.nanmean(overlap).float(),
        "pixel_accuracy": (confusion.diag().sum() / true.sum()).float(),
        "class_accuracy": torch.nanmean(accuracy).float(),
    }


def overlaps_by_class(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(classes,) intersection over union and accuracy in 0..1, NaN without pixels, and number of true pixels.

    confusion: counts (true class, predicted class).
    """
    counts = confusion.double()
    right, true, answered = counts.diag(), counts.sum(1), counts.sum(0)
    return right / (true + answered - right), right / true, true
