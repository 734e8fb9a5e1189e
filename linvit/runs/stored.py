"""Runs from what is stored: a checkpoint, an exported file or a folder of the hub, each checked before it is used."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import constants as hub
from lightning.pytorch import Trainer
from timm.models._hub import load_model_config_from_path
from torch import Tensor, nn

from linvit.data.dense.source import DensePreprocessing
from linvit.data.disk import read_json
from linvit.data.images.image import Preprocessing
from linvit.deploy.facts import BACKBONE, DETECTIONS, FactsError, SequenceFacts
from linvit.deploy.formats import opened
from linvit.deploy.runtimes import Session
from linvit.deploy.sequences import cache_of, zeros
from linvit.errors import SettingError, refuse
from linvit.files import BEST, LAST, explained, read_checkpoint, reason_of
from linvit.models.by_name import create_classifier
from linvit.ranges import (
    Amount,
    Count,
    OneOf,
    allows,
    arguments,
    check,
    check_entries,
    check_names,
    declared,
    lookup,
    plain,
)
from linvit.runs.exported import (
    ExportedConformer,
    ExportedDecoder,
    ExportedDetector,
    ExportedNetwork,
    ExportedRegionDetector,
)
from linvit.runs.exporting import EXPORTED
from linvit.runs.hub import HUB_CONFIG, HUB_WEIGHTS
from linvit.runs.recipe import SETTINGS
from linvit.runs.run import Run
from linvit.runs.tasks import RUNS
from linvit.runs.tasks.classification import ClassificationRun
from linvit.runs.trained import classifier_parts
from linvit.runs.trainer import RANGES

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
    """The run of a checkpoint, or of the best or else the last one in the folder of a run.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it was not written by `linvit train`, or an entry is missing or has a wrong value.
    """
    if path.is_dir():
        checkpoints = [path / "checkpoints" / name for name in (BEST, LAST) if (path / "checkpoints" / name).is_file()]
        if not checkpoints:
            beside = f", and {HUB_CONFIG} without {HUB_WEIGHTS}" if (path / HUB_CONFIG).is_file() else ""
            raise ValueError(
                f"The folder {path} has no checkpoints/{BEST} or {LAST}{beside}: give the folder of a trained run, or"
                f" one with {HUB_CONFIG} and {HUB_WEIGHTS}."
            )
        path = checkpoints[0]
    run_class, about, preprocessing, weights = _checked(path, read_checkpoint(path))
    recipe, count = about["recipe"], about["num_classes"]
    model = {key: value for key, value in recipe["model"].items() if key != "checkpoint_path"}  # where training started
    channels, tensors = getattr(preprocessing, "channels", 3), sum(name.startswith(NETWORKS[0]) for name in weights)
    network = build_network(lambda: run_class.create_network(model, count, channels), path, model, tensors)
    kept = {key: recipe["task"][key] for key in ("ema_decay", *run_class.kept)}
    task = run_class.create_task(network, count, channels, **kept)
    name = run_class.title(model, network)
    misfits = (
        f"The weights in {path} do not fit the model {name!r} that it names: the file is damaged, or was written by a"
        " version in which that model was another."
    )
    with explained(misfits, RuntimeError):
        task.load_state_dict(weights)
    facts = {name: about[name] for name in run_class.stored_facts if name in about}
    return run_class(task, about["class_names"], preprocessing, path, name, recipe, facts)


def run_of_hub_folder(folder: Path) -> Run:
    """The run of a folder as on the Hugging Face hub, also of one that timm's `save_for_hf` wrote; it has no recipe."""
    config, path = folder / HUB_CONFIG, folder / HUB_WEIGHTS
    weights = read_checkpoint(path)
    content = read_json(config)
    with refused(config):
        content = plain(content)
    try:
        cfg, name, arguments = load_model_config_from_path(folder)
        model = {"name": name, **arguments}
        preprocessing = Preprocessing(tuple(cfg["input_size"][1:]), tuple(cfg["mean"]), tuple(cfg["std"]))
        build = partial(create_classifier, model | {"pretrained_cfg": cfg}, cfg["num_classes"], preprocessing.channels)
        network = build_network(build, path, model, len(weights))
        network.load_state_dict(weights)
        run = ClassificationRun(*classifier_parts(network), path, name)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{config} does not describe a classifier of timm with the weights next to it"
            f" ({type(error).__name__}: {reason_of(error)}): use another copy."
        ) from error
    with refused(config):
        run.check_preprocessing(asdict(run.preprocessing))
        check({"label_names": list[str]}, {"label_names": run.class_names})
    return run


def run_of_file(path: Path) -> Run:
    """A run around an exported file, which predicts and evaluates in its runtime; raises as `opened`."""
    facts, session = opened(path)
    if isinstance(facts, SequenceFacts):
        return _run_of_sequences(path, facts, session)
    if facts.task == BACKBONE:
        raise ValueError(
            f"{path} is the backbone {facts.name}, which has maps and predicts nothing: give the file of a run, or open"
            " it with `linvit.deploy.formats.opened`."
        )
    run, damaged = RUNS[facts.task] if facts.task in EXPORTED.values() else Run, None
    cropped = run is not Run and run.preprocessing_class is Preprocessing
    lengths = {len(value) for value in facts.stored.values() if isinstance(value, list)}
    if run is Run or cropped != (facts.fit is None):
        damaged = f"task {facts.task!r}"
    elif not all(allows(run.stored_facts.get(name), value) for name, value in facts.stored.items()) or lengths - {
        len(facts.class_names)
    }:
        damaged = "data"
    if damaged is not None:
        raise FactsError(f"What {path} says about its {damaged} is damaged: export it again.")
    network_class = ExportedNetwork
    if facts.task == "detection":
        network_class = ExportedRegionDetector if facts.outputs == DETECTIONS else ExportedDetector
    network = network_class(path, facts, session)
    preprocessing: Any = Preprocessing(facts.size, facts.mean, facts.std, facts.interpolation, facts.crop_pct)
    if facts.fit is not None:
        preprocessing = DensePreprocessing(*facts.fit, facts.mean, facts.std)
    task = run.create_task(network, len(facts.class_names), facts.channels)
    return run(task, list(facts.class_names), preprocessing, path, facts.name, stored=dict(facts.stored))


