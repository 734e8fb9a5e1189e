"""The metadata of a checkpoint, checked as strictly as a recipe before anything is built from it."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import constants as hub
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.modules import module as registration

from linvit.files import read_checkpoint, reason_of
from linvit.ranges import Amount, Count, OneOf, check, check_names, required
from linvit.runs.recipe import SETTINGS
from linvit.runs.run import Run
from linvit.runs.settings import as_tuple, group, parameters
from linvit.runs.tasks import RUNS
from linvit.runs.yaml_text import DEEPEST, HIGHEST

FORMAT = 1
NETWORKS = ("network.", "ema.module.")
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
MOST_VALUES = 4_000_000
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
ABOUT = {"format": Annotated[int, OneOf((FORMAT,))], "recipe": dict, "preprocessing": dict, "num_classes": Amount}
GROUPS = {"task": dict, "model": dict, "data": dict}
PROGRESS = {
    "epoch": Amount,
    "global_step": Amount,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list[dict[str, Any]],
    "lr_schedulers": list[dict[str, Any]],
    "pytorch-lightning_version": str,
}


@dataclass(frozen=True)
class Stored:
    """The checked content of a checkpoint, from which a `Run` is made.

    facts: the result of `Run.facts_to_store`. weights: the argument of `Task.load_state_dict`.
    """

    path: Path
    spec: type[Run]
    recipe: dict[str, Any]
    class_names: list[str]
    num_classes: int
    preprocessing: Any
    facts: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def model(self) -> dict[str, Any]:
        """The group `model` of the recipe, without the file of weights that training started from."""
        return {key: value for key, value in self.recipe["model"].items() if key != "checkpoint_path"}


def read_stored(path: str | Path) -> Stored:
    """The checked content of a run's checkpoint.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it was not written by `linvit train`, or an entry is missing or has a wrong value.
    """
    return _stored(Path(path), read_checkpoint(path))


def read_resumable(path: str | Path) -> dict[str, Any]:
    """The recipe of a checkpoint to continue a training from; all of it is checked. Raises as `read_stored`."""
    content = read_checkpoint(path)
    stored = _stored(Path(path), content)
    with refused(stored.path):
        _check_needed(content, PROGRESS)
        check(PROGRESS, content)
        _check_loops(content["loops"], _fresh_loops())
        counts = {weight.numel() for weight in stored.weights.values()}
        for state in content["optimizer_states"]:
            _check_needed(state, ("state", "param_groups"))
            check({"state": dict, "param_groups": list[dict[str, Any]]}, state)
            check_plain(state["param_groups"])
            for entry in state["state"].values():
                _check_moments(entry, counts)
    return stored.recipe


def _fresh_loops() -> dict[str, Any]:
    """What Lightning stores of its loops before a training."""
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return {name: getattr(trainer, name).state_dict() for name in LOOPS}


def _check_loops(stored: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Raises ValueError unless the stored values have the names and types of those of a fresh trainer."""
    _check_needed(stored, fresh)
    check({name: Amount if type(value) is int else type(value) for name, value in fresh.items()}, stored)
    for name, value in fresh.items():
        if isinstance(value, dict):
            _check_loops(stored[name], value)


