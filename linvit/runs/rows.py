"""Runs whose processes share the rows of every image, see `linvit.parallel`."""

import copy
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from linvit.environment import forks_of, share_rows
from linvit.errors import SettingError, refuse
from linvit.parallel import Sharded, shard
from linvit.parallel.exchange import LostProcessError, lost_process
from linvit.tasks.task import Task

TASK = "classification"
Result = TypeVar("Result")


class SharedRows(Callback):
    """Lets each group of so many neighbouring processes share the rows of its images.

    mesh: the processes of this group; None for groups of the trainer's processes.
    """

    def __init__(self, number: int, mesh: DeviceMesh | None = None) -> None:
        self.number, self.mesh = number, mesh

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.mesh is not None:
            return
        groups, rest = divmod(trainer.world_size, self.number)
        if rest:
            raise SettingError(
                f"`processes_per_image` is {self.number}, but the number of processes is {trainer.world_size}: set the"
                " trainer's `devices` to a multiple of it, and `strategy` to ddp."
            )
        share_rows(self.number)
        device = trainer.strategy.root_device.type
        self.mesh = init_device_mesh(device, (groups, self.number), mesh_dim_names=("images", "rows"))["rows"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._share(pl_module)

    def _share(self, task: LightningModule) -> None:
        """Called when the trainer has moved the weights to their device and precision."""
        assert self.mesh is not None
        for network in cast(Task, task).networks().values():
            share(network, self.mesh)


def share(network: nn.Module, mesh: DeviceMesh) -> None:
    """Lets the processes of a mesh share the rows of every image that the network reads.

    Only what a call does changes: the network keeps its layers, and the keys of its weights.
    """
    setattr(network, "forward", partial(_forward, network, shard(network, mesh)))  # noqa: B010


def _forward(network: nn.Module, sharded: Sharded, x: Any) -> Any:
    return sharded.train(network.training)(x)


def check_sharing(argument: str, task: str, compiled: bool = False) -> None:
    """Raises ValueError for a run whose images cannot be shared; argument: the name of the number of processes."""
    refuse(
        task != TASK and f"`{argument}` is for the task {TASK}, but this run has the task {task}: set it to 1.",
        compiled
        and f"`{argument}` needs layers that exchange rows, which no compiler sees: set `task.compile` to false.",
    )


def in_processes(number: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """What function(mesh, *arguments) returns in the first of so many new processes of this machine.

    Raises what it raises, and ConnectionError if a process was killed.
    """
    try:
        workers = ProcessPoolExecutor(number, mp_context=forks_of("linvit.runs.loading"))
        with TemporaryDirectory() as folder, workers:
            store = (Path(folder) / "store").as_uri()
            each = [workers.submit(_in_process, rank, number, store, function, *arguments) for rank in range(number)]
            first, *_ = [future.result() for future in each]
            return first
    except (BrokenProcessPool, EOFError, RuntimeError, LostProcessError) as error:
        # the process that starts the others, one of them, or what the one that is left says of it
        if not (isinstance(error, BrokenProcessPool | EOFError) or lost_process(error)):
            raise
        raise ConnectionError(
            f"One of the {number} processes that share the images was killed, often because it ran out of memory:"
            " take smaller images, or more processes or machines."
        ) from error


def _in_process(rank: int, number: int, store: str, function: Callable[..., Result], *arguments: Any) -> Result:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // number))
    share_rows(number)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", store, rank=rank, world_size=number)
    try:
        # the processes were given tensors in shared memory, and each counts in those of its metrics
        return function(init_device_mesh(device, (number,)), *copy.deepcopy(arguments))
    finally:
        distributed.destroy_process_group()
