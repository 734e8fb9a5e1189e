"""Optimizer and learning-rate schedule, shared by all tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torchvision.ops._utils import split_normalization_params

from linvit.errors import SettingError, refuse
from linvit.files import explained
from linvit.ranges import Amount, Checked, Count, OneOf, Range, arguments, check_keys, some_of

SET_HERE = {"params", "lr", "weight_decay"}


def all_but_norms(network: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: those of norm layers, without weight decay, and all others."""
    norms, others = split_normalization_params(network)
    return [{"params": norms, "weight_decay": 0.0}, {"params": others}]


NOT_DECAYED: Mapping[str, dict[str, Any]] = {
    "vectors": {},
    "norms": {"param_group_fn": all_but_norms},
    "none": {"filter_bias_and_bn": False},
}
SCHEDULERS: Mapping[str, Callable[..., Scheduler]] = {
    "cosine": CosineLRScheduler,
    "steps": MultiStepLRScheduler,
    "poly": PolyLRScheduler,
}


@dataclass
class Optimizer(Checked):
    """Settings of an optimizer of timm; raises ValueError for an unknown name and for options that it does not accept.

    Args:
        name: Name of an optimizer in timm.optim.list_optimizers().
        lr: Peak learning rate.
        lr_batch: Global batch size that lr is meant for: the rate is lr × global batch / lr_batch. null uses lr
            unchanged.
        weight_decay: Weight decay.
        not_decayed: Parameters without weight decay: vectors (all of one dimension: biases, norms, scales), norms (norm
            layers only, as is usual for detectors) or none.
        layer_decay: Layer-wise learning-rate decay: factor from each layer to the one below it; null for none.
        options: Further keyword arguments of the optimizer, such as betas.
    """

    name: str = "adamw"
    lr: Annotated[float, Range(above=0)] = 1e-3
    lr_batch: Count | None = None
    weight_decay: Annotated[float, Range(0)] = 0.05
    not_decayed: Annotated[str, OneOf(tuple(NOT_DECAYED))] = "vectors"
    layer_decay: Annotated[float, Range(above=0, most=1)] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse(
            self.name not in list_optimizers()
            and f"`name` is {self.name!r}, expected one of {some_of(list_optimizers(), self.name)}: change it.",
            self.layer_decay is not None
            and self.not_decayed == "norms"
            and "`layer_decay` and `not_decayed=norms` exclude each other: leave one out.",
        )
        with explained(  # a package or a GPU may be missing
            lambda reason: f"The optimizer {self.name} cannot be used here ({reason}): choose another one.",
            raised=SettingError,
        ):
            kind = cast(type, get_optimizer_class(self.name, bind_defaults=False))
            accepted = sorted(set(arguments(kind)) - SET_HERE)
        check_keys("options", self.options, accepted)

    def build(self, network: nn.Module, global_batch: int) -> torch.optim.Optimizer:
        """The optimizer of a network's weights. global_batch: samples in a step of all processes."""
        settings = NOT_DECAYED[self.not_decayed] | self.options
        lr = self.lr * global_batch / self.lr_batch if self.lr_batch else self.lr
        with explained(
            lambda reason: f"The optimizer {self.name} refuses the `options` {self.options} ({reason}): correct them.",
            raised=SettingError,
        ):
            return create_optimizer_v2(
                network, self.name, lr, self.weight_decay, layer_decay=self.layer_decay, **settings
            )


@dataclass
class Schedule(Checked):
    """Learning rate as a function of the step: linear warm-up, then decay to min_lr.

    Args:
        name: cosine, steps (times decay_rate at each of decay_epochs) or poly, (1 − step / steps)^power.
        warmup_epochs: Length of the warm-up in epochs; may be a fraction.
        warmup_steps: Length of the warm-up in steps, instead of warmup_epochs.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate at the end of cosine or poly.
        cooldown_epochs: Last epochs of the run, which stay at min_lr.
        warmup_first: Whether the decay starts after the warm-up (true) or at step 0, so that the warm-up ends below the
            peak (false).
        decay_epochs: Epochs at which steps lowers the rate.
        decay_rate: Factor by which steps lowers the rate.
        power: Exponent of poly; 1 is linear.
    """

    name: Annotated[str, OneOf(tuple(SCHEDULERS))] = "cosine"
    warmup_epochs: Annotated[float, Range(0)] = 0.0
    warmup_steps: Amount | None = None
    warmup_lr: Annotated[float, Range(0)] = 1e-6
    min_lr: Annotated[float, Range(0)] = 1e-5
    cooldown_epochs: Annotated[float, Range(0)] = 0.0
    warmup_first: bool = False
    decay_epochs: Sequence[Annotated[float, Range(0)]] = ()
    decay_rate: Annotated[float, Range(above=0, most=1)] = 0.1
    power: Annotated[float, Range(above=0)] = 0.9

    def check_peak(self, optimizer: Optimizer) -> None:
        """Raises ValueError if min_lr is above the peak; not checked if the peak depends on the batch."""
        if optimizer.lr_batch is None and self.name != "steps" and self.min_lr > optimizer.lr:
            raise SettingError(
                f"`min_lr` is {self.min_lr:g}, above the peak learning rate of {optimizer.lr:g}: set it lower."
            )

    def build(self, optimizer: torch.optim.Optimizer, steps: int, steps_per_epoch: float) -> Scheduler:
        """timm's scheduler, updated every step, for a run of this many steps."""
        warmup = round(self.warmup_epochs * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps
        steps -= round(self.cooldown_epochs * steps_per_epoch)
        # timm warns about t_initial=1, and 2 changes nothing then
        curve: dict[str, Any] = {
            "t_initial": max(2, steps - warmup if self.warmup_first else steps),
            "lr_min": self.min_lr,
        }
        # timm lowers the rate one step early
        falls = [round(epoch * steps_per_epoch) + 1 for epoch in sorted(self.decay_epochs)]
        by_name: dict[str, dict[str, Any]] = {
            "cosine": curve,
            "steps": {"decay_t": falls, "decay_rate": self.decay_rate},
            "poly": curve | {"power": self.power},
        }
        return SCHEDULERS[self.name](
            optimizer,
            **by_name[self.name],
            warmup_t=min(warmup, steps),
            warmup_lr_init=self.warmup_lr,
            warmup_prefix=self.warmup_first,
            t_in_epochs=False,
        )
