"""Tasks whose networks give one number for each class of an image."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linvit.data.images.image import CorruptImageError, Preprocessing
from linvit.data.source import Source
from linvit.models.by_name import create_classifier
from linvit.runs.images import find_images, read_image
from linvit.runs.predictions import ClassPrediction, Predictions, check_output
from linvit.runs.progress import tracked
from linvit.runs.spec import Subject, TaskSpec

if TYPE_CHECKING:
    from linvit.runs.run import Run

BATCH = 32


class ClassifierSpec(TaskSpec):
    """A task that trains a network of timm's or ours with one output for each class."""

    preprocessing = Preprocessing

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        return create_classifier(model, num_classes, channels)

    def facts(self, run: "Run", source: Source) -> tuple[str, ...]:
        height, width = source.preprocessing.size
        pattern = getattr(run.network, "pattern", None)
        facts = (f"{len(run.class_names):,} classes", f"{height}×{width} px")
        return (f"pattern {pattern}", *facts) if pattern else facts

    def subject(self, run: "Run") -> Subject:
        about = run.preprocessing
        return Subject(run.network, lambda images, labels: images, about.displayed, about.transform())

    def predict_each(
        self,
        run: "Run",
        inputs: Sequence[Any],
        probable: Callable[[Tensor], tuple[Tensor, Tensor]],
        weights: str | None,
        output: str | Path | None,
        progress: bool,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image.

        probable: probabilities and numbers of the classes to name, most probable first, of logits (classes,).
        """
        path = None if output is None else check_output(output)
        items, unreadable = find_images(inputs)
        network, device = run.placed_network(weights)
        rows = []
        for names, images in _batches(tracked(items, "Predicting", progress=progress), run.preprocessing, unreadable):
            with torch.inference_mode():
                logits = network(images.to(device)).float().cpu()
            for name, row in zip(names, logits, strict=True):
                probabilities, places = probable(row)
                classes = [run.class_names[place] for place in places.tolist()]
                rows.append(ClassPrediction(name, classes, probabilities.tolist()))
        predictions = Predictions(rows, unreadable)
        if path:
            predictions.save(path)
        return predictions


def _batches(
    items: Iterable[tuple[str, Any]], preprocessing: Preprocessing, unreadable: list[str]
) -> Iterator[tuple[list[str], Tensor]]:
    transform = preprocessing.transform()
    names: list[str] = []
    images: list[Tensor] = []
    for name, item in items:
        try:
            images.append(transform(read_image(item, name, preprocessing.channels)))
        except CorruptImageError as error:
            unreadable.append(str(error))
            continue
        names.append(name)
        if len(images) == BATCH:
            yield names, torch.stack(images)
            names, images = [], []
    if images:
        yield names, torch.stack(images)
