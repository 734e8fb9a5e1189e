"""From a run, a checkpoint, or released weights back to networks that can be measured and asked."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo, resolve_data_config
from torch import nn
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from linvit.data import (
    DensePreprocessing,
    GenerationPreprocessing,
    ImageFolder,
    Preprocessing,
    RecallPreprocessing,
    Source,
    SpeechFolder,
    SpeechPreprocessing,
    TextFolder,
    TextPreprocessing,
    as_tuple,
    create_source,
)
from linvit.data.dense.ade20k import CLASSES as ADE20K_CLASSES
from linvit.files import read_checkpoint
from linvit.models.by_name import check_model
from linvit.models.dense.frameworks import SEGMENTORS
from linvit.released import load_released
from linvit.runs.build import TASKS
from linvit.tasks import Classification, Detection, Diffusion, Language, Speech, Task
from linvit.tasks.checkpoints import BEST, LAST

PREFERRED = (BEST, LAST)
IMAGENET = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
PREPARES = {
    "classification": Preprocessing,
    "detection": DensePreprocessing,
    "segmentation": DensePreprocessing,
    "language": TextPreprocessing,
    "recall": RecallPreprocessing,
    "diffusion": GenerationPreprocessing,
    "speech": SpeechPreprocessing,
}
MEASURING = {  # what the measures of a task depend on
    "diffusion": ("draws", "sampler", "steps", "clips"),
    "speech": ("beam",),
}


@dataclass
class Restored:
    """A task with its weights, the names of its classes, its input, and the data it was trained on.

    Of detectors and segmentors, name says framework and backbone; of detectors, category_ids the number of each class
    in files in COCO's format.
    """

    task: Task
    class_names: list[str]
    preprocessing: (
        Preprocessing
        | DensePreprocessing
        | TextPreprocessing
        | RecallPreprocessing
        | GenerationPreprocessing
        | SpeechPreprocessing
    )
    data: dict[str, Any] | None
    path: Path
    name: str | None = None
    category_ids: list[int] | None = None

    @property
    def folder(self) -> Path:
        """The run's folder; that of the checkpoint where it stands elsewhere."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else self.path.parent

    @property
    def judged(self) -> nn.Module:
        """The network that pages are about: the moving average where there is one."""
        return list(self.task.networks().values())[-1]

    @property
    def weights(self) -> str:
        """What the weights of that network are."""
        return "moving average" if "ema" in self.task.networks() else "raw weights"

    @property
    def title(self) -> str:
        """The network's architecture, else its name, else the name of its file."""
        return getattr(self.task.network, "pretrained_cfg", {}).get("architecture") or self.name or self.path.stem

    def told(self, *facts: str) -> str:
        """Two sentences on that network: its parameters, these facts, its file; and which weights they are."""
        parameters = f"{sum(parameter.numel() for parameter in self.judged.parameters()):,} parameters"
        about = ", ".join((self.title, parameters, *facts, f"weights from {self.path}"))
        return f"{about}. Everything below is about the {self.weights}."

    @property
    def dense(self) -> bool:
        """Whether this is a detector or segmentor."""
        return isinstance(self.preprocessing, DensePreprocessing)

    @property
    def sequence(self) -> bool:
        """Whether this is a decoder, of text or of anything else in tokens."""
        return isinstance(self.task, Language)

    @property
    def drawing(self) -> bool:
        """Whether this draws images."""
        return isinstance(self.task, Diffusion)

    @property
    def hearing(self) -> bool:
        """Whether this writes what is said."""
        return isinstance(self.task, Speech)


def restore(
    run: str | Path | None,
    model: str | None = None,
    checkpoint: str | Path | None = None,
    framework: str | None = None,
) -> Restored:
    """Rebuilds a run from its folder (best checkpoint) or checkpoint, or a named model from a file of weights.

    With framework, model is the backbone of a released detector of COCO's or segmentor of ADE20K's classes.

    Raises ValueError with one sentence for a missing, damaged or foreign checkpoint.
    """
    if run is None and model is None:
        raise ValueError("Nothing to read: give a run's folder or a checkpoint, or both --model and --checkpoint.")
    if run is not None and model is not None:
        raise ValueError("Two networks to read: give either a run or checkpoint, or --model with --checkpoint.")
    if framework is not None and model is None:
        raise ValueError("--framework needs --model, the backbone: a run names its own framework, so leave it out.")
    if model is None:
        return _from_run(_checkpoint_path(Path(run)))  # type: ignore[arg-type]
    if checkpoint is None:
        raise ValueError("--model needs --checkpoint: the file of weights, released or converted.")
    return (
        _from_dense_weights(framework, model, Path(checkpoint)) if framework else _from_weights(model, Path(checkpoint))
    )


