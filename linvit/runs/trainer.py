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
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from linvit.ranges import Amount, Count, Like, OneOf, Range, Rule, allows

PRECISIONS = "64-true 32-true 16-true bf16-true 16-mixed bf16-mixed transformer-engine transformer-engine-float16"
LENGTH = Annotated[float, Range(0)]
TIMES = ("weeks", "days", "hours", "minutes", "seconds")
LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)


@dataclass(frozen=True)
class Class(Rule):
    """The class of an object, see `linvit.runs.components`."""

    def holds(self, value: Any) -> bool:
        return True

    def words(self, noun: str, got: Any = None) -> str:
        return "the path of a class (class_path, init_args)"


@dataclass(frozen=True)
class Time(Rule):
    """A time in units by name."""

    def holds(self, value: Mapping[str, Any]) -> bool:
        return bool(value) and set(value) <= set(TIMES) and all(allows(LENGTH, length) for length in value.values())

    def words(self, noun: str, got: Any = None) -> str:
        return f"a mapping with {', '.join(TIMES)}"


Steps = Count | Annotated[int, OneOf((-1,))]
Batches = Count | Annotated[float, Range(above=0, most=1)]
BatchesOrNone = Amount | Annotated[float, Range(0, 1)]
Object = Annotated[dict[str, Any], Class()]
Objects = Annotated[str | dict[str, Any], Class()] | Sequence[Annotated[str | dict[str, Any], Class()]]
Duration = Annotated[str, Like(r"\d+(:\d\d){3}", "a time as DD:HH:MM:SS")] | Annotated[dict[str, Any], Time()]

RANGES: dict[str, Any] = {
    "accelerator": Annotated[str, OneOf(("auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())))]
    | Object,
    "accumulate_grad_batches": Count,
    "barebones": bool,
    "benchmark": bool | None,
    "callbacks": Objects | None,
    "check_val_every_n_epoch": Count | None,
    "default_root_dir": None,
    "detect_anomaly": bool,
    "deterministic": bool | Annotated[str, OneOf(("warn",))] | None,
    "devices": Count
    | Sequence[Amount]
    | Annotated[str, Like(r"auto|-1|\d+|\d+(,\d+)*,?", "auto, -1 or numbers of devices as text")],
    "enable_autolog_hparams": bool,
    "enable_checkpointing": bool | None,
    "enable_model_summary": bool | None,
    "enable_progress_bar": bool | None,
    "fast_dev_run": Amount | bool,
    "gradient_clip_algorithm": Annotated[str, OneOf(("norm", "value"))] | None,
    "gradient_clip_val": Annotated[float, Range(0)] | None,
    "inference_mode": bool,
    "limit_predict_batches": BatchesOrNone | None,
    "limit_test_batches": BatchesOrNone | None,
    "limit_train_batches": Batches | None,
    "limit_val_batches": BatchesOrNone | None,
    "log_every_n_steps": Count | None,
    "logger": bool | Objects | None,
    "max_epochs": Count | None,
    "max_steps": Steps,
    "max_time": Duration | None,
    "min_epochs": Amount | None,
    "min_steps": Amount | None,
    "model_registry": None,
    "num_nodes": Count,
    "num_sanity_val_steps": Annotated[int, Range(-1)] | None,
    "overfit_batches": Annotated[float, OneOf((0,))],
    "plugins": Objects | None,
    "precision": Annotated[str, OneOf((*PRECISIONS.split(), "64", "32", "16", "bf16"))]
    | Annotated[int, OneOf((64, 32, 16))]
    | None,
    "profiler": Annotated[str, OneOf(("simple", "advanced", "pytorch", "xla"))] | Object | None,
    "reload_dataloaders_every_n_epochs": Amount,
    "strategy": Annotated[str, OneOf(("auto", *StrategyRegistry.available_strategies()))] | Object,
    "sync_batchnorm": bool,
    "use_distributed_sampler": Annotated[bool, OneOf((False,))],
    "val_check_interval": Batches | Duration | None,
}


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
    """Raises ValueError for an accelerator, devices or nodes that do not exist: Lightning would wait for them.

    trainer: the group of a recipe.
    """
    accelerator = trainer["accelerator"]
    if isinstance(accelerator, str):
        wanted = {"auto": ("cuda", "mps", "tpu", "cpu"), "gpu": ("cuda", "mps")}.get(accelerator, (accelerator,))
        present = next((kind for kind in wanted if AcceleratorRegistry[kind]["accelerator"].is_available()), None)
        if present is None:
            raise ValueError(
                f"`accelerator` is {accelerator}, which this machine does not have: set it to auto or cpu."
            )
        _check_devices(present, trainer["devices"])
    if trainer["num_nodes"] > 1 and "MASTER_ADDR" not in os.environ and not any(kind.detect() for kind in LAUNCHERS):
        raise ValueError(
            f"`num_nodes` is {trainer['num_nodes']}, but nothing started this process on several machines: start it by"
            " torchrun or srun, or set it to 1."
        )


def _check_devices(accelerator: str, devices: int | str | Sequence[int]) -> None:
    number = int(devices) if isinstance(devices, str) and devices.isdigit() else devices
    indices = [int(index) for index in number.split(",") if index.isdigit()] if isinstance(number, str) else number
    if accelerator == "cpu":
        there, what = os.cpu_count() or 1, "CPU cores"
    elif accelerator == "cuda":
        there, what = torch.cuda.device_count(), "GPUs"
    else:
        return
    asked = indices if isinstance(indices, int) else max(indices, default=-1) + 1
    if asked > there:
        raise ValueError(
            f"`devices` is {devices}, but the number of {what} of this machine is {there}: set it to that or lower."
        )
