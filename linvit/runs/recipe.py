"""A recipe: its values checked against the arguments of the code, and what is built from them."""

import re
from collections.abc import Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision

from linvit.data.source import Source
from linvit.errors import SettingError, keys_of, quoted, refuse
from linvit.files import explained
from linvit.ranges import Count, Filled, Seed, arguments, check, check_names, completed, declared, lookup, plain
from linvit.runs import trainer as trainers
from linvit.runs.evaluate import check_size, check_teacher
from linvit.runs.rows import check_sharing
from linvit.runs.tasks import RUNS, SOURCES
from linvit.runs.trainer import PARAMETERS, check_machine, components, created, lightning_refusals
from linvit.tasks.distillation import Distillation
from linvit.tasks.optimization import Optimizer, Schedule
from linvit.tasks.task import Task

SET_ELSEWHERE = {"network", "original", "lessons", "num_classes", "channels", "seed"}
SET_ELSEWHERE |= {"optimizer", "schedule", "distillation"}
TOP = {
    "seed": Seed,
    "folder": Annotated[str, Filled()],
    "init": Annotated[str, Filled()] | None,
    "processes_per_image": Count,
    "model": dict[str, Any],
}
DEFAULTS: dict[str, Any] = {"seed": 0, "folder": "runs/run", "init": None, "processes_per_image": 1, "model": {}}
SETTINGS: dict[str, Any] = {"optimizer": Optimizer, "schedule": Schedule, "distillation": Distillation}