def _checkpoint_path(run: Path) -> Path:
    if not run.is_dir():
        return run
    found = [run / "checkpoints" / name for name in PREFERRED if (run / "checkpoints" / name).is_file()]
    if not found:
        raise ValueError(
            f"The folder {run} has no checkpoints/{BEST} or {LAST} in it: give the folder of a finished run."
        )
    return found[0]


def _from_run(path: Path) -> Restored:
    content = read_checkpoint(path)
    if "linvit" not in content:
        raise ValueError(
            f"The checkpoint {path} does not say which model it belongs to, as those of `linvit train` do:"
            " name it with --model NAME --checkpoint FILE."
        )
    about = content["linvit"]
    recipe = about["recipe"]
    name = recipe["task"]["name"]
    preprocessing = PREPARES[name](**{key: as_tuple(value) for key, value in about["preprocessing"].items()})
    model = {key: value for key, value in recipe["model"].items() if key not in ("pretrained", "checkpoint_path")}
    channels = {"channels": preprocessing.channels} if name == "classification" else {}
    count = len(about["class_names"]) or _vocabulary(content["state_dict"])
    measuring = {key: recipe["task"][key] for key in MEASURING.get(name, ())}
    task = TASKS[name](model, count, ema_decay=recipe["task"]["ema_decay"], **channels, **measuring)
    try:
        task.load_state_dict(content["state_dict"])
    except (RuntimeError, KeyError) as error:
        raise ValueError(
            f"The weights in {path} do not fit the model {model.get('name') or model['framework']!r} that it names: the"
            " file is damaged, or was written by a version in which that model was another."
        ) from error
    names = about["class_names"]
    category_ids = about.get("category_ids") or list(range(1, len(names) + 1))
    told = None if name == "classification" else _name(model, task.network)
    restored = Restored(task, names, preprocessing, recipe["data"], path, told)
    return replace(restored, category_ids=category_ids) if name == "detection" else restored


def _vocabulary(weights: dict[str, Any]) -> int:
    """How many tokens the decoder in a checkpoint knows; 0 where it holds none, which its task refuses."""
    return len(weights.get("network.embed.weight", ()))


def _from_dense_weights(framework: str, backbone: str, path: Path) -> Restored:
    check_model(backbone)
    model = {"framework": framework, "backbone": backbone}
    if framework in SEGMENTORS:
        names = [str(number) for number in range(1, ADE20K_CLASSES + 1)]
        task: Task = TASKS["segmentation"](model, len(names))
        about = DensePreprocessing(2048, 512, *IMAGENET)
        restored = Restored(task, names, about, None, path, _name(model, task.network))
    else:
        categories = _coco_categories()
        task = TASKS["detection"](model, len(categories))
        about = DensePreprocessing(1333, 800, *IMAGENET)
        names = list(categories.values())
        restored = Restored(task, names, about, None, path, _name(model, task.network), list(categories))
    load_released(task.network, path)
    return restored


def _name(model: dict[str, Any], network: nn.Module) -> str:
    """How a network is called: framework and backbone, or name and mechanism."""
    if "framework" in model:
        return f"{model['framework']} on {model['backbone']}"
    return f"{model['name']}, {network.mechanism}"


def _coco_categories() -> dict[int, str]:
    """The 80 categories by their ids; torchvision's weights name them, among numbers without a category."""
    names = MaskRCNN_ResNet50_FPN_Weights.DEFAULT.meta["categories"]
    return {number: name for number, name in enumerate(names) if number and name != "N/A"}


def _from_weights(model: str, path: Path) -> Restored:
    count = _classes_in(path, model)
    task = Classification({"name": model}, count)
    load_released(task.network, path)
    config = resolve_data_config(model=task.network)
    preprocessing = Preprocessing(
        tuple(config["input_size"][1:]), config["mean"], config["std"], config["interpolation"], config["crop_pct"]
    )
    return Restored(task, _default_names(count), preprocessing, None, path)


def _classes_in(path: Path, model: str) -> int:
    """How many classes the classifier in the file has; what the model has by default where it holds none."""
    check_model(model)
    shapes = timm.create_model(model, device="meta")
    if not hasattr(shapes, "native_state_dict"):
        raise ValueError(f"--checkpoint reads the models of `linvit models`, and {model!r} is none of them.")
    classifier = shapes.pretrained_cfg["classifier"]
    key = f"{classifier if isinstance(classifier, str) else classifier[0]}.weight"
    weights = shapes.native_state_dict(read_checkpoint(path))
    return len(weights[key]) if key in weights else shapes.num_classes


