"""A recipe: YAML values, optionally on a `base` file and under overrides, checked against what the code accepts."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jsonargparse
import yaml
from lightning.pytorch import Trainer, seed_everything

from linvit.data.source import Source
from linvit.ranges import Filled, Seed, check
from linvit.runs.bundled import find_recipe
from linvit.runs.settings import group, nearest, parameters
from linvit.runs.tasks import SOURCES, TASKS
from linvit.runs.trainer import RANGES
from linvit.tasks.distillation import Distillation
from linvit.tasks.optimization import Optimizer, Schedule
from linvit.tasks.task import Task

TRAINER = {"max_epochs": 10, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
SET_ELSEWHERE = {"network", "num_classes", "channels", "optimizer", "schedule", "distillation", "seed"}
TOP = {"seed": Seed, "folder": Annotated[str, Filled()], "init": Annotated[str, Filled()] | None}
SETTINGS: dict[str, Any] = {"optimizer": Optimizer, "schedule": Schedule, "distillation": Distillation}
Overrides = Mapping[str, Any] | Sequence[str]


def read_recipe(path: str | Path, overrides: Overrides = ()) -> dict[str, Any]:
    """The values of a recipe, those of its `base` file under them and overrides over them.

    path: a file, or the name of a bundled recipe. overrides: `key.key=value` strings, or a mapping from dotted keys to
    values. A base may have a base in turn, each path relative to the file that names it.

    Raises ValueError with one sentence for a missing file, broken YAML, a malformed override and bases in a circle.
    """
    path = find_recipe(path)
    values: dict[str, Any] = {}
    for layer in reversed(_layers(path)):
        values = merge(values, layer)
    values.pop("base", None)
    for key, value in _pairs(overrides):
        values = merge(values, _nested(key, value))
    values.setdefault("folder", str(Path("runs") / path.stem))
    return values


def base_of(path: str | Path) -> Path | None:
    """The file that a recipe builds on, None where it names none."""
    base = _read_yaml(Path(path)).get("base")
    return None if base is None else Path(os.path.normpath(Path(path).parent / base))


def _layers(path: Path) -> list[dict[str, Any]]:
    """The values of a recipe as its file holds them, then those of its base, and so on."""
    layers, seen = [_read_yaml(path)], [path.resolve()]
    while (base := layers[-1].get("base")) is not None:
        below = seen[-1].parent / base
        if below.resolve() in seen:
            raise ValueError(f"{path} comes back to {below.name} through its bases: remove `base` from one of them.")
        layers.append(_read_yaml(below))
        seen.append(below.resolve())
    return layers


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A new nested dictionary: above's values win, key by key; under another `name` a group keeps its other keys."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, dict)
        merged[key] = merge(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"There is no recipe at {path}: give the path of a .yaml file.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} is not valid YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(values, dict):
        raise ValueError(f"The recipe {path} holds no `key: value` pairs: `linvit recipes` lists examples.")
    return values


def _pairs(overrides: Overrides) -> Iterable[tuple[str, Any]]:
    return overrides.items() if isinstance(overrides, Mapping) else map(parsed_override, overrides)


def parsed_override(override: str) -> tuple[str, Any]:
    """`trainer.max_epochs=3` → ("trainer.max_epochs", 3); raises ValueError for what is not key=value."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"The override {override!r} has no value: write key=value, trainer.max_epochs=3 for example.")
    try:
        return key, yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"The value of the override {override!r} is not valid YAML.") from error


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in Python (YAML 1.1 wants 1.0e-3)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class Recipe:
    """The values of a recipe, each checked against task, data, optimizer, schedule and trainer; nothing is built yet.

    Raises ValueError, one sentence, for an unknown key (offering the nearest) and a value of the wrong kind.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.spec = TASKS[_chosen(values, "task", TASKS, "classification")]
        self.source_name = _chosen(values, "data", SOURCES)
        if self.source_name not in self.spec.sources:
            raise ValueError(
                f"data.name is {self.source_name!r}, but the task {self.spec.name} learns from"
                f" {', '.join(self.spec.sources)}: choose one of them."
            )
        self._parser = self._new_parser()
        values = _without_names(values)
        _check_source_keys(self.source_name, values.get("data", {}))
        _check_keys(values, set(self._parser.get_defaults().keys()))
        self._check_ranges(values)
        try:
            self.config = self._parser.parse_object(values)
        except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
            raise ValueError(_reason(error)) from error
        # Lightning reads 1 as one batch, 1.0 as all; which one jsonargparse makes of 1 depends on the order of imports
        self._whole = {key: value for key, value in values.get("trainer", {}).items() if type(value) is int}
        self._check_together()

    def _check_ranges(self, values: Mapping[str, Any]) -> None:
        with group("", None, **{name: name for name in TOP}):
            check(TOP, values)
        others = {"trainer": RANGES, "task": self.spec.task, "data": self.spec.sources[self.source_name]}
        for name, kind in (SETTINGS | others).items():
            with group(name, None):
                check(kind, values.get(name, {}))

    def _check_together(self) -> None:
        built = {}
        for name, kind in SETTINGS.items():
            with group(name, kind):
                built[name] = kind(**self.config[name].as_dict()) if name in self.config else kind()
        with group("schedule", Schedule):
            built["schedule"].check_peak(built["optimizer"])

    def _new_parser(self) -> jsonargparse.ArgumentParser:
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_argument("--seed", type=int, default=0, help="Everything random is drawn from it.")
        parser.add_argument("--folder", type=str, default="runs/run", help="The run's folder.")
        parser.add_argument("--init", type=str | None, default=None, help="Run or file of weights to start from.")
        parser.add_argument("--model", type=dict[str, Any], default={}, help="Name and arguments of the network.")
        lenient = {"fail_untyped": False, "sub_configs": True, "instantiate": False}
        parser.add_class_arguments(Trainer, "trainer", **lenient)
        parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER.items()})
        for name, kind in SETTINGS.items():
            if name in parameters(self.spec.task):
                parser.add_class_arguments(kind, name)
        parser.add_class_arguments(self.spec.task, "task", skip=SET_ELSEWHERE, **lenient)
        parser.add_class_arguments(self.spec.sources[self.source_name], "data", skip={"seed"}, **lenient)
        return parser

    def resolved(self) -> dict[str, Any]:
        """Every value of the recipe, defaults included, as plain YAML values."""
        values = yaml.safe_load(self._parser.dump(self.config, skip_unset=False, format="yaml"))
        values["trainer"] |= self._whole
        for key, name in {"task": self.spec.name, "data": self.source_name}.items():
            values[key] = {"name": name} | values.get(key, {})
        return values

    def source(self) -> Source:
        """The data; raises ValueError for data that is missing or cannot be used."""
        source_class = self.spec.sources[self.source_name]
        settings = self._parser.instantiate(self.config).data.as_dict()
        with group("data", source_class, seed="seed"):
            return source_class(**settings, seed=self.config["seed"])

    def build(self) -> tuple[Task, Source]:
        """The task around a new network, and its data; seeds all generators first.

        Raises ValueError for data that is missing or cannot be used, and a network that does not fit it.
        """
        seed = self.config["seed"]
        seed_everything(seed, workers=False, verbose=False)
        built = self._parser.instantiate(self.config)
        source = self.source()
        with group("data", type(source), seed="seed"):
            facts = {"num_classes": source.num_classes, "channels": getattr(source.preprocessing, "channels", 3)}
        more = {"distillation": built.distillation} if "distillation" in built else {}
        with group("model", None):
            network = self.spec.network(dict(self.config["model"]), **facts)
        teacher = {name: f"distillation.{name}" for name in ("teacher", "checkpoint", "weight")}
        with group("task", self.spec.task, **teacher):
            task = self.spec.around(
                network,
                **facts,
                **built.task.as_dict(),
                optimizer=built.optimizer,
                schedule=built.schedule,
                seed=seed,
                **more,
            )
        return task, source

    def trainer(self, callbacks: Sequence[Any] = (), **arguments: Any) -> Trainer:
        """Lightning's trainer with the recipe's arguments; callbacks come on top of the recipe's own."""
        given = self._parser.instantiate(self.config).trainer.as_dict() | self._whole
        own_callbacks = given.pop("callbacks") or []
        own_callbacks = own_callbacks if isinstance(own_callbacks, list) else [own_callbacks]
        return Trainer(**{**given, **arguments, "callbacks": [*own_callbacks, *callbacks]})


