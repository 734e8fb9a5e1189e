"""Runs of multi-label classification."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from linvit.analysis.report import table
from linvit.data.images.multilabel import MultiLabelImages
from linvit.data.source import Source
from linvit.ranges import Share
from linvit.runs.classifiers import ClassifierSpec
from linvit.runs.opening import prepared_for
from linvit.runs.predictions import ClassPrediction, Predictions
from linvit.runs.spec import Section
from linvit.tasks.multilabel import MultiLabel, by_class

if TYPE_CHECKING:
    from linvit.runs.run import Run


class MultiLabelSpec(ClassifierSpec):
    """Multi-label classification with timm networks: any number of classes per image."""

    name = "multilabel"
    task = MultiLabel
    sources: ClassVar = {"labelled": MultiLabelImages}
    folder_source = "labelled"

    def open_source(self, run: "Run", name: str, stored: dict[str, Any], given: dict[str, Any]) -> Source:
        if "root" in given:
            stored = {key: value for key, value in stored.items() if key != "labels"}
        source = self.create_source(name, stored | {"class_names": run.class_names} | given)
        return prepared_for(run, source, given)

    def predict(
        self,
        run: "Run",
        inputs: Sequence[Any],
        *,
        threshold: Share = 0.5,
        weights: str | None = None,
        output: str | Path | None = None,
        progress: bool = False,
        strips: Mapping[str, Any] | None = None,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image, possibly without classes.

        Args:
            threshold: lowest probability of the classes to name.
            weights, output, progress, strips: see Run.predict; output is a .csv or .json file.
        """

        def probable(logits: Tensor) -> tuple[Tensor, Tensor]:
            probabilities, places = logits.sigmoid().sort(descending=True)
            return probabilities[probabilities >= threshold], places[probabilities >= threshold]

        return self.predict_each(run, inputs, probable, weights, output, progress, strips)

    def sections(self, run: "Run", source: Source) -> list[Section]:
        network, device = run.placed_network()
        kept = MultiLabel(torch.nn.Identity(), len(run.class_names)).metrics["raw"]
        metrics = cast(Mapping[str, Metric], kept)
        with torch.inference_mode():
            for images, targets in source.val_dataloader():
                probabilities = network(images.to(device)).float().sigmoid().cpu()
                metrics["precision"].update(probabilities, targets.int())
                metrics["decisions"].update(probabilities, targets.int())
        rows = []
        for name, precision, counts in zip(run.class_names, *by_class(metrics), strict=True):
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


SPEC = MultiLabelSpec()
