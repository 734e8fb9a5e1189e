"""Exported files as runs, which predict and evaluate in the runtimes of the files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchvision.ops import clip_boxes_to_image

from linvit.data.dense.source import DensePreprocessing
from linvit.data.images.image import SMALLEST, Preprocessing
from linvit.deploy.facts import BACKBONE, DETECTIONS, Facts, FactsError, SequenceFacts
from linvit.deploy.formats import opened
from linvit.models.dense.images import pasted, suppressed
from linvit.models.dense.retinanet import CHOICE, most_likely
from linvit.ranges import allows
from linvit.runs.exported_sequences import run_of_sequences
from linvit.runs.run import Run
from linvit.runs.tasks import TASKS

EXPORTED = ("classification", "multilabel", "segmentation", "detection")
"""The tasks on images whose runs can be exported."""


class ExportedNetwork(nn.Module):
    """An exported file as a network on normalized images (batch, channels, height, width)."""

    mean: Tensor
    std: Tensor

    def __init__(self, path: Path, facts: Facts, session: Any) -> None:
        super().__init__()
        self.path, self.facts, self.session = path, facts, session
        self.num_classes = len(facts.class_names)
        self.register_buffer("mean", torch.tensor(facts.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(facts.std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) or (batch, classes, height, width). Raises ValueError for what is not that."""
        logits = self.outputs(images)[0]
        if logits.shape[1:2] != (self.num_classes,) or not logits.isfinite().all():
            raise FactsError(
                f"{self.path} returns outputs of the shape {tuple(logits.shape)}, expected finite numbers for"
                f" {self.num_classes} classes: export it again."
            )
        return logits

    def outputs(self, images: Tensor) -> list[Tensor]:
        """All outputs of the file. Raises ValueError for images that it cannot read."""
        self.facts.check(images.shape, self.path)
        pixels = ((images.float() * self.std + self.mean) * 255).round().clamp(0, 255).to(torch.uint8)
        batches = [pixels] if self.facts.dynamic else pixels.split(1)
        outputs = [self.session(batch.cpu()) for batch in batches]
        return [torch.cat(each).to(images.device) for each in zip(*outputs, strict=True)]


class ExportedDetector(ExportedNetwork):
    """An exported RetinaNet, whose detections are chosen here from the boxes and scores of the file."""

    has_masks = False

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        """Images (3, height, width) to boxes (n, 4) in pixels, labels (n,) and scores (n,) of each."""
        return [self._detections(image) for image in images]

    def _detections(self, image: Tensor) -> dict[str, Tensor]:
        size = (image.shape[-2], image.shape[-1])
        padded = [-(-side // SMALLEST) * SMALLEST for side in size]  # as the network does
        filled = pad(image, (0, max(0, SMALLEST - size[1]), 0, max(0, SMALLEST - size[0])))
        boxes, scores = (output[0] for output in self.outputs(filled[None]))
        positions = [math.prod(-(-side // stride) for side in padded) for stride in self.facts.strides]
        counts = [len(boxes) // sum(positions) * count for count in positions]
        best = [most_likely(level, CHOICE["topk_candidates"]) for level in scores.split(counts)]
        starts = [sum(counts[:number]) for number in range(len(counts))]
        places = torch.cat([start + level for start, level in zip(starts, best, strict=True)])
        return suppressed(
            clip_boxes_to_image(boxes[places], size),
            scores[places],
            CHOICE["score_thresh"],
            CHOICE["nms_thresh"],
            CHOICE["detections_per_img"],
        )


class ExportedRegionDetector(ExportedNetwork):
    """An exported Mask R-CNN or Cascade Mask R-CNN, which chooses its detections in the file."""

    has_masks = True

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        """Images (3, height, width) to boxes, scores, labels and bool masks (n, height, width) of each."""
        detections = [dict(zip(DETECTIONS, self.outputs(image[None]), strict=True)) for image in images]
        for image, detected in zip(images, detections, strict=True):
            detected["masks"] = pasted(detected["masks"], detected["boxes"], image.shape[-2], image.shape[-1])
        return detections


def run_of_file(path: Path) -> Run:
    """A run around an exported file, which predicts and evaluates in its runtime.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the runtime is not installed.
        ValueError: if the file is damaged, was not written by linvit, or contains a network without a run, which cannot
            predict.
    """
    facts, session = opened(path)
    if isinstance(facts, SequenceFacts):
        return run_of_sequences(path, facts, session)
    if facts.task == BACKBONE:
        raise ValueError(
            f"{path} is the backbone {facts.name}, which has maps and predicts nothing: give the file of a run, or open"
            " it with `linvit.deploy.formats.opened`."
        )
    if facts.task not in EXPORTED or (facts.fit is None) != (TASKS[facts.task].preprocessing is Preprocessing):
        raise FactsError(f"What {path} says about its task {facts.task!r} is damaged: export it again.")
    spec = TASKS[facts.task]
    lengths = {len(value) for value in facts.stored.values() if isinstance(value, list)}
    if not all(allows(spec.stored_facts.get(name), value) for name, value in facts.stored.items()) or lengths - {
        len(facts.class_names)
    }:
        raise FactsError(f"What {path} says about its data is damaged: export it again.")
    kind = ExportedNetwork
    if facts.task == "detection":
        kind = ExportedRegionDetector if facts.outputs == DETECTIONS else ExportedDetector
    network = kind(path, facts, session)
    preprocessing: Any = Preprocessing(facts.size, facts.mean, facts.std, facts.interpolation, facts.crop_pct)
    if facts.fit is not None:
        preprocessing = DensePreprocessing(*facts.fit, facts.mean, facts.std)
    task = spec.around(network, len(facts.class_names), facts.channels)
    return Run(spec, task, list(facts.class_names), preprocessing, path, facts.name, stored=dict(facts.stored))