def _chosen(values: Mapping[str, Any], key: str, known: Mapping[str, Any], default: str | None = None) -> str:
    given = values.get(key) or {}
    name = given.get("name", default) if isinstance(given, Mapping) else given
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{key}.name is {name!r}, but the known ones are {', '.join(known)}.{nearest(name, known)}")
    return name


def _without_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops task.name and data.name, which choose the class and are not arguments of it."""
    rest = dict(values)
    for key in ("task", "data"):
        given = rest.pop(key, None)
        if isinstance(given, Mapping):
            rest[key] = {name: value for name, value in given.items() if name != "name"}
    return rest


def _check_source_keys(source_name: str, data: Mapping[str, Any]) -> None:
    """Raises ValueError for settings of other data, which stay in a recipe when an override changes data.name."""
    known = parameters(SOURCES[source_name])
    others = set().union(*map(parameters, SOURCES.values()))
    foreign = [f"data.{key}" for key in data if key not in known and key in others]
    if foreign:
        advice = " `linvit new` writes a recipe for a folder of images." if source_name == "imagefolder" else ""
        raise ValueError(
            f"The recipe has settings that the data {source_name!r} does not know: {', '.join(foreign)}. Remove them,"
            f" or choose other data.{advice}"
        )


def _check_keys(values: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    """Raises ValueError, offering the nearest name, for a key that no part of the recipe knows."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in known:
            continue
        if any(name.startswith(f"{path}.") for name in known):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"The recipe's {path!r} is {value!r}, but it is a group: write `{path}: {{key: value}}`."
                )
            _check_keys(value, known, f"{path}.")
            continue
        groups = {name.partition(".")[0] for name in known} | {"base"}
        raise ValueError(f"The recipe has an unknown key {path!r}.{nearest(path, known | groups)}")


def _reason(error: BaseException) -> str:
    """jsonargparse explains over many lines; the first ones say which key and why."""
    lines = [line.strip(" -\t") for line in str(error).splitlines() if line.strip()]
    return "The recipe was refused: " + " ".join(lines[:3])
