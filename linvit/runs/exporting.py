"""Runs as files of other runtimes, and such files as runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from linvit.data.images.image import Preprocessing, Side
from linvit.deploy import Exported, write
from linvit.deploy.facts import Facts, digest
from linvit.deploy.formats import format_of, opened
from linvit.files import user_path
from linvit.ranges import check
from linvit.runs.images import find_images, photos, read_image
from linvit.runs.run import Run, of_classifier
from linvit.runs.tasks import TASKS

CHECKED = (1.0, 1.25, 0.75)  # the sizes to compare at, over the network's own
ARGUMENTS = {"size": Side | tuple[Side, Side] | None, "dynamic": bool | None}
MOST = 16  # images to compare on
EXPORTED = ("classification", "multilabel")


def export(
    source: Run | nn.Module,
    path: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    dynamic: bool | None = None,
    images: Sequence[Any] | None = None,
) -> Exported:
    """Writes a classifier to a file of another runtime, runs it there and compares it with the network in float32.

    The file reads uint8 images (batch, channels, height, width), RGB or grey, normalizes them itself and returns logits
    (batch, classes). It contains class names, sizes and preprocessing as JSON.

    Args:
        source: a run, or a timm network.
        path: .onnx, .xml (OpenVINO, with the weights next to it as .bin), .pt2 (torch.export) or .pte (ExecuTorch).
        size: height and width in pixels (default: that of the run's preprocessing).
        dynamic: whether the file reads any batch, height and width; otherwise one image of that size (default: yes,
            but not for .pte, and for .pt2 only from 64 px).
        images: image files, folders, PIL images or arrays to compare on (default: two photos).

    Returns:
        The file's path and the largest difference.

    Raises:
        ImportError: if the runtime is missing; the message names the extra of linvit that installs it.
        ValueError: for a run of another task, another suffix, a network that cannot be exported, no readable image, and
            a file whose outputs differ from the network's; nothing is left behind then.
    """
    check(ARGUMENTS, {"size": size, "dynamic": dynamic})
    run = source if isinstance(source, Run) else of_classifier(_name(source), source)
    if run.spec.name not in EXPORTED:
        raise ValueError(
            f"{run.name} is a run of the task {run.spec.name}, expected {' or '.join(EXPORTED)}: give one."
        )
    path = user_path(path)
    smallest = format_of(path).smallest
    about = run.preprocessing
    sides = about.size if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])
    able = 0 < smallest <= min(sides)
    if dynamic and not able:
        least = f", expected at least {smallest} px" if smallest else ""
        raise ValueError(
            f"`size` is {sides[0]}×{sides[1]}{least}: {path.suffix} files read one size only here; leave `dynamic` out."
        )
    network = run.network.cpu().float()
    facts = Facts(
        name=run.name,
        task=run.spec.name,
        class_names=tuple(run.class_names),
        size=sides,
        smallest=smallest if able and dynamic is not False else 0,
        mean=tuple(about.mean),
        std=tuple(about.std),
        interpolation=about.interpolation,
        crop_pct=about.crop_pct,
        weights=digest(network),
    )
    return write(network, path, facts, _resized(images, facts))


def _name(network: nn.Module) -> str:
    """timm's name of the architecture, or that of the class."""
    known: Any = getattr(network, "pretrained_cfg", None) or {}
    return str(known.get("architecture") or type(network).__name__)


def _resized(images: Sequence[Any] | None, facts: Facts) -> list[Tensor]:
    """Real images as uint8 batches (images, channels, height, width), of three sizes if the file reads any."""
    if images is None:
        opened = photos(facts.channels)
    else:
        items, _ = find_images(images)
        opened = [read_image(item, name, facts.channels) for name, item in items[:MOST]]
    batches: list[Tensor] = []
    for scale in CHECKED if facts.dynamic else CHECKED[:1]:
        height, width = (max(facts.smallest, round(side * scale)) for side in facts.size)
        resized = [image.resize((width, height), Image.Resampling.BICUBIC) for image in opened]
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in resized]))
        batch = pixels[:, None] if pixels.ndim == 3 else pixels.movedim(-1, 1).contiguous()
        batches += [batch] if facts.dynamic else batch.split(1)
    return batches


class ExportedNetwork(nn.Module):
    """An exported file as a network on normalized images (batch, channels, height, width)."""

    mean: Tensor
    std: Tensor

    def __init__(self, path: Path, threads: int | None = None) -> None:
        super().__init__()
        self.path = path
        self.facts, self.session = opened(path, threads)
        self.num_classes = len(self.facts.class_names)
        self.register_buffer("mean", torch.tensor(self.facts.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(self.facts.std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes). Raises ValueError for images that the file cannot read."""
        self.facts.check(images.shape, self.path)
        pixels = ((images.float() * self.std + self.mean) * 255).round().clamp(0, 255).to(torch.uint8)
        batches = [pixels] if self.facts.dynamic else pixels.split(1)
        return torch.cat([self.session(batch.cpu()) for batch in batches]).to(images.device)


def run_of_file(path: Path) -> Run:
    """A run around an exported file, which predicts and evaluates in its runtime.

    Raises ValueError for a file that is damaged or that linvit did not write, ImportError if the runtime is missing.
    """
    network = ExportedNetwork(path)
    facts = network.facts
    spec = TASKS[facts.task]
    preprocessing = Preprocessing(facts.size, facts.mean, facts.std, facts.interpolation, facts.crop_pct)
    task = spec.around(network, len(facts.class_names), facts.channels)
    return Run(spec, task, list(facts.class_names), preprocessing, path, facts.name)
