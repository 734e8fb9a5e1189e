"""Runs whose processes share the rows of every image, see `linvit.parallel`."""

from functools import partial
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from linvit.environment import share_rows
from linvit.parallel import Sharded, shard
from linvit.tasks.task import Task

TASK = "classification"


class SharedRows(Callback):
    """Lets each group of `rows` neighbouring processes share the rows of its images.

    Raises ValueError if the number of processes is not a multiple of it, and for networks as `linvit.parallel.shard`.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @classmethod
    def callbacks(cls, rows: int) -> list[Callback]:
        """This callback, if there are rows to share."""
        return [cls(rows)] if rows > 1 else []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size % self.rows:
            raise ValueError(
                f"`rows` is {self.rows}, but the number of processes is {trainer.world_size}: set the trainer's"
                " `devices` to a multiple of it, and `strategy` to ddp."
            )
        share_rows(self.rows)
        mesh_shape = trainer.world_size // self.rows, self.rows
        device = trainer.strategy.root_device.type
        self.mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=("images", "rows"))["rows"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share(cast(Task, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._share(cast(Task, pl_module))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        share_rows(1)

    def _share(self, task: Task) -> None:
        """The networks keep their names, and with them the keys of their weights: only what a call does changes."""
        for network in task.networks().values():
            forward = partial(_forward, network, shard(network, self.mesh))
            setattr(network, "forward", forward)  # noqa: B010


def _forward(network: nn.Module, sharded: Sharded, x: Any) -> Any:
    return sharded.train(network.training)(x)


def check_rows(task: str, compiled: bool) -> None:
    """Raises ValueError for a run whose images cannot be shared by rows."""
    if task != TASK:
        raise ValueError(f"`rows` is for the task {TASK}, but this run has the task {task}: set it to 1.")
    if compiled:
        raise ValueError(
            "`rows` lets processes exchange rows in each layer, which no compiler sees: set task.compile to false."
        )
