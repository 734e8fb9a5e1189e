"""Exported files as networks, which compute in the runtimes of the files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import clip_boxes_to_image

from linvit.data.images.image import SMALLEST
from linvit.deploy.facts import DETECTIONS, Facts, FactsError, SequenceFacts
from linvit.deploy.runtimes import Session
from linvit.deploy.sequences import DecoderFile
from linvit.layers.causal import Packing
from linvit.layers.conformer import subsampled
from linvit.models.dense.inputs import pasted, suppressed
from linvit.models.dense.retinanet import CHOICE, most_likely
from linvit.models.sequence import DecoderCache


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
        """Logits (batch, classes) or (batch, classes, height, width)."""
        logits = self.outputs(images)[0]
        if logits.shape[1:2] != (self.num_classes,) or not logits.isfinite().all():
            raise FactsError(
                f"{self.path} returns outputs of the shape {tuple(logits.shape)}, expected finite numbers for"
                f" {self.num_classes} classes: export it again."
            )
        return logits

    def outputs(self, images: Tensor) -> list[Tensor]:
        """All outputs of the file."""
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


class ExportedDecoder(nn.Module):
    """An exported decoder, which reads tokens as `linvit.models.sequence.Decoder` does."""

    def __init__(self, path: Path, facts: SequenceFacts, session: Session) -> None:
        super().__init__()
        self.path, self.facts = path, facts
        self.vocabulary, self.mechanism = facts.logits, facts.mechanism
        self.file = DecoderFile(facts, session)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary); documents as in Decoder."""
        packing = None if documents is None else Packing(documents)
        rows = tokens if packing is None else packing.apart(tokens.unsqueeze(-1)).squeeze(-1)
        batches = [rows] if self.facts.dynamic else rows.split(1)
        logits = torch.cat([self.read(batch, DecoderCache()) for batch in batches])
        return logits if packing is None else packing.together(logits, tokens)

    def read(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """As Decoder.read."""
        return self.file.read(tokens.cpu(), cache).to(tokens.device)


class ExportedConformer(nn.Module):
    """An exported Conformer with a CTC head; it reads each utterance alone."""

    causal = transduces = False  # it keeps no stream

    def __init__(self, path: Path, facts: SequenceFacts, session: Session) -> None:
        super().__init__()
        self.path, self.facts, self.session = path, facts, session
        self.tokens, self.mechanism = facts.logits, facts.mechanism

    def forward(self, features: Tensor, lengths: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Conformer.forward."""
        utterances = zip(features.cpu().split(1), lengths.tolist(), strict=True)
        logits = [self.session(utterance[:, :length].contiguous())[0][0] for utterance, length in utterances]
        return pad_sequence(logits, batch_first=True).to(features.device), subsampled(lengths)
