"""The group trainer of a recipe: the values that Lightning's trainer accepts, and objects that are named by class.

A recipe may come from a stranger. Unless it is trusted, classes come from packages that linvit needs anyway and write
inside the run's folder only. Strings never become functions.
"""

import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, accelerators, callbacks, loggers, plugins, profilers, strategies
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from linvit.data.disk import stays_inside
from linvit.errors import SettingError, keys_of, quoted, refuse
from linvit.files import explained, reason_of
from linvit.ranges import (
    Amount,
    Count,
    Like,
    OneOf,
    Range,
    Rule,
    Some,
    arguments,
    check,
    check_names,
    declared,
    nearest,
)

LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
PACKAGES = ("lightning", "linvit", "timm", "torch", "torchmetrics")
KINDS: Mapping[str, tuple[type, ...]] = {
    "accelerator": (accelerators.Accelerator,),
    "callbacks": (callbacks.Callback,),
    "logger": (loggers.Logger,),
    "plugins": (plugins.Precision, plugins.LayerSync, ClusterEnvironment),
    "profiler": (profilers.Profiler,),
    "strategy": (strategies.Strategy,),
}
EVERY = tuple(kind for kinds in KINDS.values() for kind in kinds)
HOMES = (callbacks, loggers, plugins, profilers, strategies)
LOCAL_LOGGERS = (loggers.CSVLogger, loggers.TensorBoardLogger)
NAMES = {"name", "version", "id", "project", "group", "job_type", "notes", "tags", "prefix", "save_dir", "offline"}
LOCAL_ARGUMENTS: Mapping[type, set[str]] = {
    loggers.WandbLogger: NAMES,
    loggers.MLFlowLogger: {"experiment_name", "run_name", "run_id", "tags", "prefix", "save_dir"},
}
"""Arguments of loggers that write to the run's folder with them; others may name a server."""
TRUSTED = "give `trust_recipe=True` if you trust this recipe"
INSIDE = re.compile(r"(.*_)?(dir|path|dirpath|folder)")


@dataclass(frozen=True)
class Class(Rule):
    """The class of an object, see `linvit.runs.trainer`."""

    def holds(self, value: Any) -> bool:
        return True

    def words(self, noun: str, got: Any = None) -> str:
        return "the path of a class (class_path, init_args)"


Object = Annotated[dict[str, Any], Class()]
Objects = Annotated[str | dict[str, Any], Class()] | Sequence[Annotated[str | dict[str, Any], Class()]]
Duration = Annotated[str, Like(r"\d+(:\d\d){3}", "a time as DD:HH:MM:SS")] | Annotated[dict[str, Any], Some()]

