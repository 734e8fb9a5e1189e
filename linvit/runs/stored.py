"""The run of a checkpoint, whose metadata is checked as strictly as a recipe before anything is built from it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import constants as hub
from lightning.pytorch import Trainer
from torch import Tensor, nn

from linvit.errors import SettingError, keys_of
from linvit.files import read_checkpoint, reason_of
from linvit.ranges import Amount, Count, OneOf, as_tuple, check, check_names, declared, plain
from linvit.runs.recipe import SETTINGS
from linvit.runs.run import Run
from linvit.runs.tasks import RUNS

FORMAT = 1
NETWORKS = ("network.", "ema.module.")
MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
ABOUT = {
    "format": Annotated[int, OneOf((FORMAT,))],
    "recipe": dict,
    "preprocessing": dict,
    "class_names": list[str],
    "num_classes": Amount,
}
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
OPTIMIZER = {"state": dict, "param_groups": list[dict[str, Any]]}


def run_of_checkpoint(path: Path) -> Run:
    """The run of a checkpoint.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it was not written by `linvit train`, or an entry is missing or has a wrong value.
    """
    run_class, about, preprocessing, weights = _checked(path, read_checkpoint(path))
    recipe, count = about["recipe"], about["num_classes"]
    model = {key: value for key, value in recipe["model"].items() if key != "checkpoint_path"}  # where training started
    channels, tensors = getattr(preprocessing, "channels", 3), sum(name.startswith(NETWORKS[0]) for name in weights)
    network = build_network(lambda: run_class.create_network(model, count, channels), path, model, tensors)
    kept = {key: recipe["task"][key] for key in ("ema_decay", *run_class.kept)}
    task = run_class.create_task(network, count, channels, **kept)
    name = run_class.title(model, network)
    try:
        task.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"The weights in {path} do not fit the model {name!r} that it names: the file is damaged, or was written by"
            " a version in which that model was another."
        ) from error
    facts = {name: about[name] for name in run_class.stored_facts if name in about}
    return run_class(task, about["class_names"], preprocessing, path, name, recipe, facts)


def read_resumable(path: str | Path) -> dict[str, Any]:
    """The recipe of a checkpoint to continue a training from; all of it is checked. Raises as `run_of_checkpoint`."""
    content = read_checkpoint(path)
    _, about, _, weights = _checked(Path(path), content)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    with refused(Path(path)):
        _check_entries(PROGRESS, content)
        try:
            for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
                getattr(trainer, name).load_state_dict(content["loops"][name])
        except Exception as error:  # whatever Lightning makes of a changed state
            raise ValueError(f"its record of the training does not fit ({reason_of(error)})") from error
        sizes = {weight.numel() for weight in weights.values()}
        for state in content["optimizer_states"]:
            _check_entries(OPTIMIZER, state)
            plain(state["param_groups"])
            moments = [entry[name] for entry in state["state"].values() for name in MOMENTS & entry.keys()]
            if not all(isinstance(moment, Tensor) and moment.numel() in sizes for moment in moments):
                raise ValueError("the state of the optimizer fits no parameter")
    return dict(about["recipe"])


def build_network(build: Callable[[], nn.Module], path: Path, model: Mapping[str, Any], tensors: int) -> nn.Module:
    """Builds a stored model, first on the meta device: a checkpoint cannot ask for more memory than its own size.

    path: of the weights. model: name and arguments. tensors: number of weights. Nothing is downloaded.
    """
    bytes_stored = path.stat().st_size
    online, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    with refused(path):
        try:
            _check_numbers(model, bytes_stored, tensors)
            # some networks read values while they are built, which "meta" tensors do not have
            with contextlib.suppress(RuntimeError, TypeError), torch.device("meta"):
                numbers = sum(x.numel() for x in build().state_dict().values())
                if numbers > max(bytes_stored, 2**24):
                    raise ValueError("its model is larger than the weights in it")
            return build()
        except ValueError:
            raise
        except Exception as error:  # what a wrong argument raises depends on the network
            name = model.get("name") or model.get("backbone")
            raise ValueError(f"its model {str(name)!r} cannot be built ({reason_of(error)})") from error
        finally:
            hub.HF_HUB_OFFLINE = online


def _check_numbers(model: Any, size: int, tensors: int, key: str = "") -> None:
    """Raises ValueError if a width exceeds the bytes of the checkpoint, or a depth the number of its tensors."""
    if isinstance(model, Mapping):
        for name, value in model.items():
            _check_numbers(value, size, tensors, f"{key}.{name}")
    elif isinstance(model, list | tuple):
        for value in model:
            _check_numbers(value, size, tensors, key)
    elif isinstance(model, int | float) and abs(model) > (tensors if "depth" in key else size):
        raise ValueError(f"its model has {key[1:]} {model}, more than its weights allow")


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Names the file in a ValueError about its content."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).removesuffix(": change it.").rstrip(".")
        raise ValueError(f"The checkpoint {path} cannot be used ({reason}): give another one.") from error


def _checked(path: Path, content: Mapping[str, Any]) -> tuple[type[Run], dict[str, Any], Any, dict[str, Tensor]]:
    """The class of a checkpoint's run, what the checkpoint says about it, its preprocessing and all weights."""
    if "linvit" not in content:
        raise SettingError(
            f"The checkpoint {path} does not say which model it belongs to, as those of `linvit train` do: load it with"
            " `model` and `checkpoint`."
        )
    with refused(path):
        _check_entries({"linvit": dict, "state_dict": dict}, content)
        weights = _checked_weights(content["state_dict"])
        about = plain(content["linvit"])
        _check_entries(ABOUT, about)
        run_class = _check_recipe(about["recipe"])
        facts = {name: value for name, value in about.items() if name not in ABOUT}
        check_names("entry", facts, run_class.stored_facts)
        check(run_class.stored_facts, facts)
        names, count = about["class_names"], about["num_classes"]
        if run_class.learns_classes:
            check({"num_classes": Count}, about)
        for what, number in (("class names", len(names)), ("category ids", len(facts.get("category_ids", names)))):
            if number != (count if run_class.names_classes else 0):
                raise ValueError(f"it has {count} classes, but {number} {what}")
        preprocessing = _preprocessing(run_class, about["preprocessing"])
        return run_class, about, preprocessing, weights


