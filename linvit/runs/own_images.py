"""Writes a recipe for a folder of images, with values that suit the images, the model and the machine."""

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import yaml

from linvit.analysis.cost import Cost, count_cost
from linvit.data.images.folder import ImageFolder, Survey, survey
from linvit.data.images.image import SMALLEST
from linvit.data.source import fitting_workers
from linvit.environment import memory, using_threads
from linvit.errors import keys_of, refuse
from linvit.files import check_writable, user_path, write_text
from linvit.models.by_name import bundled_names, check_model, create_classifier, start_weights
from linvit.ranges import Count, Filled, Range, check
from linvit.runs.evaluate import recorded
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.runs.threads import fastest, measured
from linvit.tasks.initialization import initialize

STEP = 32  # pixels: these networks halve an image five times
GIB = 2**30
LARGEST_BATCH = {"cuda": 128, "cpu": 32}
STEPS_PER_EPOCH, FEWEST_IMAGES = 4, 8
MOST_WORKERS, FEW_IMAGES = 8, 500
CORRUPT_SHARE = 0.01
ARGUMENTS = {
    "path": Path,
    "model": str,
    "data": Annotated[Path, Filled()],
    "init": Path | None,
    "size": Annotated[int, Range(SMALLEST)] | None,
    "epochs": Count | None,
}
SHIPPED = "shipped"
LONG = 3600.0  # seconds
WORK = 3e9  # multiply-accumulates of the images that time a step
FORWARD = 1 / 3  # of a step's time: the pass forward
PATIENCE, FEWEST_EPOCHS = 300, 8  # seconds without a GPU into which the epochs from weights of linvit should fit
SHOWN_CLASSES = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewRecipe:
    """A new recipe: its file, a survey of the images, what was chosen for them, and seconds of an epoch on this CPU.

    init: the weights to start from, None for random ones. seconds: None where a GPU would train. usual: the
    epochs on a faster machine.
    """

    path: Path
    images: Survey
    size: int
    batch_size: int
    epochs: int
    init: str | None
    seconds: float | None
    usual: int

    def describe(self) -> str:
        """Images, size, batch, start and time in one line."""
        counts = self.images.counts
        start = f"from {self.init}" if self.init else "from random weights"
        epochs = f"{self.epochs} epochs" + (f" ({self.usual} on a faster machine)" if self.usual > self.epochs else "")
        words = (
            f"{len(counts)} classes, {sum(counts.values()):,} images to train on, {self.images.held_out:,} held out;"
            f" {self.size}×{self.size} px, {self.batch_size} images per batch; {epochs} {start}"
        )
        if self.seconds is None:
            return words
        whole = self.seconds * self.epochs
        less = "; a smaller size, fewer epochs or a nano network take less" if whole > LONG else ""
        return (
            f"{words}; an epoch takes about {_duration(self.seconds)} on this machine, all of them {_duration(whole)}"
            f"{less}"
        )


def _duration(seconds: float) -> str:
    for unit, length in {"h": 3600, "min": 60}.items():
        if seconds >= 1.5 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{max(1, seconds):.0f} s"