RANGES: Mapping[str, Any] = {
    **declared(Trainer),
    # objects are written as classes in a recipe
    "accelerator": Annotated[str, OneOf(("auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())))]
    | Object,
    "callbacks": Objects | None,
    "logger": bool | Objects | None,
    "plugins": Objects | None,
    "profiler": Annotated[str, OneOf(("simple", "advanced", "pytorch", "xla"))] | Object | None,
    "strategy": Annotated[str, OneOf(("auto", *StrategyRegistry.available_strategies()))] | Object,
    "threads": Annotated[int, Range(1, 1024)] | None,  # not Lightning's, see linvit.runs.threads
    # set by linvit
    "default_root_dir": None,
    "model_registry": None,
    "overfit_batches": Annotated[float, OneOf((0,))],
    "use_distributed_sampler": Annotated[bool, OneOf((False,))],
    # values that Lightning takes, but that end in a crash or an endless or empty run
    "accumulate_grad_batches": Count,
    "check_val_every_n_epoch": Count | None,
    "devices": Count
    | Sequence[Amount]
    | Annotated[str, Like(r"auto|-1|\d+|\d+(,\d+)*,?", "auto, -1 or numbers of devices as text")],
    "gradient_clip_val": Annotated[float, Range(0)] | None,
    "limit_train_batches": Count | Annotated[float, Range(above=0, most=1)] | None,
    "log_every_n_steps": Count | None,
    "max_epochs": Count | None,
    "max_steps": Count | Annotated[int, OneOf((-1,))],
    "max_time": Duration | None,
    "num_nodes": Count,
    "precision": Annotated[str, OneOf(("auto",))] | declared(Trainer)["precision"],
    "val_check_interval": Count | Annotated[float, Range(above=0, most=1)] | Duration | None,
}
"""The values of the group trainer of a recipe, by argument of Lightning's trainer; others are refused by Lightning."""
TRAINER = {"max_epochs": 10, "precision": "auto", "num_sanity_val_steps": 0, "use_distributed_sampler": False}
"""Defaults of linvit in place of Lightning's."""
PARAMETERS = {
    name: p.replace(annotation=RANGES[name], default=TRAINER.get(name, p.default))
    for name, p in arguments(Trainer).items()
}
PARAMETERS["threads"] = Parameter("threads", Parameter.KEYWORD_ONLY, annotation=RANGES["threads"], default=None)


@contextmanager
def lightning_refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Raises Lightning's MisconfigurationException, and exceptions of these kinds, as ValueError with one sentence."""
    refusals: tuple[type[Exception], ...] = (MisconfigurationException, *kinds)
    try:
        yield
    except refusals as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Lightning's trainer refuses the recipe's group trainer: {reason}") from error


def present_device(accelerator: Any) -> str | None:
    """The kind of device of a recipe's `accelerator`, such as cuda; None if this machine has none, or for an object."""
    if not isinstance(accelerator, str):
        return None
    wanted = {"auto": ("cuda", "mps", "tpu", "cpu"), "gpu": ("cuda", "mps")}.get(accelerator, (accelerator,))
    return next((name for name in wanted if AcceleratorRegistry[name]["accelerator"].is_available()), None)


def check_machine(trainer: Mapping[str, Any]) -> None:
    """Raises SettingError for an accelerator, devices or nodes that do not exist: Lightning would wait for them.

    trainer: the group of a recipe.
    """
    accelerator, devices, nodes = trainer["accelerator"], trainer["devices"], trainer["num_nodes"]
    if isinstance(accelerator, str):
        present = present_device(accelerator)
        if present is None:
            raise SettingError.of("accelerator", accelerator, "one that this machine has", "set it to auto or cpu")
        existing = {"cpu": os.cpu_count() or 1, "cuda": torch.cuda.device_count()}.get(present)
        if existing is not None and _highest(devices) > existing:
            raise SettingError.of("devices", devices, f"at most {existing}, which this machine has", "set it lower")
    if nodes > 1 and "MASTER_ADDR" not in os.environ and not any(launcher.detect() for launcher in LAUNCHERS):
        raise SettingError(
            f"`num_nodes` is {nodes}, but nothing started this process on several machines: start it by torchrun or"
            " srun, or set it to 1."
        )


def _highest(devices: int | str | Sequence[int]) -> int:
    """The number of devices that must exist, so that these do; -1 if all that exist are asked for."""
    if isinstance(devices, int):
        return devices
    if isinstance(devices, str):
        if devices.isdigit():
            return int(devices)
        devices = [int(index) for index in devices.split(",") if index.isdigit()]
    return max(devices, default=-2) + 1


@dataclass(frozen=True)
class Component:
    """A class and its arguments, checked; arguments may be components in turn."""

    key: str
    kind: type
    arguments: dict[str, Any]

    def create(self, folder: Path) -> Any:
        """The object; directories in its arguments are below folder. ValueError if its class refuses them."""
        settings = dict(self.arguments)
        if "save_dir" in arguments(self.kind):
            settings.setdefault("save_dir", "")
        if self.kind is loggers.MLFlowLogger and "MLFLOW_TRACKING_URI" not in os.environ:
            # MLflow no longer writes to plain files, Lightning's default
            settings.setdefault("tracking_uri", f"sqlite:///{(folder / 'mlflow.db').resolve()}")
            settings.setdefault("artifact_location", str((folder / "mlflow").resolve()))
        for name, value in settings.items():
            if isinstance(value, Component):
                settings[name] = value.create(folder)
            elif INSIDE.fullmatch(name) and isinstance(value, str):
                settings[name] = str(folder / value)
        try:
            return self.kind(**settings)
        except Exception as error:  # what it raises depends on the class
            missing = isinstance(error, ModuleNotFoundError)
            fault = "needs a package that is not installed" if missing else "refuses its arguments"
            raise ValueError(f"{self.key}: {self.kind.__name__} {fault} ({reason_of(error)}): correct it.") from error


def components(trainer: Mapping[str, Any], trusted: bool) -> dict[str, Any]:
    """The values of a recipe's group trainer that name classes, as a Component or a list of them for each such key.

    Other values are left to the ranges of the group.
    """
    chosen: dict[str, Any] = {}
    for key, kinds in KINDS.items():
        value, path = trainer.get(key), f"trainer.{key}"
        if isinstance(value, list):
            chosen[key] = [_component(path, item, kinds, trusted) for item in value if isinstance(item, str | dict)]
        elif isinstance(value, dict) or (isinstance(value, str) and key in ("callbacks", "logger", "plugins")):
            chosen[key] = _component(path, value, kinds, trusted)
    return chosen


def created(value: Any, folder: Path) -> Any:
    """Components, and lists of them, as objects."""
    if isinstance(value, list):
        return [item.create(folder) for item in value]
    return value.create(folder)


def _component(key: str, named: str | dict[str, Any], kinds: tuple[type, ...], trusted: bool) -> Component:
    named = {"class_path": named} if isinstance(named, str) else named
    component_class, settings = _class(key, named.get("class_path"), kinds, trusted), named.get("init_args") or {}
    if not isinstance(settings, dict):
        raise SettingError.of(f"{key}.init_args", settings, "a mapping")
    if not trusted:
        _check_inside(key, settings)
    nested = {name: value for name, value in settings.items() if isinstance(value, dict) and "class_path" in value}
    made = {name: _component(f"{key}.{name}", value, EVERY, trusted) for name, value in nested.items()}
    parameters = arguments(component_class)
    required = [name for name, p in parameters.items() if p.default is p.empty and name != "save_dir"]
    missing = [name for name in required if name not in settings]
    check_names(f"key in {key}", named, ("class_path", "init_args"))
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(component_class).parameters.values()):
        check_names(f"argument of {component_class.__name__}", settings, parameters)
    with keys_of(f"{key}.init_args"):
        check(component_class, {name: value for name, value in settings.items() if not isinstance(value, dict)})
    offline = component_class is loggers.WandbLogger and settings.get("offline") is True
    local = issubclass(component_class, LOCAL_LOGGERS) or (
        settings.keys() <= LOCAL_ARGUMENTS.get(component_class, set())
        and (offline or component_class is loggers.MLFlowLogger)
    )
    advice = "set offline: true and leave other settings out, or " if component_class is loggers.WandbLogger else ""
    refuse(
        missing and f"{key}: {component_class.__name__} needs {missing[0]}: add it to its init_args.",
        not trusted
        and issubclass(component_class, loggers.Logger)
        and not local
        and f"{key} names {named['class_path']}, which may send measures to a server: {advice}{TRUSTED}.",
    )
    return Component(key, component_class, settings | made)


def _class(key: str, path: Any, kinds: tuple[type, ...], trusted: bool) -> type:
    expected = " or ".join(base.__name__ for base in kinds)
    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", path):
        raise ValueError(f"{key} names the class {quoted(path)}, expected the path of a {expected}: correct it.")
    module, _, name = path.rpartition(".")
    if not module:
        home = next((home for home in HOMES if path in home.__all__), None)
        if home is None:
            names = [name for home in HOMES for name in home.__all__ if issubclass(getattr(home, name), kinds)]
            raise ValueError(f"{key} names {path}, which Lightning does not have.{nearest(path, names)}")
        module = home.__name__
    if not trusted and (module.partition(".")[0] not in PACKAGES or re.search(r"(^|\.)_", path)):
        raise SettingError(f"{key} names {path}, code outside {', '.join(PACKAGES)}: {TRUSTED}.")
    with explained(lambda reason: f"{key} names {path}, which cannot be used ({reason}): correct it."):
        named = getattr(importlib.import_module(module), name)
        if not (isinstance(named, type) and issubclass(named, kinds)) or inspect.isabstract(named) or named in EVERY:
            raise TypeError(f"it is not a {expected} that can be created")
    return named


def _check_inside(key: str, value: Any) -> None:
    """Raises ValueError for text, at any depth, that is a path outside the run's folder."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_inside(f"{key}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            _check_inside(key, item)
    elif isinstance(value, str) and (
        (value != "" and not stays_inside(value)) or value.startswith(("~", "$", "file:")) or "://" in value
    ):
        raise SettingError(
            f"{key} is {quoted(value)}, a path outside the run's folder: choose one inside, or {TRUSTED}."
        )
