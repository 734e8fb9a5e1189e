"""Runs of object detection and instance segmentation."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from linvit.analysis import answers as figures
from linvit.analysis.dense_images import draw_objects
from linvit.analysis.report import figure_image, paragraph, table
from linvit.data.dense.annotations import to_mask, to_runs
from linvit.data.dense.coco import Coco
from linvit.data.dense.instance_masks import InstanceMasks
from linvit.data.dense.objects import ObjectSource, to_original, to_results
from linvit.data.dense.source import DenseSource
from linvit.data.dense.voc import Voc
from linvit.data.dense.yolo import Yolo
from linvit.data.source import Source
from linvit.files import replacing
from linvit.models.dense.frameworks import DETECTORS
from linvit.ranges import Amount, Share, checked
from linvit.runs.dense import (
    OVERLAYS,
    DensePredictions,
    DenseRun,
    Saver,
    at_once,
    displayed,
    save_pixels,
    truth_and_answer,
)
from linvit.runs.images import as_list
from linvit.runs.predictions import ObjectPrediction, untaken_name
from linvit.runs.report import Section
from linvit.tasks.detection import Detection, average_precision_by_class

THRESHOLD = 0.5
SHAPES = {"box": "boxes", "mask": "masks"}


class DetectionRun(DenseRun):
    """A run of a detector, with masks if the framework predicts them."""

    task_name = "detection"
    task_class = Detection
    sources: ClassVar = {"coco": Coco, "voc": Voc, "yolo": Yolo, "instance_masks": InstanceMasks}
    folder_source = "coco"
    frameworks = DETECTORS
    stored_facts: ClassVar = {"category_ids": list[Amount]}

    @classmethod
    def facts_to_store(cls, source: Source) -> dict[str, Any]:
        return {"category_ids": list(cast(ObjectSource, source).annotations("train").category_ids)}

    @checked
    def predict(
        self,
        inputs: Any,
        *,
        threshold: Share = THRESHOLD,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
    ) -> DensePredictions:
        """An ObjectPrediction for each image, with everything the detector found in it.

        Args:
            inputs: a path, or a sequence of paths, PIL images or arrays (uint8, height × width × 3); folders are
                searched.
            threshold: lowest score of the objects that `table()` counts and that are drawn into the images of a folder.
            output: folder for predictions.json (COCO's format), results.json (its list of annotations alone, as
                pycocotools' loadRes expects) and images with the objects drawn into them; each
                image is written immediately and its masks are not kept in memory.
            weights: "raw" or "ema"; default: the moving average, if there is one.
            progress: show a progress bar.

        Files that cannot be read are listed in `unreadable` of the result.
        """

        def predicted(network: nn.Module, image: Tensor, name: str, size: tuple[int, int]) -> ObjectPrediction:
            return detected(network, image, name, size, self.class_names, threshold)

        return self.predict_each(
            as_list(inputs), predicted, lambda row: replace(row, masks=None), weights, output, progress
        )

    @property
    def category_ids(self) -> list[int]:
        """The category id of each class in COCO's format."""
        return self.stored.get("category_ids") or list(range(1, len(self.class_names) + 1))

    def _known_ids(self) -> dict[str, int]:
        """The id of each validation image by its path, if the data of the run are there."""
        with contextlib.suppress(ValueError, OSError):
            data = self.source()
            if isinstance(data, ObjectSource) and data.first_split() == "val":
                folder, images = data.folder("val"), data.annotations("val").images
                return {os.path.realpath(folder / image["file_name"]): image["id"] for image in images}
        return {}

    @contextlib.contextmanager
    def json_writer(self, path: Path) -> Iterator[Callable[[ObjectPrediction], Any]]:
        """Writes COCO's JSON one prediction at a time; the file appears when it is complete."""
        ids = self.category_ids
        images: list[dict[str, Any]] = []
        known = self._known_ids()
        count = 0
        head = {
            "info": {"description": f"Detections of {self.path}"},
            "licenses": [],
            "categories": [{"id": key, "name": name} for key, name in zip(ids, self.class_names, strict=True)],
        }
        unusual = "backslashreplace"  # bytes of names that are not UTF-8 become escapes of JSON
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", errors=unusual) as file:
            file.write(json.dumps(head, ensure_ascii=False)[:-1] + ', "annotations": [')

            def write(row: ObjectPrediction) -> list[dict[str, Any]]:
                nonlocal count
                height, width = row.size
                number = known.get(os.path.realpath(row.file), max(known.values(), default=0) + len(images) + 1)
                images.append({"id": number, "file_name": row.file, "height": height, "width": width})
                annotations = list(_annotations(row, number, ids))
                for annotation in annotations:
                    count += 1
                    file.write(", " * (count > 1) + json.dumps({"id": count, **annotation}))
                return annotations

            yield write
            file.write(f'], "images": {json.dumps(images, ensure_ascii=False)}}}')

    @contextlib.contextmanager
    def save_one_by_one(self, folder: Path) -> Iterator[Saver]:
        taken: set[str] = set()
        listed = replacing(folder / "results.json")
        with self.json_writer(folder / "predictions.json") as write, listed as path, path.open("w") as results:
            results.write("[")

            def save(row: ObjectPrediction, image: Tensor) -> None:
                for annotation in write(row):
                    results.write(", " * (results.tell() > 1) + json.dumps(annotation))
                overlay = object_overlay(image, row, self.class_names)
                save_pixels(overlay, folder / OVERLAYS / f"{untaken_name(row.file, taken)}.jpg")

            yield save
            results.write("]")

    def sections(self, source: Source) -> list[Section]:
        network, device = self.placed_network()
        data, task = cast(ObjectSource, source), cast(Detection, self.task)
        rows: list[dict[str, Any]] = []
        image_ids: list[int] = []
        with torch.inference_mode():
            for images, targets in source.val_dataloader():
                rows += data.results(images, targets, network([image.to(device) for image in images]))
                image_ids += [target["image_id"] for target in targets]
        truth = data.ground_truth()
        sections = []
        for shape, overlap in task.overlaps.items():
            values = average_precision_by_class(truth, rows, image_ids, overlap)
            sections.append((f"Average precision of {SHAPES[shape]} per class", _per_class(values, source)))
        words = f"the prediction on the right, objects with a score of {100 * THRESHOLD:g} % or more"
        return [*sections, truth_and_answer(self, source, _truth_and_answer, words)]


@torch.inference_mode()
def detected(
    network: nn.Module,
    image: Tensor,
    name: str,
    size: tuple[int, int],
    class_names: Sequence[str],
    threshold: float = THRESHOLD,
) -> ObjectPrediction:
    """The objects that a detector finds in a normalized image, in pixels of the original file, best score first."""
    answer = {key: value.cpu() for key, value in network([image])[0].items()}
    order = answer["scores"].argsort(descending=True, stable=True)
    answer = {key: value[order] for key, value in answer.items()}
    masks: list[dict[str, Any]] | None = [] if "masks" in answer else None
    boxes = []
    for places in torch.arange(len(order)).split(at_once(size)):
        original = to_original(
            {key: value[places] for key, value in answer.items()}, (image.shape[-2], image.shape[-1]), size
        )
        boxes.append(original["boxes"].float())
        if masks is not None:
            masks += [to_runs(mask) for mask in original["masks"].numpy()]
    labels = answer["labels"].tolist()
    classes = [class_names[label] for label in labels]
    return ObjectPrediction(name, size, torch.cat(boxes), labels, classes, answer["scores"].tolist(), masks, threshold)


def object_overlay(image: Tensor, row: ObjectPrediction, class_names: Sequence[str]) -> Tensor:
    """uint8 (3, height, width) with the objects above the threshold drawn into it, the best on top."""
    count = sum(score >= row.threshold for score in row.scores)
    words = [f"{name}: {100 * score:.0f} %" for name, score in zip(row.classes, row.scores, strict=True)][:count]
    masks = None
    if row.masks is not None:
        masks = (torch.from_numpy(to_mask(runs, row.size)).bool() for runs in row.masks[:count])
    return draw_objects(image, row.boxes[:count], row.labels[:count], words, len(class_names), masks)


def _annotations(row: ObjectPrediction, image_id: int, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    content = {"boxes": row.boxes, "labels": torch.tensor(row.labels), "scores": torch.tensor(row.scores)}
    results = to_results(image_id, content, ids)
    masks: list[dict[str, Any] | None] = [*row.masks] if row.masks else [None for _ in results]
    for result, runs in zip(results, masks, strict=True):
        if runs is None:
            yield result | {"area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0}
        else:
            yield result | {"segmentation": runs, "area": _pixels_inside(runs), "iscrowd": 0}


def _pixels_inside(runs: dict[str, Any]) -> int:
    from faster_coco_eval import mask  # part of the extra `dense`

    return int(mask.area(runs))


def _per_class(values: Mapping[int, tuple[float, float, int]], source: Any) -> list[str]:
    ids = source.annotations("val").category_ids
    shares = torch.tensor([values[key][0] if key in values else float("nan") for key in ids])
    names = dict(zip(ids, source.class_names, strict=True))
    if not values:
        return [paragraph("The data has no objects.")]
    figure = figure_image(figures.class_shares(shares, source.class_names, "AP"), "average precision per class")
    rows = [
        {"class": names[key], "AP": f"{100 * ap:.2f} %", "AP50": f"{100 * ap50:.2f} %", "objects": f"{count:,}"}
        for key, (ap, ap50, count) in values.items()
    ]
    absent = f" {len(ids) - len(values)} classes have no object in the data." * (len(values) < len(ids))
    return [figure, table(rows), paragraph(f"AP is the mean over IoU 0.50 to 0.95.{absent}")]


def _truth_and_answer(
    network: nn.Module, source: DenseSource, image: Tensor, target: dict[str, Any], device: torch.device
) -> tuple[Tensor, Tensor]:
    names, picture, size = (
        source.class_names,
        displayed(image, source.preprocessing),
        (image.shape[-2], image.shape[-1]),
    )
    crowds = zip(target["labels"].tolist(), target["iscrowd"].tolist(), strict=True)
    words = [names[label] + " (crowd)" * crowd for label, crowd in crowds]
    masks = target["masks"].bool() if "masks" in target else None
    truth = draw_objects(picture, target["boxes"], target["labels"].tolist(), words, len(names), masks)
    return truth, object_overlay(picture, detected(network, image.to(device), "", size, names), names)
