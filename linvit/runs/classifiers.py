"""Shared by classification and multi-label classification: one logit per class of an image."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from linvit.analysis.cost import count_cost
from linvit.data.images.image import CorruptImageError, Preprocessing, naming
from linvit.data.source import Source
from linvit.models.by_name import bundled_weights, create_classifier, is_ours
from linvit.models.published import PUBLISHED
from linvit.models.swap import BASES
from linvit.models.swap import NAME as LINEARIZED
from linvit.runs.analyze import ImageRun, Subject
from linvit.runs.images import find_images, read_image
from linvit.runs.large_images import in_strips
from linvit.runs.predictions import ClassPrediction, Predictions, check_output
from linvit.runs.progress import tracked

BATCH, WAITING = 32, 128


class ClassifierRun(ImageRun):
    """A run of a timm network with one output per class."""

    preprocessing_class = Preprocessing
    listing_caption = (
        "MACs per image at the given size: convolutions and linear layers, + attention products. Weights: the tag of"
        " those that timm.create_model(MODEL.TAG, pretrained=True) loads, cifar10 from linvit itself, in1k from the hub"
    )

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
        about = self.preprocessing
        return Subject(self.network, lambda images, labels: images, about.displayed, about.transform())

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
        path = None if output is None else check_output(output)
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
            classes = [self.class_names[place] for place in places.tolist()]
            rows.append(ClassPrediction(name, classes, probabilities.tolist()))
        predictions = Predictions(rows, unreadable)
        if path:
            predictions.save(path)
        return predictions

    @classmethod
    def listing(cls) -> Iterator[dict[str, Any]]:
        """The networks that linvit registers with timm, by family.

        Keys: name, those of Cost, pattern, input_size, published_top1 (percent), published_parameters
        (millions) and published_macs (billions) as printed in the papers, None if they are not,
        weights (timm's tag of the weights: cifar10 for those that come with linvit; None if there are none) and family.
        """
        for name in model_names():
            network = timm.create_model(name, device="meta")
            config = cast(Mapping[str, Any], network.pretrained_cfg)
            published = PUBLISHED.get(name)
            weights = timm.list_pretrained(f"{name}.*")  # on a hub, or files in this copy of linvit
            tagged = [(full.partition(".")[2], bundled_weights(full)) for full in weights]
            yield {
                "name": name,
                **asdict(count_cost(network, config["input_size"])),
                "pattern": network.pattern,
                "input_size": list(config["input_size"]),
                "published_top1": published.top1 if published else None,
                "published_parameters": published.parameters if published else None,
                "published_macs": published.macs if published else None,
                "weights": next((tag for tag, file in tagged if file is None or file.is_file()), None),
                "family": next((base for base in BASES if name.startswith(f"{base}_")), name.partition("_")[0]),
            }


def most_probable(count: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From logits (classes,) the softmax probabilities and indices of the first classes, most probable first."""
    return lambda logits: logits.softmax(-1).topk(min(count, len(logits)))


def model_names() -> list[str]:
    """The names that linvit registers with timm, by family; without "linearized", which is any network converted."""
    return [name for name in timm.list_models() if is_ours(name) and name != LINEARIZED]


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
