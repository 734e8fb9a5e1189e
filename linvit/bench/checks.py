"""The check before a speed is shown: results must agree."""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.int8: 5e-1}
"""Largest relative L2 error of a result; float32 is what `linvit.fuse` promises, and about ten times the usual error.

In bfloat16 the released order of RALA loses 2e-2 (docs/evidence/results.md), a whole network with random weights 6e-3
to 5e-2: no speed is refused for the rounding of its dtype, and none is shown for a wrong result, whose error is about
1.
"""


class WrongResultError(ArithmeticError):
    """A variant computes a wrong result, so its speed means nothing."""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of expected; infinite for another shape or if a value is not finite."""
    if got.shape != expected.shape or not got.isfinite().all():
        return float("inf")
    expected = expected.detach().double()
    norm, distance = float(expected.norm()), float((got.detach().double() - expected).norm())
    return distance / (norm or 1.0)


def check(name: str, got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest relative error among the results of a variant.

    Raises:
        WrongResultError: if it is above tolerance; the message names variant and error.
    """
    error = max(relative_error(result, other) for result, other in zip(got, expected, strict=True))
    if error > tolerance:
        raise WrongResultError(
            f"{name} computes a wrong result: its relative error is {error:.1e}, expected at most {tolerance:.0e}; "
            "no speed is shown, leave the variant out or fix it"
        )
    return error
