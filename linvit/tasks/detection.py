"""Object detection and instance segmentation: the network's own losses, and average precision as COCO defines it."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from linvit.errors import SettingError
from linvit.tasks.measures import Measure, counted
from linvit.tasks.task import Task

HEADINGS = {
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "AP, small",
    "ap_medium": "AP, medium",
    "ap_large": "AP, large",
}


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
            raise SettingError(
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


def average_precision(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> dict[str, float]:
    """Average precision of detections on some images, in 0..1, averaged over classes, by faster-coco-eval.

    ap is the mean over IoU 0.5, 0.55, … 0.95, ap50 and ap75 those at one, ap_small, ap_medium and ap_large those of
    objects of up to 32², 96² and more pixels, left out if there are none. Without any object there is no precision.

    Args:
        ground_truth: Content of a COCO file.
        results: Entries of a COCO results file.
        image_ids: The evaluated images.
        kind: "bbox" or "segm", the overlap that counts.
    """
    image_ids = set(image_ids)
    if not any(entry["image_id"] in image_ids and not entry.get("iscrowd") for entry in ground_truth["annotations"]):
        return {}
    evaluation = _evaluation(ground_truth, results, image_ids, kind)
    if evaluation is None:
        return {"ap": 0.0, "ap50": 0.0, "ap75": 0.0}
    return {name: float(value) for name, value in zip(HEADINGS, evaluation.stats, strict=False) if value >= 0}


def average_precision_by_class(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> dict[int, tuple[float, float, int]]:
    """(ap, ap50, number of objects) by category id, for categories with objects; crowds are not counted.

    Arguments as in average_precision.
    """
    image_ids = set(image_ids)
    counts = Counter(
        entry["category_id"]
        for entry in ground_truth["annotations"]
        if entry["image_id"] in image_ids and not entry.get("iscrowd")
    )
    evaluation = _evaluation(ground_truth, results, image_ids, kind)
    if evaluation is None:
        return {category: (0.0, 0.0, count) for category, count in sorted(counts.items())}
    precision = evaluation.eval["precision"][..., 0, -1]  # (IoUs, recalls, categories): objects of all areas
    by_category = dict(zip(evaluation.params.catIds, precision.transpose(2, 0, 1), strict=True))
    return {
        category: (float(by_category[category].mean()), float(by_category[category][0].mean()), count)
        for category, count in sorted(counts.items())
    }


def _evaluation(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> Any:
    """The finished evaluation of faster-coco-eval; None if there are no detections."""
    from faster_coco_eval import COCO, COCOeval_faster  # part of the extra `dense`

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(ground_truth)
        if not results:
            return None
        evaluation = COCOeval_faster(truth, truth.loadRes(list(results)), kind)
        evaluation.params.imgIds = sorted(image_ids)
        evaluation.run()
    return evaluation
