"""Runs in which the attention of a linearized network learns from its teacher's, block by block."""

from typing import Any

from torch import nn

from linvit.models.lessons import lessons, share
from linvit.runs.students import StudentSpec
from linvit.tasks.alignment import MAPS, OUTPUTS, Alignment
from linvit.tasks.initialization import ALL
from linvit.tasks.task import Task


class AlignmentSpec(StudentSpec):
    """Alignment of each linear attention with the attention that it replaces."""

    name = "alignment"
    task = Alignment
    kept = ("match",)
    item = "block"

    def around(self, network: nn.Module, num_classes: int, channels: int = 3, **settings: Any) -> Task:
        original = self.taught(network, settings.get("teacher"), settings.get("copied", ALL))
        given = lessons(network, original, scores=settings.get("match", OUTPUTS) == MAPS)
        share(network, original, given)
        return Alignment(network, original=original, lessons=given, num_classes=num_classes, **settings)


SPEC = AlignmentSpec()
