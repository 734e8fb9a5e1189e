"""The tasks as recipes name them; here detectors and segmentors meet the tasks that train them."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from linvit.models.dense.frameworks import DETECTORS, SEGMENTORS, build_dense
from linvit.models.registry import create
from linvit.tasks import Classification, Detection, Diffusion, Language, Recall, Segmentation, Speech, Task
from linvit.tasks.classification import known_arguments


class BuiltDetection(Detection):
    """Detection with a network by its arguments.

    Args:
        model: framework, backbone, heads and further arguments of the backbone, see build_dense.
        num_classes: Number of classes of the data.
        kwargs: Those of Task.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(_network(model, num_classes, DETECTORS), **kwargs)


class BuiltSegmentation(Segmentation):
    """Segmentation with a network by its arguments.

    Args:
        model: framework, backbone, heads and further arguments of the backbone, see build_dense.
        num_classes: Number of classes of the data.
        kwargs: Those of Segmentation.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(_network(model, num_classes, SEGMENTORS), num_classes, **kwargs)


class BuiltLanguage(Language):
    """Language with a decoder by its arguments.

    Args:
        model: name and arguments of a decoder, see linvit.models.registry.create.
        num_classes: Number of different tokens of the data.
        kwargs: Those of Task.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(_named("sequence", model, num_classes), **kwargs)


class BuiltRecall(Recall):
    """Recall with a decoder by its arguments.

    Args:
        model: name and arguments of a decoder, see linvit.models.registry.create.
        num_classes: Number of different tokens of the data.
        kwargs: Those of Task.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(_named("sequence", model, num_classes), **kwargs)


class BuiltDiffusion(Diffusion):
    """Diffusion with a DiT by its arguments.

    Args:
        model: name and arguments of a DiT, see linvit.models.registry.create.
        num_classes: Number of classes of the data.
        kwargs: Those of Diffusion.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(_named("generation", model, num_classes), **kwargs)


class BuiltSpeech(Speech):
    """Speech with a Conformer by its arguments.

    Args:
        model: name and arguments of a Conformer, see linvit.models.registry.create.
        num_classes: Number of pieces that it writes, the blank included.
        kwargs: Those of Speech.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(_named("speech", model, num_classes), **kwargs)


def _named(family: str, model: dict[str, Any], num_classes: int) -> Any:
    if not model.get("name"):
        raise ValueError(f"The recipe names no model: add model.name, which `linvit models --{family}` lists.")
    try:
        arguments = {key: value for key, value in model.items() if key != "name"}
        return create(model["name"], num_classes, family=family, **arguments)
    except TypeError as error:
        raise ValueError(f"An argument of {model['name']} is of the wrong kind ({error}): change it.") from error


def _network(model: dict[str, Any], num_classes: int, frameworks: Iterable[str]) -> nn.Module:
    framework, backbone = model.get("framework"), model.get("backbone")
    if framework not in frameworks:
        raise ValueError(f"model.framework is {framework!r}, but this task trains {', '.join(frameworks)}: name one.")
    if not backbone:
        raise ValueError("The recipe names no backbone: add model.backbone, a name that `linvit models` lists.")
    with known_arguments(backbone):
        return build_dense(**model, num_classes=num_classes)


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "detection": BuiltDetection,
    "segmentation": BuiltSegmentation,
    "language": BuiltLanguage,
    "recall": BuiltRecall,
    "diffusion": BuiltDiffusion,
    "speech": BuiltSpeech,
}
