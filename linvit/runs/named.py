"""Tasks whose networks linvit creates by name and mechanism: decoders, image generators, Conformers."""

from typing import Any, ClassVar

from torch import nn

from linvit.errors import SettingError
from linvit.models.registry import create
from linvit.runs.spec import TaskSpec


class NamedSpec(TaskSpec):
    """A task whose networks are of one family of linvit.models.registry."""

    family: ClassVar[str]

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        arguments = dict(model)
        name = arguments.pop("name", None)
        if not name:
            raise SettingError(
                f"The model needs a `name`: set it to one that `linvit models --task {self.name}` lists."
            )
        try:
            return create(name, num_classes, family=self.family, **arguments)
        except TypeError as error:
            raise ValueError(f"An argument of the model {name} has the wrong type ({error}): change it.") from error

    def title(self, model: dict[str, Any], network: nn.Module) -> str:
        return f"{model['name']}, {network.mechanism}"