def check_plain(value: Any) -> None:
    """Raises ValueError for values that no recipe has: other types, deep nesting, NaN and infinity."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    for count in itertools.count():
        if not waiting:
            return
        item, depth = waiting.pop()
        if depth > DEEPEST + 1 or count > MOST_VALUES:
            raise ValueError("the stored values are too many or nested too deeply")
        if isinstance(item, Mapping):
            if not all(isinstance(key, str) for key in item):
                raise ValueError("a stored name is not text")
            waiting += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list | tuple):
            waiting += [(inner, depth + 1) for inner in item]
        elif isinstance(item, int | float):
            if not abs(item) <= HIGHEST:
                raise ValueError(f"a stored number is {'not finite' if isinstance(item, float) else 'too large'}")
        elif not isinstance(item, str | None):
            raise ValueError(f"a stored value is a {type(item).__name__}")


def checked_weights(weights: Any) -> dict[str, Tensor]:
    """Returns the weights; raises ValueError unless all are dense tensors, and those of networks finite."""
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"the entry {str(name)[:60]!r} of the weights is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise ValueError(f"the weights {name!r} are not a dense tensor")
        if name.startswith(NETWORKS) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"the weights {name!r} are not finite, so the training diverged")
    if not any(name.startswith(NETWORKS[0]) for name in weights):
        raise ValueError("it contains no weights of a network")
    return dict(weights)


def build_network(build: Callable[[], nn.Module], path: Path, model: Mapping[str, Any], tensors: int) -> nn.Module:
    """Builds a stored model, first on the meta device: a checkpoint cannot ask for more than its own size.

    path: of the weights. model: name and arguments. tensors: number of weights. Nothing is downloaded. Raises
    ValueError if the model cannot be built, or is too large for the stored weights.
    """
    size = path.stat().st_size
    limits = 4 * tensors + 256, max(size, 2**24)
    name = str(model.get("name") or model.get("backbone"))
    with refused(path), _offline():
        _check_numbers(model, size, tensors)
        try:
            # some networks read values while they are built, which "meta" tensors do not have: they are limited below
            with contextlib.suppress(RuntimeError, TypeError), _limited(*limits), torch.device("meta"):
                build()
            with _limited(*limits):
                return build()
        except ValueError:
            raise
        except Exception as error:  # what a wrong argument raises depends on the network
            raise ValueError(f"its model {name!r} cannot be built ({reason_of(error)})") from error


class _TooLargeError(ValueError):
    """A network with more parameters than its checkpoint has weights."""


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Names the file in a ValueError about its content."""
    try:
        yield
    except ValueError as error:
        reason = " ".join(str(error).split()).removesuffix(": change it.").rstrip(".")
        raise ValueError(f"The checkpoint {path} cannot be used ({reason}): give another one.") from error


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Makes the Hugging Face hub client use only files that were downloaded before."""
    before, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before


def _stored(path: Path, content: Mapping[str, Any]) -> Stored:
    if "linvit" not in content:
        raise ValueError(
            f"The checkpoint {path} does not say which model it belongs to, as those of `linvit train` do: load it with"
            " `model` and `checkpoint`."
        )
    with refused(path):
        _check_needed(content, ("state_dict",))
        check({"linvit": dict, "state_dict": dict}, content)
        weights = checked_weights(content["state_dict"])
        check_plain(content["linvit"])
        return _checked(path, content["linvit"], weights)


def _checked(path: Path, about: Mapping[str, Any], weights: dict[str, Tensor]) -> Stored:
    needed = (*ABOUT, "class_names")
    _check_needed(about, needed)
    check(ABOUT | {"class_names": list[str]}, about)
    recipe = about["recipe"]
    spec = _check_recipe(recipe)
    facts = {name: value for name, value in about.items() if name not in needed}
    check_names("entry", facts, spec.stored_facts)
    check(spec.stored_facts, facts)
    names, count = about["class_names"], about["num_classes"]
    if spec.learns_classes:
        check({"num_classes": Count}, {"num_classes": count})
    if len(names) != (count if spec.names_classes else 0):
        raise ValueError(f"it has {count} classes, but {len(names)} class names")
    if len(facts.get("category_ids", names)) != len(names):
        raise ValueError(f"it has {len(names)} classes, but {len(facts['category_ids'])} category ids")
    preprocessing = _preprocessing(spec, about["preprocessing"])
    return Stored(path, spec, recipe, names, count, preprocessing, facts, weights)


def _check_recipe(recipe: Mapping[str, Any]) -> type[Run]:
    """Returns the task of a stored recipe; raises ValueError for values that a recipe must not have."""
    _check_needed(recipe, GROUPS)
    check(GROUPS, recipe)
    task, data = ({key: value for key, value in recipe[name].items() if key != "name"} for name in ("task", "data"))
    check_names("task", [recipe["task"].get("name")], RUNS)
    spec = RUNS[recipe["task"]["name"]]
    check_names("data", [recipe["data"].get("name")], spec.sources)
    source = spec.sources[recipe["data"]["name"]]
    with group("task", None):
        check_names("setting of the task", task, parameters(spec.task_class))
        _check_needed(task, ("ema_decay", *spec.kept))
        check(spec.task_class, task)
    with group("data", None):
        check_names("setting of the data", data, parameters(source))
        check(source, data)
    for name, kind in SETTINGS.items():
        settings = recipe.get(name) or {}
        with group(name, None):
            check({"settings": dict}, {"settings": settings})
            check(kind, settings)
    return spec


def _preprocessing(spec: type[Run], values: Mapping[str, Any]) -> Any:
    with group("preprocessing", None):
        spec.check_preprocessing(values)
        _check_needed(values, required(spec.preprocessing_class))
    preprocessing = spec.preprocessing_class(**{key: as_tuple(value) for key, value in values.items()})
    lengths = {len(values[name]) for name in ("mean", "std") if name in values}
    lengths |= {values[name] for name in ("channels", "mels") if name in values}
    if len(lengths) > 1:
        raise ValueError("the lengths of its preprocessing's mean and std do not fit its channels")
    return preprocessing


def _check_needed(values: Mapping[str, Any], names: Any) -> None:
    for name in names:
        if name not in values:
            raise ValueError(f"the entry {name!r} is missing")


def _check_numbers(model: Any, size: int, tensors: int, key: str = "") -> None:
    """Raises ValueError if a width exceeds the bytes of the checkpoint, or a depth the number of its tensors."""
    if isinstance(model, Mapping):
        for name, value in model.items():
            _check_numbers(value, size, tensors, f"{key}.{name}")
    elif isinstance(model, list | tuple):
        for value in model:
            _check_numbers(value, size, tensors, key)
    elif isinstance(model, int | float) and abs(model) > (tensors if "depth" in key else size):
        raise _TooLargeError(f"its model has {key[1:]} {model}, more than its weights allow")


@contextlib.contextmanager
def _limited(tensors: int, numbers: int) -> Iterator[None]:
    """Stops the construction of a network with more tensors, or more numbers in them, than this."""
    held = {"tensors": 0, "numbers": 0, "modules": 0}

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, Tensor):
            held["tensors"] += 1
            held["numbers"] += parameter.numel()
        else:
            held["modules"] += 1
        if held["tensors"] > tensors or held["numbers"] > numbers or held["modules"] > 32 * tensors:
            raise _TooLargeError("its model is larger than the weights in it")

    hooks = [
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
        registration.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_moments(entry: Any, counts: set[int]) -> None:
    """Raises ValueError for moments that are not as large as any parameter; other entries are the optimizer's own."""
    moments = [entry[name] for name in MOMENTS if name in entry] if isinstance(entry, Mapping) else [entry]
    for held in moments:
        if held is not None and (not isinstance(held, Tensor) or held.numel() not in counts):
            shown = tuple(held.shape) if isinstance(held, Tensor) else str(held)[:60]
            raise ValueError(f"the optimizer's state {shown} fits no parameter")