def new_recipe(
    path: str | Path,
    model: str,
    data: str | Path,
    init: str | Path | None = SHIPPED,
    *,
    size: int | None = None,
    epochs: int | None = None,
) -> NewRecipe:
    """Writes a commented recipe that trains a classifier on a folder of images; `train(path)` runs it.

    Without a GPU a step is timed, which takes some seconds.

    Args:
        path: the new .yaml file.
        model: a classifier that timm knows, ours included.
        data: a folder of class folders, some of whose images are then held out, or one with train/ and val/.
        init: weights to fine-tune: a run's folder, a checkpoint, a .pth or .safetensors file of this model, or the
            name of weights that come with linvit, such as mavit_nano.cifar10; "shipped" for those of this model, if it
            has any; None for random weights.
        size: side of the images in pixels, by default as the weights or the images suggest.
        epochs: by default 20 from weights, 100 without; from those that come with linvit fewer, 8 at the least, if 20
            would take more than five minutes without a GPU.
    """
    check(ARGUMENTS, {"path": path, "model": model, "data": data, "init": init, "size": size, "epochs": epochs})
    path, root = user_path(path), Path(_absolute(data))
    refuse(path.exists() and f"{path} exists already: choose another name, or remove that file.")
    check_model(model)
    if init == SHIPPED:
        init = next((name for name in bundled_names() if name.partition(".")[0] == model), None)
    weights = None if init is None else start_weights(init)
    config = timm.get_pretrained_cfg(model if weights == init else str(init))
    with keys_of("", (), root="`data`"):
        images = survey(ImageFolder(str(root)))
    count = sum(images.counts.values())
    refuse(
        config is None and f"The model {model!r} has no settings in timm: choose one that `linvit models` lists.",
        count < FEWEST_IMAGES
        and f"{root} has {count} images to train on, expected {FEWEST_IMAGES} or more: add images.",
    )
    assert config is not None
    if images.unreadable:
        facts = len(images.unreadable), images.sampled, images.unreadable[0]
        logger.warning("%d of the %d sampled images cannot be read: %s", *facts)
    start = None
    if weights is not None:
        initialize(create_classifier({"name": model}, len(images.counts), 3), weights)  # refuses those that do not fit
        start = recorded(str(weights)).get("preprocessing", {})
    inputs = _inputs(images, config.to_dict(), start, size)
    network = create_classifier({"name": model, "device": "meta"}, len(images.counts), 3)
    cost = count_cost(network, (3, inputs["size"], inputs["size"]))
    batch_size = _batch_size(cost, count)
    training = FROM_SCRATCH if init is None else FINE_TUNING if weights == init else SHIPPED_TUNING
    usual = epochs or int(training["epochs"])
    check_writable(path.parent)

    def write(number: int) -> None:
        write_text(path, _text(model, root, init, images, inputs, batch_size, {**training, "epochs": number}))

    write(usual)
    seconds = None if torch.cuda.is_available() else _epoch(path, cost, images)
    if epochs is None and seconds is not None and training is SHIPPED_TUNING:
        epochs = min(usual, max(FEWEST_EPOCHS, int(PATIENCE / seconds)))
        write(epochs)
    init = None if init is None else str(init)
    return NewRecipe(path, images, inputs["size"], batch_size, epochs or usual, init, seconds, usual)


def _epoch(path: Path, cost: Cost, survey: Survey) -> float:
    """Seconds of an epoch of the recipe on this CPU, from some images that are read and a step with them."""
    count = sum(survey.counts.values())
    batch = max(2, min(read_recipe(path)["data"]["batch_size"], int(WORK / (3 * (cost.macs + cost.macs_attention)))))
    overrides = {"data.batch_size": min(batch, count), "data.num_workers": 0}
    with _silence(), using_threads(1):  # the survey has said it; processes that read data have one thread
        task, source = Recipe(read_recipe(path, overrides)).build()
        batches = iter(source.train_dataloader())
        task.rehearse(next(batches))  # what is loaded for the first of each is not timed
        start = time.perf_counter()
        images = next(batches)
    read = (time.perf_counter() - start) / len(images[1])
    with using_threads(torch.get_num_threads()):
        seconds = measured(partial(task.rehearse, images), torch.get_num_threads())
    learnt = seconds[fastest(seconds)] / len(images[1])
    computing = learnt * (count + FORWARD * survey.held_out)
    reading = read * (count + survey.held_out)
    processes = min(1 + read_recipe(path)["data"]["num_workers"], _free_cores())
    return max(computing, (computing + reading) / processes)


@contextmanager
def _silence() -> Iterator[None]:
    """Without warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _free_cores() -> float:
    """The cores of this machine less those that were busy in the last minute, at least one."""
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    return max(1, (os.cpu_count() or 1) - busy)


def _absolute(path: str | Path) -> str:
    return os.path.abspath(user_path(path))


def _inputs(images: Survey, config: dict[str, Any], start: dict[str, Any] | None, given: int | None) -> dict[str, Any]:
    """Size and preparation of the images: as for the weights to start from, otherwise as the images suggest.

    given: the size, if the user gives one.
    """
    default_size = config["input_size"][-1]
    if start is not None:
        size = given or start.get("size", (default_size, default_size))[0]
        values = {key: start.get(key, config[key]) for key in ("mean", "std", "interpolation", "crop_pct")}
        return {"size": size, **values}
    fitting = max(SMALLEST, math.ceil(images.side / STEP) * STEP)
    size = given or (default_size if config.get("fixed_input_size") else min(default_size, fitting))
    crop_pct = config["crop_pct"] if images.side > size else 1.0
    return {
        "size": size,
        "mean": images.mean,
        "std": images.std,
        "interpolation": config["interpolation"],
        "crop_pct": crop_pct,
    }


def _batch_size(cost: Cost, count: int) -> int:
    """The largest power of two whose estimated memory is at most half of the machine's.

    Estimate: 0.1 GiB per billion multiply-accumulates per image, and four numbers per parameter (weight,
    gradient, two moments). At most LARGEST_BATCH, and a quarter of the images, so that an epoch has four steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    giga = (cost.macs + cost.macs_attention) / 1e9
    room = memory(device) / 2 - 16 * cost.parameters
    most = min(LARGEST_BATCH[device], count // STEPS_PER_EPOCH, room / (0.1 * GIB * giga))
    return 1 << int(math.log2(max(2, most)))


def _yaml(value: Any) -> str:
    """A value in YAML on one line; strings always in quotes, so that none is read as a number or ends the line."""
    if isinstance(value, str):
        return str(yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf)).strip()
    values = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(values, default_flow_style=True, width=math.inf)).removesuffix("...\n").strip()


