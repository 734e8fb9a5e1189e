"""Runs in which a linearized network learns the features of its teacher."""

from typing import Any

from torch import nn

from linvit.runs.students import StudentSpec
from linvit.tasks.initialization import ALL
from linvit.tasks.task import Task
from linvit.tasks.transfer import Transfer


class TransferSpec(StudentSpec):
    """Transfer of a teacher's features to the network that was made from it."""

    name = "transfer"
    task = Transfer
    kept = ("features",)
    item = "map"

    def around(self, network: nn.Module, num_classes: int, channels: int = 3, **settings: Any) -> Task:
        original = self.taught(network, settings.get("teacher"), settings.get("copied", ALL))
        return Transfer(network, original=original, num_classes=num_classes, **settings)


SPEC = TransferSpec()
