"""Loads a run: from its folder, a checkpoint, an exported file, a folder of the hub, or weights by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo, resolve_data_config
from timm.models import load_state_dict
from torch import nn
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from linvit.data.dense.ade20k import CLASSES as ADE20K_CLASSES
from linvit.data.dense.source import DensePreprocessing
from linvit.data.images.image import Preprocessing
from linvit.deploy.formats import FORMATS
from linvit.files import BEST, LAST, read_checkpoint, user_path
from linvit.models.by_name import bundled_names, bundled_weights, check_model
from linvit.models.dense.frameworks import SEGMENTORS
from linvit.ranges import check
from linvit.released import load_released
from linvit.runs.exported import run_of_file
from linvit.runs.run import Run
from linvit.runs.stored import NETWORKS, build_network, read_stored
from linvit.runs.tasks import TASKS

ARGUMENTS = {"path": Path | None, "model": str | None, "checkpoint": Path | None, "framework": str | None}
HUB_CONFIG, HUB_WEIGHTS = "config.json", "model.safetensors"


def load_run(
    path: str | Path | None = None,
    *,
    model: str | None = None,
    checkpoint: str | Path | None = None,
    framework: str | None = None,
    untrained: bool = False,
) -> Run:
    """Loads a run from its folder (best checkpoint) or a checkpoint, or a named model from a weight file.

    Args:
        path: a run's folder, one of its checkpoints, a file that `linvit export` wrote, or a classifier's folder with
            timm's config.json and model.safetensors, such as `linvit push` and `save_for_hf` write.
        model: a timm model name: with its tag one whose weights come with linvit, such as "mavit_nano.cifar10", or the
            architecture of a weight file that does not record it; with framework, the backbone.
        checkpoint: the weights of model: the authors' .pth, a converted .safetensors, or a file that timm can read.
        framework: mask_rcnn, upernet …: a released detector (COCO classes) or segmentor (ADE20K classes).
        untrained: give model random weights (seed 0), for analysis.

    Raises ValueError for a missing, damaged or foreign checkpoint, and for arguments that exclude each other.
    """
    check(ARGUMENTS, {"path": path, "model": model, "checkpoint": checkpoint, "framework": framework})
    if path is None and model is None:
        raise ValueError("Nothing to load: give a run's folder or a checkpoint, or both `model` and `checkpoint`.")
    if path is not None and model is not None:
        raise ValueError("Give either a run or `model` with `checkpoint`, not both.")
    if untrained and (path is not None or checkpoint is not None or framework is not None):
        raise ValueError(
            "`untrained=True` creates `model` with random weights: leave it out, or leave out the run, `checkpoint` and"
            " `framework`."
        )
    if framework is not None and model is None:
        raise ValueError(
            "`framework` needs `model`, the name of its backbone: add it, or leave `framework` out if you give a run."
        )
    if path is not None and Path(path).suffix in FORMATS:
        return run_of_file(user_path(path))
    if path is not None and _is_hub_folder(user_path(path)):
        from linvit.runs.hub_folder import run_of_folder

        return run_of_folder(user_path(path))
    if model is None:
        return _from_checkpoint(_checkpoint_of(user_path(path)))  # type: ignore[arg-type]
    check_model(model)
    if untrained:
        return _untrained(model)
    bundled = bundled_weights(model)
    if checkpoint is None and framework is None and bundled is not None:
        return of_classifier(model, timm.create_model(model, pretrained=True), bundled)
    if checkpoint is None:
        names = bundled_names()
        come = f"only {', '.join(names)} come" if names else "no network comes"
        raise ValueError(
            f"`model` needs `checkpoint`, its file of weights: {come} with weights, and none are downloaded here."
            " Give the authors' file or one saved from timm (docs/use/timm.md), or a run of `linvit train`."
        )
    if framework is not None:
        return _from_dense_weights(framework, model, user_path(checkpoint))
    return _from_weights(model, user_path(checkpoint))


def _is_hub_folder(path: Path) -> bool:
    return path.is_dir() and all((path / name).is_file() for name in (HUB_CONFIG, HUB_WEIGHTS))


def _checkpoint_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (BEST, LAST):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    hub = f", and {HUB_CONFIG} without {HUB_WEIGHTS}" if (path / HUB_CONFIG).is_file() else ""
    raise ValueError(
        f"The folder {path} has no checkpoints/{BEST} or {LAST}{hub}: give the folder of a trained run, or one with"
        f" {HUB_CONFIG} and {HUB_WEIGHTS}."
    )


def _from_checkpoint(path: Path) -> Run:
    stored = read_stored(path)
    spec, model, preprocessing = stored.spec, stored.model, stored.preprocessing
    channels = getattr(preprocessing, "channels", 3)
    tensors = sum(name.startswith(NETWORKS[0]) for name in stored.weights)
    network = build_network(lambda: spec.network(model, stored.num_classes, channels), path, model, tensors)
    kept = {key: stored.recipe["task"][key] for key in ("ema_decay", *spec.kept)}
    task = spec.around(network, stored.num_classes, channels, **kept)
    name = spec.title(model, network)
    try:
        task.load_state_dict(stored.weights)
    except RuntimeError as error:
        raise ValueError(
            f"The weights in {path} do not fit the model {name!r} that it names: the file is damaged, or was written by"
            " a version in which that model was another."
        ) from error
    return Run(spec, task, stored.class_names, preprocessing, path, name, stored.recipe, stored.facts)


def _from_weights(model: str, path: Path) -> Run:
    """Weights of a named model: for linvit's the authors' or converted ones, for timm's any file that timm reads."""
    shapes = timm.create_model(model, device="meta")
    content = read_checkpoint(path)
    native = getattr(shapes, "native_state_dict", None)
    ours = callable(native)
    weights = native(content) if callable(native) else load_state_dict(str(path), weights_only=True)
    classifier = cast(Mapping[str, Any], shapes.pretrained_cfg).get("classifier")
    key = f"{classifier if isinstance(classifier, str) else (classifier or ('head',))[0]}.weight"
    network = timm.create_model(
        model, num_classes=len(weights[key]) if key in weights else cast(int, shapes.num_classes)
    )
    if ours:
        load_released(network, path)
    else:
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"The weights in {path} do not fit the model {model!r}: {reason} …") from error
    return of_classifier(model, network, path)


