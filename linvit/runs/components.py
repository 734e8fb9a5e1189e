"""Lightning's callbacks, loggers and other objects that a recipe names by class: checked as text, imported, created.

A recipe may come from a stranger. Unless it is trusted, classes come from packages that linvit needs anyway and write
inside the run's folder only. Strings never become functions.
"""

import importlib
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import accelerators, callbacks, loggers, plugins, profilers, strategies

from linvit.data.disk import stays_inside
from linvit.errors import SettingError, keys_of, quoted
from linvit.files import reason_of
from linvit.ranges import arguments, check, check_names, nearest, required

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
class Component:
    """A class and its arguments, checked; arguments may be components in turn."""

    key: str
    kind: type
    arguments: dict[str, Any]

    def create(self, folder: Path) -> Any:
        """The object; directories in its arguments are below folder. ValueError if its class refuses them."""
        given = dict(self.arguments)
        if "save_dir" in arguments(self.kind):
            given.setdefault("save_dir", "")
        if self.kind is loggers.MLFlowLogger and "MLFLOW_TRACKING_URI" not in os.environ:
            # MLflow no longer writes to plain files, Lightning's default
            given.setdefault("tracking_uri", f"sqlite:///{(folder / 'mlflow.db').resolve()}")
            given.setdefault("artifact_location", str((folder / "mlflow").resolve()))
        for name, value in given.items():
            if isinstance(value, Component):
                given[name] = value.create(folder)
            elif INSIDE.fullmatch(name) and isinstance(value, str):
                given[name] = str(folder / value)
        try:
            return self.kind(**given)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{self.key}: {self.kind.__name__} needs a package that is not installed ({reason_of(error)}): install"
                " it."
            ) from error
        except Exception as error:  # what it raises depends on the class
            raise ValueError(f"{self.key}: {self.kind.__name__} refuses its arguments ({reason_of(error)}).") from error


def components(trainer: Mapping[str, Any], trusted: bool) -> dict[str, Any]:
    """The values of a recipe's group trainer that name classes: a Component or a list of them for each such key.

    Raises ValueError, one sentence, before any package outside PACKAGES is imported.
    """
    chosen: dict[str, Any] = {}
    for key, kinds in KINDS.items():
        value, path = trainer.get(key), f"trainer.{key}"
        if isinstance(value, list):
            chosen[key] = [_component(path, item, kinds, trusted) for item in value]
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
    check_names(f"key in {key}", named, ("class_path", "init_args"))
    with keys_of(key):
        check({"init_args": dict | None}, named)
    settings = named.get("init_args") or {}
    kind = _class(key, named.get("class_path"), kinds, trusted)
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind).parameters.values()):
        check_names(f"argument of {kind.__name__}", settings, arguments(kind))
    with keys_of(f"{key}.init_args"):
        check(kind, {name: value for name, value in settings.items() if not isinstance(value, dict)})
    missing = [name for name in required(kind) if name not in (*settings, "save_dir")]
    if missing:
        raise ValueError(f"{key}: {kind.__name__} needs {missing[0]}: add it to its init_args.")
    if not trusted:
        _check_inside(key, settings)
        offline = kind is loggers.WandbLogger and settings.get("offline") is True
        local = issubclass(kind, LOCAL_LOGGERS) or (
            settings.keys() <= LOCAL_ARGUMENTS.get(kind, set()) and (offline or kind is loggers.MLFlowLogger)
        )
        if issubclass(kind, loggers.Logger) and not local:
            advice = "set offline: true and leave other settings out, or " if kind is loggers.WandbLogger else ""
            raise SettingError(
                f"{key} names {named['class_path']}, which may send measures to a server: {advice}{TRUSTED}."
            )
    nested = {name: value for name, value in settings.items() if isinstance(value, dict) and "class_path" in value}
    return Component(
        key,
        kind,
        settings | {name: _component(f"{key}.{name}", value, EVERY, trusted) for name, value in nested.items()},
    )


def _class(key: str, path: Any, kinds: tuple[type, ...], trusted: bool) -> type:
    expected = " or ".join(kind.__name__ for kind in kinds)
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
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a module runs it
        raise ValueError(f"{key} names {path}, which cannot be imported ({reason_of(error)}): correct it.") from error
    if not (isinstance(kind, type) and issubclass(kind, kinds)) or inspect.isabstract(kind) or kind in EVERY:
        raise ValueError(f"{key} names {path}, which is not a {expected} that can be created: choose another class.")
    return kind


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
