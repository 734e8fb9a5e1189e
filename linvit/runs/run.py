"""A run: what can be done with a trained network. Each task has a subclass in `linvit.runs.tasks`."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Unpack

from torch import nn

from linvit.analysis.report import PAGE
from linvit.data.source import Source
from linvit.deploy import Exported
from linvit.errors import refuse
from linvit.files import check_output_file, explained
from linvit.models.by_name import create
from linvit.ranges import Range, as_tuple, check, check_entries, check_names, declared
from linvit.runs.evaluate import Measures, evaluate
from linvit.runs.exporting import ExportOptions, export
from linvit.runs.report import Section, write_report
from linvit.runs.trained import Trained
from linvit.tasks.task import Task

SIDES = Annotated[int, Range(1, 2**14)]
PREPROCESSING: dict[str, Any] = {
    "size": tuple[SIDES, SIDES],
    "std": tuple[Annotated[float, Range(above=0)], ...],
    "long_side": SIDES,
    "short_side": SIDES,
    "channels": Annotated[int, Range(1, 1024)],
    "rate": Annotated[int, Range(1000, 2**20)],
    "mels": Annotated[int, Range(1, 2**12)],
    "context": Annotated[int, Range(1, 2**24)],
}


class Run(Trained):
    """A trained network and what can be done with it; `load_run` and `train` return that of the task.

    A subclass is a task as recipes and the command line know it. task_name: `task.name` of recipes. task_class: its
    LightningModule; the constructor takes the network first. sources: the data that it learns from, by `data.name`.
    folder_source: the one that reads a folder. preprocessing_class: the dataclass stored in a checkpoint. kept:
    settings of the task that its measures depend on, which a loaded run keeps. stored_facts: annotations of what
    `facts_to_store` returns. names_classes: whether each output of the network has a name. learns_classes: whether the
    data has classes.
    """

    task_name: ClassVar[str]
    task_class: ClassVar[type[Task]]
    sources: ClassVar[Mapping[str, type[Source]]]
    folder_source: ClassVar[str]
    preprocessing_class: ClassVar[type]
    kept: ClassVar[tuple[str, ...]] = ()
    stored_facts: ClassVar[Mapping[str, Any]] = {}
    names_classes: ClassVar[bool] = True
    learns_classes: ClassVar[bool] = True

    @classmethod
    def create_network(cls, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        """The network described by the group `model` of a recipe, for this many classes and channels of the data."""
        raise NotImplementedError

    @classmethod
    def create_task(cls, network: nn.Module, num_classes: int, channels: int = 3, **settings: Any) -> Task:
        """The task around a network; settings are keyword arguments of the task."""
        facts = {"num_classes": num_classes, "channels": channels}
        wanted: dict[str, Any] = {name: value for name, value in facts.items() if name in declared(cls.task_class)}
        return cls.task_class(network, **wanted, **settings)

    @classmethod
    def create_source(cls, name: str, settings: Mapping[str, Any]) -> Source:
        """A source by its `data.name`; raises ValueError, offering the nearest, for an unknown name or setting."""
        check_names("data", [name], cls.sources)
        check_names("setting of the data", settings, declared(cls.sources[name]))
        return cls.sources[name](**{key: as_tuple(value) for key, value in settings.items()})

    @classmethod
    def title(cls, model: dict[str, Any], network: nn.Module) -> str:
        """The network's name in tables and reports."""
        return str(getattr(network, "pretrained_cfg", {}).get("architecture") or model["name"])

    @classmethod
    def facts_to_store(cls, source: Source) -> dict[str, Any]:
        """Facts about the data to store in a checkpoint, in addition to class names and preprocessing."""
        return {}

    @classmethod
    def check_preprocessing(cls, values: Mapping[str, Any], group: str = "") -> None:
        """Raises ValueError for unknown fields of the task's preprocessing and for values out of range.

        Ranges are declared by the task's folder source and in PREPROCESSING.
        """
        names = [field.name for field in fields(cls.preprocessing_class)]
        check_names("setting of the preprocessing", values, names)
        for declaring in (cls.sources[cls.folder_source], cls.preprocessing_class, PREPROCESSING):
            check(declaring, values, group)

    @classmethod
    def create_preprocessing(cls, values: Mapping[str, Any]) -> Any:
        """The preprocessing that a file stores; raises ValueError for values that are missing or do not fit."""
        required = [f.name for f in fields(cls.preprocessing_class) if f.default is f.default_factory is MISSING]
        cls.check_preprocessing(values, "preprocessing")
        check_entries(dict.fromkeys(required, Any), values)
        numbers = {len(values[name]) for name in ("mean", "std") if name in values}
        numbers |= {values[name] for name in ("channels", "mels") if name in values}
        if len(numbers) > 1:
            raise ValueError("the lengths of its preprocessing's mean and std do not fit its channels")
        return cls.preprocessing_class(**{key: as_tuple(value) for key, value in values.items()})

    def source(self, data: str | Path | None = None, **overrides: Any) -> Source:
        """The data to evaluate on: by default the run's own, with these settings changed.

        Args:
            data: a folder, or the name of a source such as "digits"; default: the data of the run.
            overrides: settings of the source, as in the group `data` of a recipe: root, batch_size, num_workers, …
        """
        stored = dict((self.recipe or {}).get("data") or {})
        trained_on = stored.pop("name", None)
        if data is not None:
            overrides = {("name" if str(data) in self.sources else "root"): str(data), **overrides}
        name = overrides.pop("name", None)
        if not name:
            reads_folders = trained_on is not None and "root" in declared(self.sources[trained_on])
            name = self.folder_source if "root" in overrides and not reads_folders else trained_on
        refuse(name is None and "This network comes without data: set `data` to a folder, or to a name such as digits.")
        return self.open_source(name, stored if name == trained_on else {}, overrides)

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        """The data to evaluate on, with the run's classes and preprocessing; ValueError if they do not fit.

        stored: the settings of training, if it is the same source; changes: settings that take precedence over them.
        """
        return self.create_source(name, stored | changes)

    def prepare(self, **settings: Any) -> None:
        """Changes the preprocessing of all later inputs: size, crop_pct, mean …"""
        if isinstance(settings.get("size"), int):
            settings["size"] = (settings["size"],) * 2
        self.check_preprocessing(settings)
        for name in {"mean", "std"} & settings.keys():
            count, values = len(getattr(self.preprocessing, name)), settings[name]
            refuse(
                (values is None or len(values) != count)
                and f"`{name}` is {values}, expected {count} numbers, one per channel: change it."
            )
        self.preprocessing = replace(self.preprocessing, **{key: as_tuple(value) for key, value in settings.items()})

    def evaluate(
        self,
        data: str | Path | None = None,
        progress: bool = False,
        trainer: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Measures:
        """The measures of the task over all held-out samples, see `linvit.runs.evaluate.evaluate`.

        Args:
            data, overrides: see `source`.
            progress: show a progress bar in the terminal.
            trainer: arguments of Lightning's Trainer, such as devices and precision.
        """
        return evaluate(self, self.source(data, **overrides), progress, **(trainer or {}))

    def report(
        self,
        path: str | Path | None = None,
        measures: Measures | None = None,
        data: str | Path | None = None,
        **overrides: Any,
    ) -> Path:
        """Writes a self-contained HTML report (default: report.html in the run's folder) and returns its path.

        measures: the result of `evaluate` on the same data; computed here if it is not given. data, overrides: see
        `evaluate`.
        """
        page = check_output_file(path or self.folder / PAGE)
        source = self.source(data, **overrides)
        measures = evaluate(self, source) if measures is None else measures
        write_report(self, page, measures, self.facts(source), self.sections(source))
        return page

    def facts(self, source: Source) -> tuple[str, ...]:
        """Facts for the report, in addition to name, parameters and weights."""
        return ()

    def sections(self, source: Source) -> list[Section]:
        """Further sections of the report, after the measures."""
        return []

    def export(self, path: str | Path, **options: Unpack[ExportOptions]) -> Exported:
        """Writes the network to a file of another runtime; options, result and errors as of `linvit.export`."""
        return export(self.exported(), path, **options)

    def exported(self) -> Trained:
        """What `export` writes: this run."""
        return self


class NamedRun(Run):
    """A run of a network that linvit creates by name and mechanism: a decoder, an image generator, a Conformer.

    family: the row of linvit.models.by_name.FAMILIES.
    """

    family: ClassVar[str]

    @classmethod
    def create_network(cls, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        arguments = dict(model)
        name = arguments.pop("name", None)
        refuse(
            not name and f"The model needs a `name`: set it to one that `linvit models --task {cls.task_name}` lists."
        )
        with explained(
            lambda reason: f"An argument of the model {name} has the wrong type ({reason}): change it.", TypeError
        ):
            return create(name, num_classes, family=cls.family, **arguments)

    @classmethod
    def title(cls, model: dict[str, Any], network: nn.Module) -> str:
        return f"{model['name']}, {network.mechanism}"