def _text(
    model: str,
    root: Path,
    init: str | Path | None,
    images: Survey,
    inputs: dict[str, Any],
    batch_size: int,
    training: dict[str, Any],
) -> str:
    count = sum(images.counts.values())
    counts = [f"{_yaml(name)} {number}" for name, number in list(images.counts.items())[:SHOWN_CLASSES]]
    more = " …" if len(counts) < len(images.counts) else ""
    tuned = init is not None
    unreadable = max(CORRUPT_SHARE, 2 * len(images.unreadable) / images.sampled)
    values = {
        "model": _yaml(model),
        "root": _yaml(str(root)),
        "init": "null" if init is None else _yaml(_absolute(init) if start_weights(init) == init else str(init)),
        "classes": f"{len(images.counts)} classes, images to train on: {', '.join(counts)}{more}",
        "count": f"{count:,}",
        "held_out": f"{images.held_out:,}",
        "sampled": images.sampled,
        "side": images.side,
        "measured": f"mean {_yaml(images.mean)}, std {_yaml(images.std)}",
        "whose": "as those weights were trained" if tuned else "as measured",
        **{key: _yaml(value) for key, value in inputs.items()},
        "batch_size": batch_size,
        "max_corrupt": math.ceil(unreadable * count),
        "num_workers": 0 if count < FEW_IMAGES else fitting_workers(MOST_WORKERS),
        **training,
    }
    return TEMPLATE.format(**values)


FROM_SCRATCH: dict[str, Any] = {
    "what": "from random weights",
    "lr": "1.0e-3",
    "min_lr": "1.0e-5",
    "warmup": 5,
    "epochs": 100,
    "crop": "[0.2, 1.0]",
    "erasing": 0.25,
}
FINE_TUNING: dict[str, Any] = {
    "what": "from trained weights",
    "lr": "1.0e-4",
    "min_lr": "1.0e-6",
    "warmup": 2,
    "epochs": 20,
    "crop": "[0.35, 1.0]",
    "erasing": 0,
}
SHIPPED_TUNING = {**FINE_TUNING, "lr": "1.0e-3"}  # small networks learn little at a lower one
TEMPLATE = """\
# A classifier for a folder of images, {what}; written by `linvit new`, every value may be changed
# {classes}
# {count} images to train on, {held_out} held out; {sampled} measured: shorter side {side} px (median), {measured}
seed: 0
model: {{name: {model}}}
init: {init}  # what to start from: a run's folder, a checkpoint or a file of weights
task: {{name: classification, label_smoothing: 0.1, channels_last: true}}
optimizer: {{name: adamw, lr: {lr}, weight_decay: 0.05}}  # a lower lr if the loss jumps
schedule: {{warmup_epochs: {warmup}, min_lr: {min_lr}}}
data:
  name: imagefolder
  root: {root}
  held_out: 0.2  # share of each class to evaluate on, unless the folder has train/ and val/ ...
  split: 0  # ... and the seed that chooses it
  size: {size}  # px: larger is slower and often more accurate
  crop_pct: {crop_pct}
  interpolation: {interpolation}
  mean: {mean}  # of red, green and blue, {whose}
  std: {std}
  batch_size: {batch_size}  # halve it if memory runs out
  auto_augment: rand-m9-mstd0.5-inc1  # null for none
  crop_scale: {crop}  # share of the image that a random crop shows
  horizontal_flip: 0.5  # 0 if left and right differ, as in digits or text
  random_erasing: {erasing}
  max_corrupt: {max_corrupt}  # unreadable images that are left out; the run stops at one more
  num_workers: {num_workers}  # processes that read images
trainer: {{max_epochs: {epochs}}}
"""
