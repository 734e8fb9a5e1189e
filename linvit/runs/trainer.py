"""The values that Lightning's trainer accepts in a run, and whether this machine has what they ask for."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from linvit.errors import SettingError
from linvit.ranges import Amount, Count, Like, OneOf, Range, Rule, Some, declared

LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)


@dataclass(frozen=True)
class Class(Rule):
    """The class of an object, see `linvit.runs.components`."""

    def holds(self, value: Any) -> bool:
        return True

    def words(self, noun: str, got: Any = None) -> str:
        return "the path of a class (class_path, init_args)"


Object = Annotated[dict[str, Any], Class()]
Objects = Annotated[str | dict[str, Any], Class()] | Sequence[Annotated[str | dict[str, Any], Class()]]
Duration = Annotated[str, Like(r"\d+(:\d\d){3}", "a time as DD:HH:MM:SS")] | Annotated[dict[str, Any], Some()]

RANGES: Mapping[str, Any] = {
    **declared(Trainer),
    # objects are written as classes in a recipe
    "accelerator": Annotated[str, OneOf(("auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())))]
    | Object,
    "callbacks": Objects | None,
    "logger": bool | Objects | None,
    "plugins": Objects | None,
    "profiler": Annotated[str, OneOf(("simple", "advanced", "pytorch", "xla"))] | Object | None,
    "strategy": Annotated[str, OneOf(("auto", *StrategyRegistry.available_strategies()))] | Object,
    # set by linvit
    "default_root_dir": None,
    "model_registry": None,
    "overfit_batches": Annotated[float, OneOf((0,))],
    "use_distributed_sampler": Annotated[bool, OneOf((False,))],
    # values that Lightning takes, but that end in a crash or an endless or empty run
    "accumulate_grad_batches": Count,
    "check_val_every_n_epoch": Count | None,
    "devices": Count
    | Sequence[Amount]
    | Annotated[str, Like(r"auto|-1|\d+|\d+(,\d+)*,?", "auto, -1 or numbers of devices as text")],
    "gradient_clip_val": Annotated[float, Range(0)] | None,
    "limit_train_batches": Count | Annotated[float, Range(above=0, most=1)] | None,
    "log_every_n_steps": Count | None,
    "max_epochs": Count | None,
    "max_steps": Count | Annotated[int, OneOf((-1,))],
    "max_time": Duration | None,
    "num_nodes": Count,
    "val_check_interval": Count | Annotated[float, Range(above=0, most=1)] | Duration | None,
}
"""The values of the group trainer of a recipe, by argument of Lightning's trainer; others are refused by Lightning."""


@contextmanager
def lightning_refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Raises Lightning's MisconfigurationException, and exceptions of these kinds, as ValueError with one sentence."""
    refusals: tuple[type[Exception], ...] = (MisconfigurationException, *kinds)
    try:
        yield
    except refusals as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Lightning's trainer refuses the recipe's group trainer: {reason}") from error


def check_machine(trainer: Mapping[str, Any]) -> None:
    """Raises SettingError for an accelerator, devices or nodes that do not exist: Lightning would wait for them.

    trainer: the group of a recipe.
    """
    accelerator, devices, nodes = trainer["accelerator"], trainer["devices"], trainer["num_nodes"]
    if isinstance(accelerator, str):
        wanted = {"auto": ("cuda", "mps", "tpu", "cpu"), "gpu": ("cuda", "mps")}.get(accelerator, (accelerator,))
        present = next((name for name in wanted if AcceleratorRegistry[name]["accelerator"].is_available()), None)
        if present is None:
            raise SettingError.of("accelerator", accelerator, "one that this machine has", "set it to auto or cpu")
        existing = {"cpu": os.cpu_count() or 1, "cuda": torch.cuda.device_count()}.get(present)
        if existing is not None and _highest(devices) > existing:
            raise SettingError.of("devices", devices, f"at most {existing}, which this machine has", "set it lower")
    if nodes > 1 and "MASTER_ADDR" not in os.environ and not any(launcher.detect() for launcher in LAUNCHERS):
        raise SettingError(
            f"`num_nodes` is {nodes}, but nothing started this process on several machines: start it by torchrun or"
            " srun, or set it to 1."
        )


def _highest(devices: int | str | Sequence[int]) -> int:
    """The number of devices that must exist, so that these do; -1 if all that exist are asked for."""
    if isinstance(devices, int):
        return devices
    if isinstance(devices, str):
        if devices.isdigit():
            return int(devices)
        devices = [int(index) for index in devices.split(",") if index.isdigit()]
    return max(devices, default=-2) + 1