class Recipe:
    """The values of a recipe, each checked against task, data, optimizer, schedule and trainer; nothing is built yet.

    values: as `read_recipe` returns them. trust: allows classes from any package and files anywhere, see
    `linvit.runs.trainer`.
    """

    def __init__(self, values: Mapping[str, Any], *, trust: bool = False) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for name in ("task", "data", *SETTINGS, "trainer"):
            group = values.get(name, {})
            if name in ("task", "data") and not isinstance(group, Mapping):
                group = {} if group is None else {"name": group}
            if not isinstance(group, Mapping):
                raise SettingError(
                    f"The recipe's {name!r} is {quoted(group)}, but it is a group: write `{name}: {{key: value}}`."
                )
            groups[name] = dict(group)
        task_name, data_name = groups["task"].pop("name", "classification"), groups["data"].pop("name", None)
        self._components = components(groups["trainer"], trust)

        self.run_class = lookup("task.name", task_name, RUNS)
        self.source_name, self._source_class = str(data_name), lookup("data.name", data_name, SOURCES)
        of_task, of_data = arguments(self.run_class.task_class), arguments(self._source_class)
        settings = {name: settings_class for name, settings_class in SETTINGS.items() if name in of_task}
        parameters: dict[str, Mapping[str, Parameter]] = {
            "task": {name: p for name, p in of_task.items() if name not in SET_ELSEWHERE},
            "data": {name: p for name, p in of_data.items() if name != "seed"},
            **{name: arguments(settings_class) for name, settings_class in settings.items()},
            "trainer": PARAMETERS,
        }
        of_others = {key for source in SOURCES.values() for key in arguments(source)} - {"seed"}
        foreign = [f"data.{key}" for key in groups["data"] if key not in of_data and key in of_others]
        new = " `linvit new` writes a recipe for a folder of images." if data_name == "imagefolder" else ""
        refuse(
            data_name not in self.run_class.sources
            and f"data.name is {data_name!r}, but the task {self.run_class.task_name} learns from"
            f" {', '.join(self.run_class.sources)}: choose one of them.",
            foreign  # they stay in a recipe when an override changes data.name
            and f"The recipe has settings that the data {data_name!r} does not know: {', '.join(foreign)}. Remove them,"
            f" or choose other data.{new}",
        )
        keys = [f"{name}.{key}" for name, group in groups.items() for key in group]
        keys += [name for name in values if name not in groups]
        check_names(
            "key", keys, [*TOP, *parameters, *(f"{name}.{key}" for name in parameters for key in parameters[name])]
        )

        top = DEFAULTS | {name: value for name, value in values.items() if name in TOP}
        check(TOP, top)
        of_groups = {name: completed(parameters[name], groups[name], name) for name in parameters}
        self._missing = [f"data.{name}" for name in parameters["data"] if name not in of_groups["data"]]
        self.values: dict[str, Any] = plain(top | of_groups)
        for key in re.findall(r"\{([\w.]+)\}", self.values["init"] or ""):  # runs/align/{model.mechanism}/seed{seed}
            value: Any = self.values
            for name in key.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            if value is None or isinstance(value, Mapping | list):
                raise SettingError(
                    f"`init` is {quoted(top['init'])}, but the recipe has no single value for {key}: set it, or correct"
                    " the path."
                )
            self.values["init"] = self.values["init"].replace(f"{{{key}}}", str(value))
        self._settings: dict[str, Any] = {}
        for name, settings_class in settings.items():
            with keys_of(name):
                self._settings[name] = settings_class(**self.values[name])
        with keys_of("schedule"):
            self._settings["schedule"].check_peak(self._settings["optimizer"])

    @property
    def folder(self) -> Path:
        """The run's folder; a leading ~ is the home."""
        homeless = f"folder is {self.values['folder']!r}, of a user who has no home here: write it out."
        with explained(homeless, RuntimeError):
            return Path(self.values["folder"]).expanduser()

    def resolved(self) -> dict[str, Any]:
        """Every value of the recipe, defaults included, as plain YAML values."""
        names = {"task": {"name": self.run_class.task_name}, "data": {"name": self.source_name}}
        return {key: names[key] | value if key in names else value for key, value in self.values.items()}

    def source(self) -> Source:
        """The data; raises ValueError for data that is missing or cannot be used."""
        if self._missing:
            raise SettingError(f"The recipe has no {self._missing[0]}, which has no default: set it.")
        settings = {**self.values["data"], "seed": self.values["seed"]}
        with keys_of("data", declared(self._source_class), seed="seed"):
            return self.run_class.create_source(self.source_name, settings)

    def build(self) -> tuple[Task, Source]:
        """The task around a new network, and its data; seeds all generators first."""
        seed, groups = self.values["seed"], self.values
        seed_everything(seed, workers=False, verbose=False)
        source = self.source()
        with keys_of("data", declared(type(source)), seed="seed"):  # some read their files only now
            facts = {"num_classes": source.num_classes, "channels": getattr(source.preprocessing, "channels", 3)}
        with keys_of("model"):
            network = self.run_class.create_network(dict(groups["model"]), **facts)
        of_distillation = declared(Distillation) if "distillation" in self._settings else ()
        spelled = {name: f"distillation.{name}" for name in of_distillation}
        with keys_of("task", declared(self.run_class.task_class), **spelled):
            task = self.run_class.create_task(network, **facts, **groups["task"], **self._settings, seed=seed)
        teacher = getattr(task, "original", None) or getattr(getattr(task, "teacher", None), "network", None)
        with keys_of("data", declared(type(source)), seed="seed"):
            check_size(network, source, "network")
            if teacher is not None:
                check_size(teacher, source, "teacher")
            for weights in (groups.get("distillation", {}).get("checkpoint"), groups["task"].get("teacher")):
                if weights:
                    check_teacher(weights, source)
        return task, source

    def check_machine(self) -> None:
        """Raises SettingError for an accelerator, devices or processes that this machine cannot give the run."""
        trainer = self.values["trainer"]
        with keys_of("trainer"):
            check_machine(trainer)
        on_device = self.values["data"].get("augment_on") == "device"
        refuse(
            on_device
            and trainers.present_device(trainer["accelerator"]) == "mps"
            and "data.augment_on is 'device', which needs float64, and Apple's GPUs have none: set it to cpu."
        )
        if self.values["processes_per_image"] > 1:
            check_sharing("processes_per_image", self.run_class.task_name, self.values["task"]["compile"])

    def settle(self, stored: Mapping[str, Any] | None) -> None:
        """Replaces precision "auto" and channels_last null by what the run has, or what suits its device.

        stored: the recipe of a run that is resumed, None for a new one.
        """
        trainer, task = self.values["trainer"], self.values["task"]
        device = trainers.present_device(trainer["accelerator"])
        if trainer["precision"] == "auto" and stored:
            trainer["precision"] = stored.get("trainer", {}).get("precision")
        elif trainer["precision"] == "auto":
            plugins = self._components.get("plugins", [])
            plugins = plugins if isinstance(plugins, list) else [plugins]
            named = [plugin for plugin in plugins if issubclass(plugin.kind, Precision)]
            precision = "32-true"
            if device == "cuda":
                precision = "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
            trainer["precision"] = None if named else precision
        if task["channels_last"] is None:
            task["channels_last"] = stored.get("task", {}).get("channels_last", False) if stored else device == "cuda"

    def trainer(
        self,
        callbacks: Sequence[Any] = (),
        plugins: Sequence[Any] = (),
        logger: Logger | bool | None = None,
        **more: Any,
    ) -> Trainer:
        """Lightning's trainer with the recipe's arguments, overridden by `more`, and with these further objects."""
        self.settle(None)
        made = {key: created(value, self.folder) for key, value in self._components.items()}
        settings = self.values["trainer"] | made | more

        def named(key: str) -> list[Any]:
            objects = made.get(key, [])
            return objects if isinstance(objects, list) else [objects]

        ours = [logger] if isinstance(logger, Logger) and settings["logger"] is not False else []
        settings |= {"callbacks": [*named("callbacks"), *callbacks], "plugins": [*named("plugins"), *plugins]}
        del settings["threads"]
        settings["logger"] = [*ours, *named("logger")] or False
        with lightning_refusals(ImportError, ValueError, TypeError):
            return Trainer(**settings)
