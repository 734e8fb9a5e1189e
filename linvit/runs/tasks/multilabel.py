"""Runs of multi-label classification."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from linvit.analysis.report import table
from linvit.data.images.multilabel import MultiLabelImages
from linvit.data.source import Source
from linvit.ranges import Share, checked
from linvit.runs.classifiers import ClassifierRun
from linvit.runs.evaluate import prepared_for
from linvit.runs.images import as_list
from linvit.runs.predictions import ClassPrediction, Predictions
from linvit.runs.report import Section
from linvit.tasks.classification import MultiLabel, by_class


class MultiLabelRun(ClassifierRun):
    """A run of a timm network that gives every image any number of classes."""

    task_name = "multilabel"
    task_class = MultiLabel
    sources: ClassVar = {"labelled": MultiLabelImages}
    folder_source = "labelled"

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        if "root" in changes:
            stored = {key: value for key, value in stored.items() if key != "labels"}
        source = self.create_source(name, stored | {"class_names": self.class_names} | changes)
        return prepared_for(self, source, changes)

    @checked
    def predict(
        self,
        inputs: Any,
        *,
        threshold: Share = 0.5,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
        strips: Mapping[str, Any] | None = None,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image, possibly without classes.

        Args:
            inputs: a path, or a sequence of paths, PIL images or arrays (uint8, height × width × 3); folders are
                searched.
            threshold: lowest probability of the classes to name.
            weights: "raw" or "ema"; default: the moving average, if there is one.
            output: a .csv or .json file to write as well.
            progress: show a progress bar.
            strips: a dictionary, even an empty one, reads every image at its own size and strip by strip, on the CPU;
                its entries are rows, memory, spill and progress of `linvit.run_in_strips`.

        Files that cannot be read are listed in `unreadable` of the result.
        """

        def probable(logits: Tensor) -> tuple[Tensor, Tensor]:
            probabilities, places = logits.sigmoid().sort(descending=True)
            return probabilities[probabilities >= threshold], places[probabilities >= threshold]

        return self.predict_each(as_list(inputs), probable, weights, output, progress, strips)

    def sections(self, source: Source) -> list[Section]:
        network, device = self.placed_network()
        kept = MultiLabel(torch.nn.Identity(), len(self.class_names)).metrics["raw"]
        metrics = cast(Mapping[str, Metric], kept)
        with torch.inference_mode():
            for images, targets in source.val_dataloader():
                probabilities = network(images.to(device)).float().sigmoid().cpu()
                metrics["precision"].update(probabilities, targets.int())
                metrics["decisions"].update(probabilities, targets.int())
        rows = []
        for name, precision, counts in zip(self.class_names, *by_class(metrics), strict=True):
            right, wrong, _, missed, images = counts.tolist()
            rows.append(
                {
                    "class": name,
                    "images": f"{images:,}",
                    "average precision": f"{100 * precision:.2f} %" if images else "–",
                    "precision": f"{100 * right / (right + wrong):.2f} %" if right + wrong else "–",
                    "recall": f"{100 * right / (right + missed):.2f} %" if images else "–",
                }
            )
        return [("Average precision per class; precision and recall at a probability of 0.5", [table(rows)])]
