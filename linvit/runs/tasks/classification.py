"""Runs of image classification."""

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from linvit.data.images.digits import Digits
from linvit.data.images.folder import ImageFolder
from linvit.data.images.image import Preprocessing
from linvit.data.images.readers import TimmImages
from linvit.data.source import Source
from linvit.models.by_name import create_classifier
from linvit.runs.opening import changed_settings, prepared_for
from linvit.runs.spec import TaskSpec
from linvit.tasks.classification import Classification

if TYPE_CHECKING:
    from linvit.runs.run import Run


class ClassificationSpec(TaskSpec):
    """Networks of timm and ours, with one class for each image."""

    name = "classification"
    task = Classification
    sources: ClassVar = {"digits": Digits, "imagefolder": ImageFolder, "timm": TimmImages}
    folder_source = "imagefolder"
    preprocessing = Preprocessing

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        return create_classifier(model, num_classes, channels)

    def open_source(self, run: "Run", name: str, settings: dict[str, Any]) -> Source:
        changed = changed_settings(run, name, settings)
        if "root" in changed and "class_names" not in changed:
            settings = {key: value for key, value in settings.items() if key != "class_names"}
        if name == "digits":
            shown = run.preprocessing
            settings = {"size": shown.size[0], "channels": shown.channels} | settings
        source = self.create_source(name, settings)
        _match_classes(run, source)
        return prepared_for(run, source, changed)


def _match_classes(run: "Run", source: Source) -> None:
    """Reads a folder's classes in the network's order; for released weights, sorted folders are the class indices.

    Folders named by numbers (ImageNet-V2) that are no class names of the network are its class indices.
    """
    classes, folders = run.class_names, source.class_names
    numbered = all(name.isdecimal() and int(name) < len(classes) for name in folders)
    if numbered and (run.recipe is None or not set(folders) <= set(classes)):
        names = {int(name): name for name in folders}
        source.class_names = [names.get(index, str(index)) for index in range(len(classes))]
        return
    if run.recipe is None:
        if len(classes) != len(folders):
            raise ValueError(
                f"The data has {len(folders)} classes, but the network has {len(classes)}: evaluate it on data that it"
                " was made for."
            )
        return
    unknown = [name for name in folders if name not in classes]
    if unknown:
        raise ValueError(
            f"The data has the class {unknown[0]!r}, but the network knows {', '.join(classes[:5])}"
            f"{' …' if len(classes) > 5 else ''}: evaluate it on data that it was made for."
        )
    source.class_names = classes