def _untrained(model: str) -> Run:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return of_classifier(model, timm.create_model(model), None)


def of_classifier(model: str, network: nn.Module, path: Path | None = None) -> Run:
    """A run around a timm network, with the class names and preprocessing that timm knows."""
    count = cast(int, network.num_classes)
    config = resolve_data_config(model=network)
    preprocessing = Preprocessing(
        tuple(config["input_size"][1:]),
        tuple(config["mean"]),
        tuple(config["std"]),
        config["interpolation"],
        config["crop_pct"],
    )
    names = list(cast(Mapping[str, Any], network.pretrained_cfg).get("label_names", ()))
    if len(names) != count:
        imagenet = ImageNetInfo("imagenet-1k")
        names = [imagenet.index_to_description(index) if count == 1000 else str(index) for index in range(count)]
    spec = TASKS["classification"]
    task = spec.around(network, max(1, count), preprocessing.channels)
    return Run(spec, task, names, preprocessing, path, model)


def _from_dense_weights(framework: str, backbone: str, path: Path) -> Run:
    model = {"framework": framework, "backbone": backbone}
    stored: dict[str, Any] = {}
    if framework in SEGMENTORS:
        spec, sides = TASKS["segmentation"], (2048, 512)
        names = [str(number) for number in range(1, ADE20K_CLASSES + 1)]
    else:
        spec, sides = TASKS["detection"], (1333, 800)
        # torchvision's weights name the 80 categories of COCO by their ids, among numbers without a category
        coco = enumerate(MaskRCNN_ResNet50_FPN_Weights.DEFAULT.meta["categories"])
        categories = {number: name for number, name in coco if number and name != "N/A"}
        names, stored = list(categories.values()), {"category_ids": list(categories)}
    task = spec.build(model, len(names))
    load_released(task.network, path)
    preprocessing = DensePreprocessing(*sides, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return Run(spec, task, names, preprocessing, path, spec.title(model, task.network), stored=stored)