def _run_of_sequences(path: Path, facts: SequenceFacts, session: Session) -> Run:
    """A run around the file of a decoder or Conformer."""
    run = RUNS[facts.task]
    if "corpus" not in facts.preprocessing:
        raise ValueError(
            f"{path} does not say how its {facts.inputs[0]} are made, because its network has no run of language or"
            " speech: open it with `linvit.deploy.formats.opened`."
        )
    with explained(
        lambda reason: f"What {path} says about its preprocessing and states is damaged ({reason}): export it again.",
        (KeyError, TypeError, ValueError, RuntimeError),
        FactsError,
    ):
        stored = {field.name: facts.preprocessing[field.name] for field in fields(run.preprocessing_class)}
        preprocessing = run.create_preprocessing(stored)
        cache_of(zeros(facts.states, 1))
        names = len(facts.class_names)
        refuse(names not in (0, facts.logits) and f"{names} names for {facts.logits} logits")
    network = ExportedDecoder if facts.task == "language" else ExportedConformer
    task = run.create_task(network(path, facts, session), facts.logits)
    return run(task, list(facts.class_names), preprocessing, path, facts.name)


def read_resumable(path: str | Path) -> dict[str, Any]:
    """The recipe of a checkpoint to continue a training from; all of it is checked. Raises as `run_of_checkpoint`."""
    content = read_checkpoint(path)
    _, facts, _, weights = _checked(Path(path), content)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    with refused(Path(path)):
        check_entries(PROGRESS, content)
        with explained(lambda reason: f"its record of the training does not fit ({reason})"):
            for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
                getattr(trainer, name).load_state_dict(content["loops"][name])
        sizes = {weight.numel() for weight in weights.values()}
        for state in content["optimizer_states"]:
            check_entries(OPTIMIZER, state)
            plain(state["param_groups"])
            moments = [entry[name] for entry in state["state"].values() for name in MOMENTS & entry.keys()]
            if not all(isinstance(moment, Tensor) and moment.numel() in sizes for moment in moments):
                raise ValueError("the state of the optimizer fits no parameter")
    return dict(facts["recipe"])


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
        check_entries({"linvit": dict, "state_dict": dict}, content)
        weights: dict[str, Tensor] = dict(content["state_dict"])
        for name, tensor in weights.items():
            dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
            if not isinstance(name, str) or not dense or tensor.is_quantized:
                raise ValueError(f"the entry {str(name)[:60]!r} of the weights is not a dense tensor")
            if name.startswith(NETWORKS) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"the weights {name!r} are not finite, so the training diverged")
        if not any(name.startswith(NETWORKS[0]) for name in weights):
            raise ValueError("it contains no weights of a network")

        about = plain(content["linvit"])
        check_entries(ABOUT, about)
        recipe, count = about["recipe"], about["num_classes"]
        check_entries({"task": dict, "model": dict, "data": dict}, recipe)
        check(dict.fromkeys(SETTINGS, dict | None), recipe)
        groups = {name: dict(recipe.get(name) or {}) for name in ("task", "data", *SETTINGS)}
        run_class = lookup("task.name", groups["task"].pop("name", None), RUNS)
        source_class = lookup("data.name", groups["data"].pop("name", None), run_class.sources)
        for name, declaring in {"task": run_class.task_class, "data": source_class, **SETTINGS}.items():
            if name not in SETTINGS:
                check_names(f"setting of the {name}", groups[name], declared(declaring))
            check(declaring, groups[name], name)
        trainer = recipe.get("trainer", {})
        check({"trainer": dict}, {"trainer": trainer})
        check({"threads": RANGES["threads"]}, {"threads": trainer.get("threads")}, "trainer")
        check_entries({"ema_decay": Any}, recipe["task"])
        settings = arguments(run_class.task_class)  # those newer than the run had their defaults then
        kept = {name: recipe["task"].setdefault(name, settings[name].default) for name in run_class.kept}
        _check_numbers(kept, path.stat().st_size, len(weights))

        facts = {name: value for name, value in about.items() if name not in ABOUT}
        check_names("entry", facts, run_class.stored_facts)
        check(run_class.stored_facts, facts)
        if run_class.learns_classes:
            check({"num_classes": Count}, about)
        numbers = {"class names": len(about["class_names"])}
        numbers["category ids"] = len(facts.get("category_ids", about["class_names"]))
        for what, number in numbers.items():
            if number != (count if run_class.names_classes else 0):
                raise ValueError(f"it has {count} classes, but {number} {what}")
        return run_class, about, run_class.create_preprocessing(about["preprocessing"]), weights
