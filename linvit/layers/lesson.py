"""What an attention can learn from the softmax attention that it replaces."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from linvit.layers.operator import AttentionSteps


@dataclass(frozen=True)
class Lesson:
    """One attention of a student and what it has to learn.

    layer: the path in the student of the module that the block calls. steps: the path of its AttentionSteps, which is
    the same except in SAM and Hiera. present: what the teacher's attention computes from the arguments of that call.
    scoring: the teacher's attention as AttentionSteps, if its scores are to be learned.
    """

    layer: str
    steps: str
    present: Callable[..., Tensor]
    scoring: AttentionSteps | None = None
