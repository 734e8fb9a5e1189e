"""Relative errors of what a student computes, against what its teacher computes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from linvit.tasks.measures import Measure, counted

ERRORS: Mapping[str, Measure] = {
    "error": Measure("relative error", "number", lower_is_better=True, panel="relative error"),
    "worst": Measure("largest relative error", "number", lower_is_better=True, panel="relative error"),
    **counted("images"),
}
"""Mean and largest of the relative errors of all blocks or maps."""


def relative_errors(given: Tensor, expected: Tensor) -> Tensor:
    """|given - expected|² / |expected|² of each image, (batch,) in float32 at least; both are (batch, …).

    0 if both are 0 everywhere.
    """
    dtype = torch.promote_types(expected.dtype, torch.float32)
    expected = expected.to(dtype).flatten(1)
    difference = given.to(dtype).flatten(1) - expected
    smallest = torch.finfo(dtype).tiny
    return difference.square().sum(1) / expected.square().sum(1).clamp_min(smallest)