def _checked_weights(weights: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Returns the weights; raises ValueError unless all are dense tensors, and those of networks finite."""
    for name, tensor in weights.items():
        dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not isinstance(name, str) or not dense or tensor.is_quantized:
            raise ValueError(f"the entry {str(name)[:60]!r} of the weights is not a dense tensor")
        if name.startswith(NETWORKS) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"the weights {name!r} are not finite, so the training diverged")
    if not any(name.startswith(NETWORKS[0]) for name in weights):
        raise ValueError("it contains no weights of a network")
    return dict(weights)


def _check_recipe(recipe: Mapping[str, Any]) -> type[Run]:
    """Returns the task of a stored recipe; raises ValueError for values that a recipe must not have."""
    _check_entries(GROUPS, recipe)
    check_names("task", [recipe["task"].get("name")], RUNS)
    run_class = RUNS[recipe["task"]["name"]]
    check_names("data", [recipe["data"].get("name")], run_class.sources)
    kinds = {"task": run_class.task_class, "data": run_class.sources[recipe["data"]["name"]]}
    for group, kind in (*kinds.items(), *SETTINGS.items()):
        settings = recipe.get(group) or {}
        with keys_of(group):
            check({"settings": dict}, {"settings": settings})
            settings = {key: value for key, value in settings.items() if group not in kinds or key != "name"}
            if group in kinds:
                check_names(f"setting of the {group}", settings, declared(kind))
            check(kind, settings)
    _check_needed(("ema_decay", *run_class.kept), recipe["task"])
    return run_class


def _preprocessing(run_class: type[Run], values: Mapping[str, Any]) -> Any:
    with keys_of("preprocessing"):
        run_class.check_preprocessing(values)
        _check_needed(required(run_class.preprocessing_class), values)
    preprocessing = run_class.preprocessing_class(**{key: as_tuple(value) for key, value in values.items()})
    lengths = {len(values[name]) for name in ("mean", "std") if name in values}
    lengths |= {values[name] for name in ("channels", "mels") if name in values}
    if len(lengths) > 1:
        raise ValueError("the lengths of its preprocessing's mean and std do not fit its channels")
    return preprocessing


def _check_entries(annotations: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ValueError for an entry that is missing or has a value that its annotation does not allow."""
    _check_needed(annotations, values)
    check(annotations, values)


def _check_needed(names: Iterable[str], values: Mapping[str, Any]) -> None:
    for name in names:
        if name not in values:
            raise ValueError(f"the entry {name!r} is missing")
