"""Shared by classification and multi-label classification: one logit per class of an image."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.data.images.image import CorruptImageError, Preprocessing, naming
from linvit.data.source import Source
from linvit.files import check_output_file
from linvit.models.by_name import create_classifier
from linvit.runs.analyze import ImageRun, Subject
from linvit.runs.images import find_images, in_strips, read_image
from linvit.runs.predictions import ENDINGS, ClassPrediction, Predictions
from linvit.runs.progress import tracked

BATCH, WAITING = 32, 128


class ClassifierRun(ImageRun):
    """A run of a timm network with one output per class."""

    preprocessing_class = Preprocessing

    @classmethod
    def create_network(cls, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        return create_classifier(model, num_classes, channels)

    def facts(self, source: Source) -> tuple[str, ...]:
        height, width = source.preprocessing.size
        pattern = getattr(self.network, "pattern", None)
        size = f"{height}×{width} px" if source.preprocessing.resize == "crop" else "images in their own sizes"
        facts = (f"{len(self.class_names):,} classes", size)
        return (f"pattern {pattern}", *facts) if pattern else facts

    def subject(self) -> Subject:
        preprocessing = self.preprocessing
        return Subject(self.network, lambda images, labels: images, preprocessing.displayed, preprocessing.transform())

    def predict_each(
        self,
        inputs: Sequence[Any],
        probable: Callable[[Tensor], tuple[Tensor, Tensor]],
        weights: str | None,
        output: str | Path | None,
        progress: bool,
        strips: Mapping[str, Any] | None = None,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image.

        probable: from logits (classes,) the probabilities and indices of the classes to name, most probable first.
        strips: None, or options of `linvit.run_in_strips` to read each image at its own size, strip by strip.
        """
        path = None if output is None else check_output_file(output, ENDINGS)
        items, unreadable = find_images(inputs)
        network, device = self.placed_network(weights)
        shown = tracked(items, "Predicting", progress=progress)
        if strips is None:
            answers = _in_batches(shown, self.preprocessing, unreadable, network, device)
        else:
            streamed = in_strips(self, network.cpu(), shown, unreadable, strips)
            answers = ((name, cast(Tensor, result.logits)[0].float()) for name, result, _ in streamed)
        rows = []
        for name, logits in answers:
            probabilities, places = probable(logits)
            classes = [self.class_names[index] for index in places.tolist()]
            rows.append(ClassPrediction(name, classes, probabilities.tolist()))
        predictions = Predictions(rows, unreadable)
        if path:
            predictions.save(path)
        return predictions


def most_probable(count: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From logits (classes,) the softmax probabilities and indices of the first classes, most probable first."""
    return lambda logits: logits.softmax(-1).topk(min(count, len(logits)))


def _in_batches(
    items: Iterable[tuple[str, Any]],
    preprocessing: Preprocessing,
    unreadable: list[str],
    network: nn.Module,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Name and logits (classes,) of each image, in order.

    A batch has up to BATCH images of one size; up to WAITING images wait for others of their size.
    """
    transform = preprocessing.transform()
    waiting: dict[torch.Size, list[tuple[int, str, Tensor]]] = {}
    answers: dict[int, tuple[str, Tensor]] = {}

    def compute(alike: list[tuple[int, str, Tensor]]) -> None:
        with torch.inference_mode():
            logits = network(torch.stack([image for *_, image in alike]).to(device)).float().cpu()
        answers.update({number: (name, row) for (number, name, _), row in zip(alike, logits, strict=True)})

    for number, (name, item) in enumerate(items):
        try:
            image = transform(read_image(item, name, preprocessing.channels))
        except CorruptImageError as error:
            unreadable.append(naming(error, name))
            continue
        alike = waiting.setdefault(image.shape, [])
        alike.append((number, name, image))
        if len(alike) == BATCH or sum(map(len, waiting.values())) == WAITING:
            compute(waiting.pop(max(waiting, key=lambda size: len(waiting[size]))))
    for alike in waiting.values():
        compute(alike)
    for number in sorted(answers):
        yield answers[number]
