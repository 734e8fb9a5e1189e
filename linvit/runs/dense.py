"""What detection and segmentation share: networks on a backbone, predictions that go to a folder, and reports."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from linvit.data.dense.source import DensePreprocessing
from linvit.data.source import Source
from linvit.models.dense.frameworks import build_dense
from linvit.runs.opening import changed_settings, prepared_for
from linvit.runs.spec import TaskSpec
from linvit.models.by_name import known_arguments

if TYPE_CHECKING:
    from linvit.runs.run import Run


class DenseSpec(TaskSpec):
    """A task whose networks are frameworks on a backbone that timm knows."""

    frameworks: ClassVar[Iterable[str]]
    preprocessing = DensePreprocessing

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        framework, backbone = model.get("framework"), model.get("backbone")
        if framework not in self.frameworks:
            known = ", ".join(self.frameworks)
            raise ValueError(f"`framework` is {framework!r}, but {self.name} trains {known}: choose one of them.")
        if not backbone:
            raise ValueError("The model has no `backbone`: set it to one of those that `linvit models` lists.")
        with known_arguments(backbone):
            return build_dense(**model, num_classes=num_classes)

    def title(self, model: dict[str, Any], network: nn.Module) -> str:
        return f"{model['framework']} on {model['backbone']}"

    def open_source(self, run: "Run", name: str, settings: dict[str, Any]) -> Source:
        changed = changed_settings(run, name, settings)
        source = self.create_source(name, {**settings, "class_names": run.class_names})
        return prepared_for(run, source, changed)
