"""A recipe: YAML values, optionally on a `base` file and under overrides, checked against what the code accepts."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from linvit.data import SOURCES
from linvit.runs.build import TASKS
from linvit.tasks.distillation import Distillation
from linvit.tasks.optimization import Optimizer, Schedule

FREE = ("model", "optimizer.options")  # their keys are judged by the function that gets them
NAMED = {"task": TASKS, "data": SOURCES}


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a recipe, those of its `base` file under them and `key.key=value` overrides over them.

    A base may have a base in turn, each path relative to the file that names it.

    Raises ValueError with one sentence for a missing file, broken YAML, a malformed override and bases in a circle.
    """
    path = Path(path)
    values: dict[str, Any] = {}
    for layer in reversed(_layers(path)):
        values = merge(values, layer)
    values.pop("base", None)
    for override in overrides:
        values = merge(values, _nested(override))
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


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A new nested dictionary: above's values win, key by key; under another `name` a group keeps its other keys."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, dict) and isinstance(under, dict)
        merged[key] = merge(under, value) if both else value
    return merged


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"There is no recipe at {path}: give the path of a .yaml file.")
    try:
        values = yaml.load(path.read_text(), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} is not valid YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(values, dict):
        raise ValueError(f"The recipe {path} holds no `key: value` pairs: see the recipes folder for examples.")
    return values


def _nested(override: str) -> dict[str, Any]:
    """`trainer.max_epochs=3` → {"trainer": {"max_epochs": 3}}."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"The override {override!r} has no value: write key=value, trainer.max_epochs=3 for example.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"The value of the override {override!r} is not valid YAML.") from error
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in Python (YAML 1.1 wants 1.0e-3)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class RecipeCLI(LightningCLI):
    """LightningCLI whose groups are those of a recipe: seed, folder, init, model, task, optimizer, schedule,
    distillation, data, trainer.

    `prepare(cli)` runs when task and data stand and returns further keyword arguments of the Trainer, whose `callbacks`
    come on top of the recipe's own. Nothing is built where `builds` is false.
    """

    config: jsonargparse.Namespace

    def __init__(
        self,
        values: dict[str, Any],
        prepare: Callable[["RecipeCLI"], dict[str, Any]] | None = None,
        builds: bool = True,
    ) -> None:
        self.names = {group: _chosen(values, group, table) for group, table in NAMED.items()}
        _check_pair(**self.names)
        self.prepare = prepare
        self.builds = builds
        super().__init__(
            TASKS[self.names["task"]],
            SOURCES[self.names["data"]],
            save_config_callback=None,
            trainer_class=Trainer,
            trainer_defaults={"max_epochs": 10, "num_sanity_val_steps": 0, "use_distributed_sampler": False},
            parser_kwargs={"exit_on_error": False},
            args=_without_names(values),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=0, help="Everything random is drawn from it.")
        parser.add_argument("--folder", type=str, default="runs/run", help="The run's folder.")
        parser.add_argument("--init", type=str | None, default=None, help="Run or file of weights to start from.")

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in self.trainer_defaults.items()})
        parser.add_argument(
            "--model", type=dict[str, Any], default={}, help="name, and arguments of timm.create_model."
        )
        parser.add_class_arguments(Optimizer, "optimizer")
        parser.add_class_arguments(Schedule, "schedule")
        parser.add_lightning_class_args(self._model_class, "task")
        parser.add_lightning_class_args(self._datamodule_class, "data")
        parser.link_arguments("seed", "task.seed")
        parser.link_arguments("seed", "data.seed")
        parser.link_arguments("optimizer", "task.optimizer", apply_on="instantiate")
        parser.link_arguments("schedule", "task.schedule", apply_on="instantiate")
        parser.link_arguments("model", "task.model")
        parser.link_arguments("data.num_classes", "task.num_classes", apply_on="instantiate")
        if self.names["task"] == "classification":
            parser.add_class_arguments(Distillation, "distillation")
            parser.link_arguments("distillation", "task.distillation", apply_on="instantiate")
            parser.link_arguments("data.channels", "task.channels", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_keys(args, set(parser.get_defaults().keys()))
        try:
            self.config = parser.parse_object(args)
        except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
            raise ValueError(_reason(error)) from error

    def _set_seed(self) -> None:
        seed_everything(self.config["seed"], workers=False, verbose=False)

    def instantiate_classes(self) -> None:
        if not self.builds:
            return
        self.config_init = self.parser.instantiate(self.config)
        self.datamodule = self.config_init["data"]
        self.model = self.config_init["task"]
        more = self.prepare(self) if self.prepare else {}
        self.trainer_defaults["callbacks"] = more.pop("callbacks", [])
        self.trainer = self.instantiate_trainer(**more)

    def resolved(self) -> dict[str, Any]:
        """Every value of the recipe, defaults included, as plain YAML values."""
        values = yaml.safe_load(self.parser.dump(self.config, skip_unset=False, format="yaml"))
        for group, name in self.names.items():
            values[group] = {"name": name} | values.get(group, {})
        return values


def _chosen(values: dict[str, Any], group: str, table: dict[str, Any]) -> str:
    given = values.get(group) or {}
    name = given.get("name", "classification" if group == "task" else None) if isinstance(given, dict) else given
    if name not in table:
        raise ValueError(f"{group}.name is {name!r}, but the known ones are {', '.join(table)}.{_nearest(name, table)}")
    return name


def _check_pair(task: str, data: str) -> None:
    fits = [name for name, source in SOURCES.items() if source.task == task]
    if data not in fits:
        raise ValueError(
            f"data.name is {data!r}, but the task {task} learns from {', '.join(fits)}: choose one of them."
        )


def _without_names(values: dict[str, Any]) -> dict[str, Any]:
    """Drops task.name and data.name, which choose the class and are no arguments of it."""
    rest = dict(values)
    for group in NAMED:
        given = rest.pop(group, None)
        if isinstance(given, dict):
            rest[group] = {key: value for key, value in given.items() if key != "name"}
    return rest


def check_keys(values: dict[str, Any], known: set[str], prefix: str = "") -> None:
    """Raises ValueError, offering the nearest name, for a key that no part of the recipe knows."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in known:
            continue
        if any(name.startswith(f"{path}.") for name in known):
            if not isinstance(value, dict):
                raise ValueError(
                    f"The recipe's {path!r} is {value!r}, but it is a group: write `{path}: {{key: value}}`."
                )
            check_keys(value, known, f"{path}.")
            continue
        groups = {name.partition(".")[0] for name in known} | {"base"}
        raise ValueError(f"The recipe has an unknown key {path!r}.{_nearest(path, known | groups)}")


def _nearest(name: object, known: Iterable[str]) -> str:
    """` Did you mean …?` by the whole key, or by its last part where that stands in another group."""
    known = list(known)
    part = str(name).rpartition(".")[2]
    last = {key.rpartition(".")[2]: key for key in known}
    near = difflib.get_close_matches(str(name), known, n=1)
    near = near or [last[found] for found in difflib.get_close_matches(part, last, n=1)]
    return f" Did you mean {near[0]!r}?" if near else ""


def _reason(error: BaseException) -> str:
    """jsonargparse explains over many lines; the first ones say which key and why."""
    lines = [line.strip(" -\t") for line in str(error).splitlines() if line.strip()]
    return "The recipe was refused: " + " ".join(lines[:3])
