"""Detections of exported files, whose number depends on the image, against those of the network."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from linvit.errors import SettingError

MASK_TOLERANCE = 10
"""Masks are steeper: in trained networks they differ by up to 1e-4 where boxes differ by 1e-6 of their size."""

LEAST_SAME = 0.99
"""Rounding may decide otherwise which of two equal boxes suppresses the other, or which detection is the last."""

Outputs = tuple[Tensor, ...]


def matched(answers: Iterable[tuple[Outputs, Outputs]], tolerance: float) -> tuple[Outputs, Outputs, float]:
    """The detections of all images that network and file agree on, in pairs, and their share of all detections.

    Two detections agree if their labels are the same, if their scores, and boxes as shares of the largest coordinate,
    differ by at most the tolerance, and their masks by at most ten times as much.

    Args:
        answers: for each image the outputs DETECTIONS (of linvit.deploy.facts) of the network and of the file.
        tolerance: largest difference.

    Raises ValueError if the network detects nothing in any image.
    """
    ours: list[Outputs] = []
    theirs: list[Outputs] = []
    count = 0
    for expected, outputs in answers:
        here, there = _pairs(expected, outputs, tolerance)
        ours.append(tuple(values[here] for values in expected))
        theirs.append(tuple(values[there] for values in outputs))
        count += max(len(expected[0]), len(outputs[0]))
    if count == 0:
        raise SettingError(
            "The network detects nothing in the images that the file is compared on: set `images` to some with objects"
            " of its classes."
        )
    share = sum(len(outputs[0]) for outputs in ours) / count
    return _joined(ours), _joined(theirs), share


def _joined(images: Sequence[Outputs]) -> Outputs:
    return tuple(torch.cat(output) for output in zip(*images, strict=True))


def _pairs(expected: Outputs, outputs: Outputs, tolerance: float) -> tuple[Tensor, Tensor]:
    """The places of the detections that agree, each the closest to the other."""
    if 0 in (len(expected[0]), len(outputs[0])):
        return torch.arange(0), torch.arange(0)
    scale = expected[0].abs().amax().clamp_min(1)  # pixels
    ours, theirs = (
        torch.cat((boxes / scale, scores[:, None], masks.flatten(1) / MASK_TOLERANCE), dim=1).double()
        for boxes, scores, _, masks in (expected, outputs)
    )
    gaps = (ours[:, None] - theirs).abs().amax(-1)  # cdist would leave NaN out
    gaps[expected[2][:, None] != outputs[2]] = torch.inf
    closest, back = gaps.argmin(1), gaps.argmin(0)
    here = torch.arange(len(ours))
    agree = (back[closest] == here) & (gaps[here, closest] <= tolerance)
    return here[agree], closest[agree]
