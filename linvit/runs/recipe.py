"""A recipe: YAML values, optionally with a `base` file and overrides, checked against the code's arguments."""

import json
import os
import re
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger

from linvit.bundled import find_recipe
from linvit.data.source import Source
from linvit.errors import SettingError, keys_of, quoted
from linvit.ranges import Count, Filled, Seed, arguments, check, declared, nearest, required, some_of
from linvit.runs.evaluate import check_size, check_teacher
from linvit.runs.rows import check_sharing
from linvit.runs.tasks import RUNS, SOURCES
from linvit.runs.trainer import RANGES, check_machine, components, created, lightning_refusals
from linvit.runs.yaml_text import load_value, plain, read_yaml
from linvit.tasks.distillation import Distillation
from linvit.tasks.optimization import Optimizer, Schedule
from linvit.tasks.task import Task

DEEPEST = 16  # keys of keys in an override
TRAINER = {"max_epochs": 10, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
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
Overrides = Mapping[str, Any] | Sequence[str]


def read_recipe(path: str | Path, overrides: Overrides = ()) -> dict[str, Any]:
    """The values of a recipe, merged over those of its `base` file and under the overrides.

    path: a file, or the name of a bundled recipe. overrides: `key.key=value` strings, or a mapping from dotted keys to
    values. A base may have a base in turn, each path relative to the file that names it.
    """
    path = find_recipe(path)
    layers: list[dict[str, Any]] = []  # this file, its base, and so on
    seen: list[Path] = []
    below: Path | None = path
    while below is not None:
        if below.resolve() in seen:
            raise SettingError(f"{path} comes back to {below.name} through its bases: remove `base` from one of them.")
        layers.append(read_yaml(below))
        seen.append(below.resolve())
        below = _base(below, layers[-1])
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values = merge(values, layer)
    values.pop("base", None)
    for key, value in overrides.items() if isinstance(overrides, Mapping) else map(parsed_override, overrides):
        if not isinstance(key, str) or key.count(".") > DEEPEST:
            raise ValueError(f"The override {quoted(key)} names no key: write one such as trainer.max_epochs.")
        for name in reversed(key.split(".")):
            value = {name: value}
        values = merge(values, value)
    values.setdefault("folder", str(Path("runs") / path.stem))
    return values


def base_of(path: str | Path) -> Path | None:
    """The file that a recipe builds on, None if it names none."""
    return _base(Path(path), read_yaml(Path(path)))


def _base(path: Path, values: Mapping[str, Any]) -> Path | None:
    base = values.get("base")
    if base is not None and not isinstance(base, str):
        raise SettingError(
            f"The `base` of the recipe {path} is {quoted(base)}, expected the path of a recipe: correct it."
        )
    return None if base is None else Path(os.path.normpath(path.parent / base))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A new nested dictionary: above's values win, key by key; under another `name` a group keeps its other keys."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return merged


def overrides(values: Mapping[str, Any], key: str = "") -> list[str]:
    """Nested values as `key.key=value` strings, the inverse of `parsed_override`."""
    if isinstance(values, Mapping) and (values or not key):
        return [line for name, value in values.items() for line in overrides(value, f"{key}.{name}" if key else name)]
    return [f"{key}={json.dumps(values)}"]


def parsed_override(override: str) -> tuple[str, Any]:
    """`trainer.max_epochs=3` → ("trainer.max_epochs", 3); raises ValueError for any other form."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"The override {override!r} has no value: write key=value, trainer.max_epochs=3 for example.")
    try:
        return key, load_value(text)
    except ValueError as error:
        raise ValueError(
            f"The value of the override {quoted(override)} is not valid YAML ({error}): correct it."
        ) from error


class Recipe:
    """The values of a recipe, each checked against task, data, optimizer, schedule and trainer; nothing is built yet.

    trust: allows classes from any package and files anywhere, see `linvit.runs.trainer`.
    """

    def __init__(self, values: Mapping[str, Any], *, trust: bool = False) -> None:
        values = plain(values)
        self.run_class = RUNS[_chosen(values, "task", RUNS, "classification")]
        self.source_name = _chosen(values, "data", SOURCES)
        if self.source_name not in self.run_class.sources:
            raise ValueError(
                f"data.name is {self.source_name!r}, but the task {self.run_class.task_name} learns from"
                f" {', '.join(self.run_class.sources)}: choose one of them."
            )
        self._source_class = self.run_class.sources[self.source_name]
        settings = {name: kind for name, kind in SETTINGS.items() if name in arguments(self.run_class.task_class)}
        groups: dict[str, Mapping[str, Any]] = {
            "task": _keys(self.run_class.task_class, SET_ELSEWHERE),
            "data": _keys(self._source_class, {"seed"}),
            **{name: declared(kind) for name, kind in settings.items()},
            "trainer": RANGES,
        }
        for name in ("task", "data"):  # their key `name` chooses a class and is no argument of it
            group = values.get(name)
            keys = group if isinstance(group, Mapping) else {}
            values = {**values, name: {key: value for key, value in keys.items() if key != "name"}}
        self._check(values, groups)
        self._components = components(values.get("trainer", {}), trust)
        defaults = DEFAULTS | {"task": _defaults(self.run_class.task_class, groups["task"])}
        defaults |= {"data": _defaults(self._source_class, groups["data"])}
        defaults |= {name: asdict(kind()) for name, kind in settings.items()}
        defaults |= {"trainer": _defaults(Trainer, RANGES) | TRAINER}
        self.values: dict[str, Any] = plain(merge(defaults, values))
        self.values["init"] = _filled(self.values["init"], self.values)
        self._settings = {}
        for name, kind in settings.items():
            with keys_of(name):
                self._settings[name] = kind(**self.values[name])
        with keys_of("schedule"):
            self._settings["schedule"].check_peak(self._settings["optimizer"])
        if self.values["processes_per_image"] > 1:
            check_sharing("processes_per_image", self.run_class.task_name, self.values["task"]["compile"])

    def _check(self, values: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises ValueError for keys that there are not, and values that their key does not allow."""
        others = set().union(*map(declared, SOURCES.values()))
        foreign = [f"data.{key}" for key in values["data"] if key not in groups["data"] and key in others]
        if foreign:  # they stay in a recipe when an override changes data.name
            images = self.source_name == "imagefolder"
            advice = " `linvit new` writes a recipe for a folder of images." if images else ""
            raise ValueError(
                f"The recipe has settings that the data {self.source_name!r} does not know: {', '.join(foreign)}."
                f" Remove them, or choose other data.{advice}"
            )
        names = [*TOP, *groups, "base", *(f"{name}.{key}" for name, keys in groups.items() for key in keys)]
        for name, value in values.items():
            if name in groups and not isinstance(value, Mapping):
                raise SettingError(
                    f"The recipe's {name!r} is {quoted(value)}, but it is a group: write `{name}: {{key: value}}`."
                )
            for key in (f"{name}.{key}" for key in value) if name in groups else (name,):
                if key not in names:
                    raise ValueError(f"The recipe has an unknown key {quoted(key)}.{nearest(key, names)}")
        with keys_of("", (), **{name: name for name in TOP}):
            check(TOP, values)
        for name, annotations in groups.items():
            with keys_of(name):
                check(annotations, values.get(name, {}))

    @property
    def folder(self) -> Path:
        """The run's folder; a leading ~ is the home."""
        try:
            return Path(self.values["folder"]).expanduser()
        except RuntimeError as error:
            raise ValueError(
                f"folder is {self.values['folder']!r}, of a user who has no home here: write it out."
            ) from error

    def resolved(self) -> dict[str, Any]:
        """Every value of the recipe, defaults included, as plain YAML values."""
        names = {"task": {"name": self.run_class.task_name}, "data": {"name": self.source_name}}
        return {key: names[key] | value if key in names else value for key, value in self.values.items()}

    def source(self) -> Source:
        """The data; raises ValueError for data that is missing or cannot be used."""
        settings = {**self.values["data"], "seed": self.values["seed"]}
        missing = [name for name in required(self._source_class) if name not in settings]
        if missing:
            raise ValueError(f"The recipe has no data.{missing[0]}, which has no default: set it.")
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
        """Raises ValueError for an accelerator, devices or machines that there are not."""
        with keys_of("trainer"):
            check_machine(self.values["trainer"])

    def trainer(
        self,
        callbacks: Sequence[Any] = (),
        plugins: Sequence[Any] = (),
        logger: Logger | bool | None = None,
        **more: Any,
    ) -> Trainer:
        """Lightning's trainer with the recipe's arguments, overridden by `more`, and with these further objects."""
        made = {key: created(value, self.folder) for key, value in self._components.items()}
        given = self.values["trainer"] | made | more

        def named(key: str) -> list[Any]:
            objects = made.get(key, [])
            return objects if isinstance(objects, list) else [objects]

        ours = [logger] if isinstance(logger, Logger) and given["logger"] is not False else []
        given |= {"callbacks": [*named("callbacks"), *callbacks], "plugins": [*named("plugins"), *plugins]}
        given["logger"] = [*ours, *named("logger")] or False
        with lightning_refusals(ImportError, ValueError, TypeError):
            return Trainer(**given)


def _filled(init: str | None, values: Mapping[str, Any]) -> str | None:
    """`init` with values in place of their keys: runs/align/{model.mechanism}/seed{seed} → runs/align/mala/seed0."""

    def written(match: re.Match[str]) -> str:
        value: Any = values
        for name in match[1].split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None or isinstance(value, Mapping | list):
            raise SettingError(
                f"`init` is {init!r}, but the recipe has no single value for {match[1]}: set it, or correct the path."
            )
        return str(value)

    return None if init is None else re.sub(r"\{([\w.]+)\}", written, init)


def _keys(kind: type, set_elsewhere: Set[str]) -> dict[str, Any]:
    """The annotations of the arguments of a class that a recipe sets."""
    return {name: annotation for name, annotation in declared(kind).items() if name not in set_elsewhere}


def _defaults(kind: type, names: Container[str]) -> dict[str, Any]:
    """The defaults of these arguments of a class."""
    return {name: p.default for name, p in arguments(kind).items() if name in names and p.default is not p.empty}


def _chosen(values: Mapping[str, Any], key: str, known: Mapping[str, Any], default: str | None = None) -> str:
    given = values.get(key) or {}
    name = given.get("name", default) if isinstance(given, Mapping) else given
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{key}.name is {quoted(name)}, expected one of {some_of(known, name)}.{nearest(name, known)}")
    return name
