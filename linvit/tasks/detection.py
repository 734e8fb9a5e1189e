"""Object detection and instance segmentation: the network's own losses, and average precision."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from linvit.tasks.average_precision import HEADINGS, average_precision
from linvit.tasks.measures import Measure, counted
from linvit.tasks.task import Task


class Detection(Task):
    """Trains a detector on lists (images, targets); measures average precision at the original size of the images.

    Args:
        network: In training, maps images and targets to a dictionary of losses; in evaluation, maps images to a
            dictionary of boxes, labels, scores and, if it has them, masks for each image.
        kwargs: Further arguments of Task.

    The source provides the `ground_truth`, and `results`, which adds the ids of images and categories to the detections
    of a batch.
    """

    score = "box_ap"
    headline: tuple[str, ...] = ("box_ap50", "box_ap", "mask_ap50", "mask_ap")
    measures: Mapping[str, Measure] = {
        **{
            f"{shape}_{name}": Measure(f"{shape} {heading}", panel="average precision" if name == "ap" else None)
            for shape in ("box", "mask")
            for name, heading in HEADINGS.items()
        },
        **counted("images"),
    }

    def __init__(self, network: nn.Module, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.overlaps = {"box": "bbox", "mask": "segm"}
        if network.has_masks:
            self.score = "mask_ap"
        else:
            del self.overlaps["mask"]
            self.measures = {name: measure for name, measure in self.measures.items() if not name.startswith("mask")}
            self.headline = ("box_ap50", "box_ap")
        self.results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in self.networks()}
        self.image_ids: list[int] = []

    def setup(self, stage: str) -> None:
        source = cast(Any, self.trainer).datamodule
        if self.network.has_masks and not source.needs_masks:
            name = type(self.network).__name__
            raise ValueError(
                f"{name} needs masks, but the data is read without them: set `needs_masks` to true if it has masks, or"
                " use retinanet."
            )

    def training_step(self, batch: tuple[list[Tensor], list[dict[str, Any]]], batch_idx: int) -> Tensor:
        images, targets = batch
        losses = self.network(images, targets)
        return self.learn(torch.stack(list(losses.values())).sum(), len(images))

    def validation_step(self, batch: tuple[list[Tensor], list[dict[str, Any]]], batch_idx: int) -> None:
        images, targets = batch
        self.image_ids += [target["image_id"] for target in targets]
        for kind, network in self.networks().items():
            self.results[kind] += cast(Any, self.trainer).datamodule.results(images, targets, network(images))

    def on_validation_epoch_end(self) -> None:
        image_ids = gathered(self.image_ids)
        truth = cast(Any, self.trainer).datamodule.ground_truth()
        for kind, rows in self.results.items():
            rows = gathered(rows)
            for shape, overlap in self.overlaps.items():
                measured = average_precision(truth, rows, image_ids, overlap)
                self.log_measures(kind, {f"{shape}_{name}": value for name, value in measured.items()})
        self.log("val/images", float(len(image_ids)))
        self.image_ids = []
        self.results = {kind: [] for kind in self.networks()}


def gathered(rows: list[Any]) -> list[Any]:
    """The lists of all processes, concatenated; every process gets them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return rows
    of_each: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_each, rows)
    return [row for rows_of_process in of_each for row in rows_of_process]
