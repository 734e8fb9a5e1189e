"""The interface between tasks and runs: each task has a subclass, in a file of `linvit.runs.tasks`."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from linvit.data.source import Source
from linvit.errors import SettingError
from linvit.ranges import as_tuple, check, check_names, declared
from linvit.runs.evaluate import evaluate
from linvit.tasks.task import Task

if TYPE_CHECKING:
    from linvit.runs.run import Run

Section = tuple[str, Sequence[str]]
"""A heading of a report and the HTML parts below it, see linvit.analysis.report."""


@dataclass(frozen=True)
class Subject:
    """The subject of an analysis.

    network: has attention over images. inputs: makes its inputs from normalized images and labels (None if unknown).
    displayed: turns an image into (height, width, 3) or (height, width) in 0..1. transform: from an image file to a
    normalized image; None if only the data of the run can be used. note: follows the network's name in the report.
    """

    network: nn.Module
    inputs: Callable[[Tensor, Tensor | None], Any]
    displayed: Callable[[Tensor], Tensor]
    transform: Callable[[Any], Tensor] | None
    note: str = ""


class TaskSpec:
    """A task as seen by runs, recipes and the command line.

    name: `task.name` of recipes. task: its LightningModule; the constructor takes the network first. sources: the data
    that it learns from, by `data.name`. folder_source: the one that reads a folder. preprocessing: the dataclass stored
    in a checkpoint. kept: settings of the task that its measures depend on, which a loaded run keeps. stored_facts:
    annotations of what `stored` returns. names_classes: whether each output of the network has a name. learns_classes:
    whether the data has classes.
    """

    name: ClassVar[str]
    task: ClassVar[type[Task]]
    sources: ClassVar[Mapping[str, type[Source]]]
    folder_source: ClassVar[str]
    preprocessing: ClassVar[type]
    kept: ClassVar[tuple[str, ...]] = ()
    stored_facts: ClassVar[Mapping[str, Any]] = {}
    names_classes: ClassVar[bool] = True
    learns_classes: ClassVar[bool] = True

    def network(self, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        """The network described by the group `model` of a recipe, for this many classes and channels of the data.

        Raises ValueError for a model or argument that is unknown.
        """
        raise NotImplementedError

    def around(self, network: nn.Module, num_classes: int, channels: int = 3, **settings: Any) -> Task:
        """The task around a network; settings are keyword arguments of the task."""
        facts = {"num_classes": num_classes, "channels": channels}
        wanted: dict[str, Any] = {name: value for name, value in facts.items() if name in declared(self.task)}
        return self.task(network, **wanted, **settings)

    def build(self, model: dict[str, Any], num_classes: int, channels: int = 3, **settings: Any) -> Task:
        """The task around a new network."""
        return self.around(self.network(model, num_classes, channels), num_classes, channels, **settings)

    def title(self, model: dict[str, Any], network: nn.Module) -> str:
        """The network's name in tables and reports."""
        return str(getattr(network, "pretrained_cfg", {}).get("architecture") or model["name"])

    def stored(self, source: Source) -> dict[str, Any]:
        """Facts about the data to store in a checkpoint, in addition to class names and preprocessing."""
        return {}

    def open_source(self, run: "Run", name: str, stored: dict[str, Any], given: dict[str, Any]) -> Source:
        """The data to evaluate a run on, with the run's classes and preprocessing; ValueError if they do not fit.

        stored: the settings of training, if it is the same source; given: settings that take precedence over them.
        """
        return self.create_source(name, stored | given)

    def create_source(self, name: str, settings: Mapping[str, Any]) -> Source:
        """A source by its `data.name`; raises ValueError, offering the nearest, for an unknown name or setting."""
        check_names("data", [name], self.sources)
        check_names("setting of the data", settings, declared(self.sources[name]))
        return self.sources[name](**{key: as_tuple(value) for key, value in settings.items()})

    def predict(self, run: "Run", inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        """Predictions for inputs, see Run.predict."""
        raise ValueError(f"A run of the task {self.name} cannot predict: {self.instead_of_predict}.")

    instead_of_predict: ClassVar[str] = "use `evaluate` instead"
    instead_of_generate: ClassVar[str] = "use `predict` instead"

    @property
    def instead(self) -> str:
        """The advice for tasks that do not transcribe: `predict`, if the task has it."""
        predicts = type(self).predict is not TaskSpec.predict
        return "use `predict` instead" if predicts else self.instead_of_predict

    def transcriber(self, run: "Run", weights: str | None = None) -> Any:
        """A transcriber of samples as they arrive, see Run.transcriber."""
        raise ValueError(
            f"Only speech recognition transcribes, and this is a run of the task {self.name}: {self.instead}."
        )

    def stream(self, run: "Run", inputs: Sequence[Any], seconds: float, **options: Any) -> Iterator[str]:
        """The text of a sound file, piece by piece, see Run.stream."""
        raise ValueError(f"Only speech recognition streams, and this is a run of the task {self.name}: {self.instead}.")

    def generate(self, run: "Run", *args: Any, **options: Any) -> Any:
        """Generated text or images, see Run.generate."""
        raise ValueError(f"A run of the task {self.name} cannot generate: {self.instead_of_generate}.")

    def configure(self, run: "Run", **options: Any) -> dict[str, Any]:
        """Applies the task's own options of `evaluate` to a run and returns the remaining ones."""
        return options

    def evaluate(
        self, run: "Run", data: str | Path | None, progress: bool, trainer: Mapping[str, Any], **options: Any
    ) -> Any:
        """Measures of a run, see Run.evaluate."""
        settings = self.configure(run, **options)
        return evaluate(run, run.source(data, **settings), progress, **trainer)

    def facts(self, run: "Run", source: Source) -> tuple[str, ...]:
        """Facts for the report, in addition to name, parameters and weights."""
        return ()

    def subject(self, run: "Run") -> Subject:
        """The subject of an analysis; raises ValueError if the network has no attention over images."""
        raise SettingError(
            f"A run of the task {self.name} cannot be analyzed, because it has no attention over images: use `evaluate`"
            " or `report` instead."
        )

    def sections(self, run: "Run", source: Source) -> Iterable[Section]:
        """Further sections of the report on a run, after its measures."""
        return ()

    listing_caption: ClassVar[str] = ""

    def listing(self) -> Iterator[dict[str, Any]]:
        """Rows of `linvit models`: the task's networks; with the key `family` if there are families."""
        return iter(())


def check_options(function: Callable[..., Any], task: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that a task's function does not have, and for values that it does not allow.

    Options are keyword-only; their annotations say which values they may have.
    """
    declared = inspect.signature(function).parameters.values()
    known = {p.name: p.annotation for p in declared if p.kind is p.KEYWORD_ONLY}
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None and not any(p.kind is p.VAR_KEYWORD for p in declared):
        listed = ", ".join(f"`{name}`" for name in known if name != "progress")
        raise SettingError(
            f"`{unknown}` is not an option of {function.__name__} for the task {task}, which accepts {listed}: leave it"
            " out."
        )
    check(known, options)
