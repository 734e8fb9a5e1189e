"""Loads a run: from its folder, a checkpoint, an exported file, a folder of the hub, or weights by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import load_state_dict
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from linvit.data.dense.label_maps import ADE20K_CLASSES
from linvit.data.dense.source import DensePreprocessing
from linvit.deploy.formats import FORMATS
from linvit.errors import SettingError, refuse
from linvit.files import read_checkpoint, user_path
from linvit.models.by_name import bundled_names, bundled_weights, check_model
from linvit.models.dense.frameworks import SEGMENTORS
from linvit.ranges import check, nearest
from linvit.released import load_released
from linvit.runs.hub import HUB_CONFIG, HUB_WEIGHTS
from linvit.runs.run import Run
from linvit.runs.stored import run_of_checkpoint, run_of_file, run_of_hub_folder
from linvit.runs.tasks.classification import ClassificationRun
from linvit.runs.tasks.detection import DetectionRun
from linvit.runs.tasks.segmentation import SegmentationRun
from linvit.runs.trained import classifier_parts

ARGUMENTS = {"path": Path | None, "model": str | None, "checkpoint": Path | None, "framework": str | None}


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
    """
    check(ARGUMENTS, {"path": path, "model": model, "checkpoint": checkpoint, "framework": framework})
    of_model = {"checkpoint": checkpoint, "framework": framework, "untrained": untrained}
    alone = next((name for name, value in of_model.items() if value and model is None), None)
    refuse(
        path is not None and model is not None and "Give either a run or `model` with `checkpoint`, not both.",
        path is None
        and model is None
        and "Nothing to load: give a run's folder or a checkpoint, or both `model` and `checkpoint`.",
        alone is not None and f"`{alone}` needs `model`, but a run is given: leave `{alone}` out.",
    )
    if path is None:
        return _named_model(str(model), checkpoint, framework, untrained)
    path = user_path(path)
    if not path.exists():
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"No run or checkpoint was found at {path}: pass a run's folder or a checkpoint file."
            f"{nearest(path.name, beside)}"
        )
    on_hub = path.is_dir() and (path / HUB_CONFIG).is_file() and (path / HUB_WEIGHTS).is_file()
    read = run_of_file if path.suffix in FORMATS else run_of_hub_folder if on_hub else run_of_checkpoint
    return read(path)


def _named_model(model: str, checkpoint: str | Path | None, framework: str | None, untrained: bool) -> Run:
    """A network by its name in timm, with weights from a file, those that come with linvit, or random ones."""
    check_model(model)
    if untrained:
        if checkpoint is not None or framework is not None:
            raise SettingError(
                "`untrained=True` creates `model` with random weights: leave it out, or leave out `checkpoint` and"
                " `framework`."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ClassificationRun(*classifier_parts(timm.create_model(model)), None, model)
    bundled = bundled_weights(model)
    if checkpoint is None and framework is None and bundled is not None:
        return ClassificationRun(*classifier_parts(timm.create_model(model, pretrained=True)), bundled, model)
    if checkpoint is None:
        names = bundled_names()
        come = f"only {', '.join(names)} come" if names else "no network comes"
        raise SettingError(
            f"`model` needs `checkpoint`, its file of weights: {come} with weights, and none are downloaded here."
            " Give the authors' file or one saved from timm (the page From timm of the documentation), or a run of"
            " `linvit train`."
        )
    if framework is not None:
        return _from_dense_weights(framework, model, user_path(checkpoint))
    return _from_weights(model, user_path(checkpoint))


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
    return ClassificationRun(*classifier_parts(network), path, model)


def _from_dense_weights(framework: str, backbone: str, path: Path) -> Run:
    """The authors' weights of a detector (COCO classes) or segmentor (ADE20K classes)."""
    run: type[Run] = SegmentationRun
    sides, stored = (2048, 512), dict[str, Any]()
    names = [str(number) for number in range(1, ADE20K_CLASSES + 1)]
    if framework not in SEGMENTORS:
        run, sides = DetectionRun, (1333, 800)
        # torchvision's weights name the 80 categories of COCO by their ids, among numbers without a category
        coco = enumerate(MaskRCNN_ResNet50_FPN_Weights.DEFAULT.meta["categories"])
        categories = {number: name for number, name in coco if number and name != "N/A"}
        names, stored = list(categories.values()), {"category_ids": list(categories)}
    model = {"framework": framework, "backbone": backbone}
    network = run.create_network(model, len(names), 3)
    task = run.create_task(network, len(names))
    load_released(network, path)
    preprocessing = DensePreprocessing(*sides, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return run(task, names, preprocessing, path, run.title(model, network), stored=stored)
