"""Runs of semantic segmentation."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchvision.transforms.v2 import functional as F

from linvit.analysis import answers as figures
from linvit.analysis.dense_images import draw_map, largest_shares, shares
from linvit.analysis.report import figure_image, paragraph, table
from linvit.data.dense.coco import CocoPanoptic
from linvit.data.dense.label_maps import Ade20k, LabelMaps, MapSource
from linvit.data.dense.source import DenseSource
from linvit.data.images.image import SMALLEST
from linvit.data.source import Source
from linvit.errors import SettingError
from linvit.files import write_json
from linvit.models.dense.frameworks import SEGMENTORS
from linvit.ranges import Amount, checked
from linvit.runs.dense import (
    OVERLAYS,
    DensePredictions,
    DenseRun,
    Saver,
    at_once,
    checked_folder,
    displayed,
    save_pixels,
    truth_and_answer,
)
from linvit.runs.images import as_list, check_pyramids, class_counts, find_images, in_strips, save_pyramid
from linvit.runs.predictions import MapPrediction, untaken_name
from linvit.runs.progress import tracked
from linvit.runs.report import Section
from linvit.runs.trained import Trained
from linvit.streaming.networks import LABELS
from linvit.tasks.segmentation import IGNORED, Segmentation, overlaps_by_class

PAIRS = 20


class SegmentationRun(DenseRun):
    """A run of a segmentor, which gives every pixel a class."""

    task_name = "segmentation"
    task_class = Segmentation
    sources: ClassVar = {"ade20k": Ade20k, "label_maps": LabelMaps, "coco_panoptic": CocoPanoptic}
    folder_source = "ade20k"
    frameworks = SEGMENTORS
    stored_facts: ClassVar = {"labels": list[Amount]}

    @classmethod
    def facts_to_store(cls, source: Source) -> dict[str, Any]:
        return {"labels": list(cast(MapSource, source).labels)}

    @checked
    def predict(
        self,
        inputs: Any,
        *,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
        strips: Mapping[str, Any] | None = None,
    ) -> DensePredictions:
        """A MapPrediction for each image.

        Args:
            inputs: a path, or a sequence of paths, PIL images or arrays (uint8, height × width × 3); folders are
                searched.
            output: folder for label maps, numbered as in the training data, labels.json, and images overlaid with the
                colours of their classes; each is written immediately and its map is not kept in memory.
            weights: "raw" or "ema"; default: the moving average, if there is one.
            progress: show a progress bar.
            strips: a dictionary, even an empty one, reads every image at its own size and strip by strip, on the CPU;
                its entries are rows, memory, spill and progress of `linvit.run_in_strips`. It needs `output`, and
                writes the label maps there as TIFF pyramids, without overlays.

        Files that cannot be read are listed in `unreadable` of the result.
        """
        inputs = as_list(inputs)
        if strips is not None:
            return self._predict_in_strips(inputs, weights, output, progress, strips)

        def predicted(network: nn.Module, image: Tensor, name: str, size: tuple[int, int]) -> MapPrediction:
            labels = label_map(network, image, size)
            of_classes = shares(labels, len(self.class_names))
            return MapPrediction(name, labels, [(self.class_names[index], share) for index, share in of_classes])

        return self.predict_each(inputs, predicted, lambda row: replace(row, labels=None), weights, output, progress)

    @property
    def labels(self) -> list[int]:
        """The number of each class in label maps."""
        return self.stored.get("labels") or list(range(1, len(self.class_names) + 1))

    def _predict_in_strips(
        self,
        inputs: Sequence[Any],
        weights: str | None,
        output: str | Path | None,
        progress: bool,
        strips: Mapping[str, Any],
    ) -> DensePredictions:
        if output is None:
            raise SettingError("`strips` is given without `output`: give a folder for the label maps, too.")
        check_pyramids()
        folder = checked_folder(output, inputs)
        items, unreadable = find_images(inputs)
        network, _ = self.placed_network(weights)
        rows, taken = [], set[str]()
        tracked_items = tracked(items, "Predicting", progress=progress)
        for name, streamed, height in in_strips(self, network.cpu(), tracked_items, unreadable, strips):
            labels = streamed.maps[LABELS]
            save_pyramid(labels, height, self.labels, folder / "maps" / f"{untaken_name(name, taken)}.tif")
            of_classes = largest_shares(class_counts(labels, height, len(self.class_names)), height * labels.shape[3])
            rows.append(MapPrediction(name, None, [(self.class_names[index], share) for index, share in of_classes]))
        self._write_names(folder)
        return DensePredictions(self, rows, unreadable, [], folder)

    @contextlib.contextmanager
    def save_one_by_one(self, folder: Path) -> Iterator[Saver]:
        label_of = torch.tensor(self.labels, dtype=torch.uint8)
        taken: set[str] = set()

        def save(row: MapPrediction, image: Tensor) -> None:
            assert row.labels is not None
            name = untaken_name(row.file, taken)
            save_pixels(label_of[row.labels.long()], folder / "maps" / f"{name}.png")
            save_pixels(draw_map(image, row.labels, self.class_names), folder / OVERLAYS / f"{name}.jpg")

        yield save
        self._write_names(folder)

    def _write_names(self, folder: Path) -> None:
        names = {str(label): name for label, name in zip(self.labels, self.class_names, strict=True)}
        write_json(folder / "labels.json", names, indent=1)

    def sections(self, source: Source) -> list[Section]:
        names = source.class_names
        confusion = _confusion(self, source)
        overlap, accuracy, pixels = overlaps_by_class(confusion)
        rows = [
            {
                "class": names[index],
                "IoU": _percent(overlap[index]),
                "pixel accuracy": _percent(accuracy[index]),
                "pixels": f"{int(pixels[index]):,}",
            }
            for index in range(len(names))
        ]
        figure = figure_image(figures.class_shares(overlap, names, "IoU"), "intersection over union per class")
        return [
            ("Intersection over union per class", [figure, table(rows)]),
            ("Confused classes", _confused(confusion, names)),
            truth_and_answer(self, source, _truth_and_answer, "the prediction on the right"),
        ]


@torch.inference_mode()
def label_map(network: nn.Module, image: Tensor, size: tuple[int, int]) -> Tensor:
    """The class of each pixel of one normalized image at the size of its file, uint8 (height, width)."""
    height, width = image.shape[-2:]
    filled = pad(image, (0, max(0, SMALLEST - width), 0, max(0, SMALLEST - height)))
    logits = network(filled[None]).float()[..., :height, :width]
    best = torch.full(size, -torch.inf, device=logits.device)
    labels = torch.zeros(size, dtype=torch.uint8, device=logits.device)
    each = at_once(size)
    for first in range(0, logits.shape[1], each):
        scores = logits[:, first : first + each]
        if (height, width) != size:
            scores = interpolate(scores, size, mode="bilinear", align_corners=False)
        largest, places = scores[0].max(0)
        labels = torch.where(largest > best, (places + first).to(torch.uint8), labels)
        best = torch.maximum(best, largest)
    return labels.cpu()


@torch.inference_mode()
def _confusion(run: Trained, source: Source) -> Tensor:
    """Counts of pixels (true class, predicted class)."""
    network, device = run.placed_network()
    count = source.num_classes
    confusion = torch.zeros(count, count, dtype=torch.int64)
    for images, maps in source.val_dataloader():
        logits = network(images.to(device)).float()
        if logits.shape[-2:] != maps.shape[-2:]:
            logits = interpolate(logits, maps.shape[-2:], mode="bilinear", align_corners=False)
        confusion += multiclass_confusion_matrix(logits.argmax(1).cpu(), maps, count, ignore_index=IGNORED)
    return confusion


def _confused(confusion: Tensor, names: Sequence[str]) -> list[str]:
    errors = (confusion - torch.diag(confusion.diag())).flatten()
    largest = [index for index in errors.argsort(descending=True, stable=True)[:PAIRS].tolist() if errors[index]]
    rows = [
        {
            "true": names[true],
            "predicted": names[answered],
            "pixels": f"{errors[true * len(names) + answered].item():,}",
            "of the class": _percent(errors[true * len(names) + answered] / confusion[true].sum()),
        }
        for true, answered in (divmod(index, len(names)) for index in largest)
    ]
    figure = figure_image(figures.confusion_matrix(confusion, names), "pixels of each true class by predicted class")
    return [figure, table(rows) if rows else paragraph("Every pixel is classified correctly.")]


def _truth_and_answer(
    network: nn.Module, source: DenseSource, image: Tensor, labels: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    size = (labels.shape[0], labels.shape[1])
    answer = label_map(network, image.to(device), size)
    picture = F.resize(displayed(image, source.preprocessing), list(size))
    return draw_map(picture, labels, source.class_names), draw_map(picture, answer, source.class_names)


def _percent(share: Tensor) -> str:
    return "–" if share.isnan() else f"{100 * share:.1f} %"