def _default_names(count: int) -> list[str]:
    if count == 1000:
        names = ImageNetInfo("imagenet-1k")
        return [names.index_to_description(index) for index in range(count)]
    return [str(index) for index in range(count)]


def source_for(restored: Restored, data: str | None, num_workers: int | None = None) -> Source:
    """The data to measure on: that of the run, `digits`, or a folder of images with the run's preprocessing.

    For a detector or segmentor the folder is one in the layout of COCO or ADE20K, for a language model one of .txt
    files, or `stdlib`, for speech one of LibriSpeech's parts.

    Raises ValueError where there is none, and where its classes are not the network's.
    """
    if data is None and restored.data is None:
        raise ValueError("The checkpoint names no data: say on what to measure with --data digits or --data FOLDER.")
    if restored.sequence:
        source = _sequence_source(restored, data)
    elif restored.hearing:
        source = _spoken_source(restored, data)
    elif restored.drawing:
        source = _drawn_source(restored, data)
    elif isinstance(restored.preprocessing, DensePreprocessing):
        source = _dense_source(restored, data)
    else:
        source = _classified_source(restored, data)
    if num_workers is not None:
        source.num_workers = num_workers
    return source


def _dense_source(restored: Restored, data: str | None) -> Source:
    settings = {"name": "coco" if isinstance(restored.task, Detection) else "ade20k"} | (restored.data or {})
    return create_source(**settings | {"class_names": restored.class_names} | ({"root": data} if data else {}))


def _drawn_source(restored: Restored, data: str | None) -> Source:
    settings = restored.data or {}
    if data is not None and "root" not in settings:
        raise ValueError("--data is a folder, but this run draws the digits it was trained on: leave it out.")
    return create_source(**settings | ({"root": data} if data else {}))


def _spoken_source(restored: Restored, data: str | None) -> Source:
    if data is not None:
        return SpeechFolder(data, restored.class_names, restored.preprocessing)  # type: ignore[arg-type]
    source = create_source(**restored.data or {})
    source.class_names, source.preprocessing = restored.class_names, restored.preprocessing
    return source


def _sequence_source(restored: Restored, data: str | None) -> Source:
    preprocessing = restored.preprocessing
    if data is None:
        return create_source(**restored.data or {})
    if not isinstance(preprocessing, TextPreprocessing):
        raise ValueError("--data is for text, images and the like, but this run's sequences are drawn: leave it out.")
    read = {key: getattr(preprocessing, key) for key in ("tokenizer", "separator", "context")}
    held = restored.data or {}
    read |= {key: held[key] for key in ("keeps_apart",) if key in held}
    if data == "stdlib":
        return create_source(data, **read)
    read |= {key: held[key] for key in ("suffixes",) if key in held}
    return TextFolder(data, held_out=1.0, **read)


def _classified_source(restored: Restored, data: str | None) -> Source:
    if data is None:
        source = create_source(**restored.data or {})
    elif data == "digits":
        shown = restored.preprocessing
        source = create_source(data, size=shown.size[0], channels=shown.channels)
    else:
        source = ImageFolder(data)
    _match_classes(source, restored)
    source.preprocessing = restored.preprocessing
    return source


def _match_classes(source: Source, restored: Restored) -> None:
    """Reads a folder's classes in the network's order; for released weights, sorted folders are the class indices.

    Folders named by numbers (ImageNet-V2) that are no class names of the network are its class indices.
    """
    ours, theirs = restored.class_names, source.class_names
    numbered = all(name.isdecimal() and int(name) < len(ours) for name in theirs)
    if numbered and (restored.data is None or not set(theirs) <= set(ours)):
        named = {int(name): name for name in theirs}
        source.class_names = [named.get(index, str(index)) for index in range(len(ours))]
        return
    if restored.data is None:
        if len(ours) != len(theirs):
            raise ValueError(
                f"The data has {len(theirs)} classes, but the network has {len(ours)}: measure on the data it is for."
            )
        return
    strangers = [name for name in theirs if name not in ours]
    if strangers:
        raise ValueError(
            f"The data has the class {strangers[0]!r}, but the network knows {', '.join(ours[:5])}"
            f"{' …' if len(ours) > 5 else ''}: measure on the data it is for."
        )
    source.class_names = ours
