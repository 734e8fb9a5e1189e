"""Shared by classification and multi-label classification: one logit per class of an image."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
import torch
from torch import Tensor, nn

from linvit.analysis.cost import count_cost
from linvit.data.images.image import CorruptImageError, Preprocessing, naming
from linvit.data.source import Source
from linvit.models.by_name import bundled_weights, create_classifier, is_ours
from linvit.models.published import PUBLISHED
from linvit.models.swap import NAME as LINEARIZED
from linvit.models.swapped import BASES
from linvit.runs.images import find_images, read_image
from linvit.runs.large_images import in_strips
from linvit.runs.predictions import ClassPrediction, Predictions, check_output
from linvit.runs.progress import tracked
from linvit.runs.spec import Subject, TaskSpec

if TYPE_CHECKING:
    from linvit.runs.run import Run

BATCH, WAITING = 32, 128


class ClassifierSpec(TaskSpec):
    """A task that trains a timm network with one output per class."""

    preprocessing = Preprocessing

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        return create_classifier(model, num_classes, channels)

    def facts(self, run: "Run", source: Source) -> tuple[str, ...]:
        height, width = source.preprocessing.size
        pattern = getattr(run.network, "pattern", None)
        size = f"{height}×{width} px" if source.preprocessing.resize == "crop" else "images in their own sizes"
        facts = (f"{len(run.class_names):,} classes", size)
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
        strips: Mapping[str, Any] | None = None,
    ) -> Predictions[ClassPrediction]:
        """A ClassPrediction for each image.

        probable: from logits (classes,) the probabilities and indices of the classes to name, most probable first.
        strips: None, or options of `linvit.stream` to read each image at its own size, strip by strip.
        """
        path = None if output is None else check_output(output)
        items, unreadable = find_images(inputs)
        network, device = run.placed_network(weights)
        shown = tracked(items, "Predicting", progress=progress)
        if strips is None:
            answers = _in_batches(shown, run.preprocessing, unreadable, network, device)
        else:
            streamed = in_strips(run, network.cpu(), shown, unreadable, strips)
            answers = ((name, cast(Tensor, result.logits)[0].float()) for name, result, _ in streamed)
        rows = []
        for name, logits in answers:
            probabilities, places = probable(logits)
            classes = [run.class_names[place] for place in places.tolist()]
            rows.append(ClassPrediction(name, classes, probabilities.tolist()))
        predictions = Predictions(rows, unreadable)
        if path:
            predictions.save(path)
        return predictions

    listing_caption = (
        "MACs per image at the given size: convolutions and linear layers, + attention products. Weights: the tag of"
        " those that timm.create_model(MODEL.TAG, pretrained=True) loads, cifar10 from linvit itself, in1k from the hub"
    )

    def listing(self) -> Iterator[dict[str, Any]]:
        """The networks that linvit registers with timm, by family.

        Keys: name, those of Cost, pattern, input_size, published_top1 (percent), published_parameters
        (millions) and published_macs (billions) as printed in the papers, None if they are not,
        weights (timm's tag of the weights: cifar10 for those that come with linvit; None if there are none) and family.
        """
        for name in model_names():
            network = timm.create_model(name, device="meta")
            config = cast(Mapping[str, Any], network.pretrained_cfg)
            published = PUBLISHED.get(name)
            yield {
                "name": name,
                **asdict(count_cost(network, config["input_size"])),
                "pattern": network.pattern,
                "input_size": list(config["input_size"]),
                "published_top1": published.top1 if published else None,
                "published_parameters": published.parameters if published else None,
                "published_macs": published.macs if published else None,
                "weights": _tag_of_weights(name),
                "family": next((base for base in BASES if name.startswith(f"{base}_")), name.partition("_")[0]),
            }


def most_probable(count: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From logits (classes,) the softmax probabilities and indices of the first classes, most probable first."""
    return lambda logits: logits.softmax(-1).topk(min(count, len(logits)))


def model_names() -> list[str]:
    """The names that linvit registers with timm, by family; without "linearized", which is any network converted."""
    return [name for name in timm.list_models() if is_ours(name) and name != LINEARIZED]


def _tag_of_weights(name: str) -> str | None:
    """The tag of the weights on a hub or in this copy of linvit."""
    for tagged in timm.list_pretrained(f"{name}.*"):
        file = bundled_weights(tagged)
        if file is None or file.is_file():
            return tagged.partition(".")[2]
    return None


def _in_batches(
    items: Iterable[tuple[str, Any]],
    preprocessing: Preprocessing,
    unreadable: list[str],
    network: nn.Module,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Name and logits (classes,) of each image, in order."""
    answers: dict[int, tuple[str, Tensor]] = {}
    for named, images in _batches(items, preprocessing, unreadable):
        with torch.inference_mode():
            logits = network(images.to(device)).float().cpu()
        answers |= {number: (name, row) for (number, name), row in zip(named, logits, strict=True)}
    for number in sorted(answers):
        yield answers[number]


def _batches(
    items: Iterable[tuple[str, Any]], preprocessing: Preprocessing, unreadable: list[str]
) -> Iterator[tuple[list[tuple[int, str]], Tensor]]:
    """Up to BATCH images of one size, each with its number and name; up to WAITING wait for others of their size."""
    transform = preprocessing.transform()
    waiting: dict[torch.Size, list[tuple[tuple[int, str], Tensor]]] = {}
    for number, (name, item) in enumerate(items):
        try:
            image = transform(read_image(item, name, preprocessing.channels))
        except CorruptImageError as error:
            unreadable.append(naming(error, name))
            continue
        alike = waiting.setdefault(image.shape, [])
        alike.append(((number, name), image))
        if len(alike) == BATCH or sum(map(len, waiting.values())) == WAITING:
            alike = waiting.pop(max(waiting, key=lambda size: len(waiting[size])))
            yield [named for named, _ in alike], torch.stack([image for _, image in alike])
    for alike in waiting.values():
        yield [named for named, _ in alike], torch.stack([image for _, image in alike])
