"""Optimizer and learning-rate schedule, shared by all tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from linvit.files import reason_of
from linvit.ranges import Amount, Checked, Count, OneOf, Range

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def all_but_norms(network: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters in two groups: those of norm layers, without weight decay, and all others."""
    norms = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, NORMS)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if id(parameter) in norms], "weight_decay": 0.0},
        {"params": [parameter for parameter in trained if id(parameter) not in norms]},
    ]


NOT_DECAYED: Mapping[str, dict[str, Any]] = {
    "vectors": {},
    "norms": {"param_group_fn": all_but_norms},
    "none": {"filter_bias_and_bn": False},
}
SCHEDULERS: Mapping[str, type[Scheduler]] = {
    "cosine": CosineLRScheduler,
    "steps": MultiStepLRScheduler,
    "poly": PolyLRScheduler,
}


@dataclass
class Optimizer(Checked):
    """timm's optimizer by name; raises ValueError for an unknown name, and for options that it does not have.

    Args:
        name: A name that timm.optim.list_optimizers knows.
        lr: Peak learning rate, for a global batch of lr_batch images where that is set.
        lr_batch: The learning rate is lr × global batch / lr_batch; null means lr as it stands.
        weight_decay: Weight decay of the decayed parameters.
        not_decayed: Which ones are not: vectors (biases, norms, scales: all of one dimension), norms (the parameters
            of norm layers alone, as detectors are trained) or none.
        layer_decay: Factor of the learning rate from each layer to the one below it; null means none.
        options: Further keyword arguments of the optimizer, betas for example.
    """

    name: str = "adamw"
    lr: Annotated[float, Range(above=0)] = 1e-3
    lr_batch: Count | None = None
    weight_decay: Annotated[float, Range(0)] = 0.05
    not_decayed: Annotated[str, OneOf(tuple(NOT_DECAYED))] = "vectors"
    layer_decay: Annotated[float, Range(above=0, most=1)] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in list_optimizers():
            near = ", ".join(get_close_matches(self.name, list_optimizers(), n=5, cutoff=0.0))
            raise ValueError(
                f"Unknown optimizer {self.name!r}: choose one of timm.optim.list_optimizers(), {near} for example."
            )
        if self.layer_decay is not None and self.not_decayed == "norms":
            raise ValueError("`layer_decay` and `not_decayed=norms` exclude each other: leave one out.")
        if self.options:
            self._check_options()

    def _check_options(self) -> None:
        try:
            create_optimizer_v2(
                [nn.Parameter(torch.zeros(2, 2))], self.name, self.lr, self.weight_decay, **self.options
            )
        except Exception as error:  # the kind depends on the optimizer
            raise ValueError(
                f"The optimizer {self.name} refuses the `options` {self.options} ({reason_of(error)}): correct them."
            ) from error

    def build(self, network: nn.Module, global_batch: int) -> torch.optim.Optimizer:
        return create_optimizer_v2(
            network,
            opt=self.name,
            lr=self.lr * global_batch / self.lr_batch if self.lr_batch else self.lr,
            weight_decay=self.weight_decay,
            layer_decay=self.layer_decay,
            **NOT_DECAYED[self.not_decayed],
            **self.options,
        )


@dataclass
class Schedule(Checked):
    """Linear warm-up and the way down to min_lr, a function of the step alone.

    Args:
        name: cosine; steps (times decay_rate at each of decay_epochs); or poly, (1 − step / steps)^power.
        warmup_epochs: Length of the warm-up in epochs, fractions allowed.
        warmup_steps: Length of the warm-up in steps, in place of warmup_epochs.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate after the last step of cosine or poly.
        cooldown_epochs: Length of the stay at min_lr at the end, part of the run's epochs.
        warmup_first: The way down starts at its top after the warm-up (true), or runs underneath it from step 0.
        decay_epochs: Where steps go down, in epochs.
        decay_rate: By which factor steps go down.
        power: How poly bends; 1 is a straight line.
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
        """Raises ValueError where the way down would be a way up; where the batch decides the rate, it may be one."""
        if optimizer.lr_batch is None and self.name != "steps" and self.min_lr > optimizer.lr:
            raise ValueError(
                f"`min_lr` is {self.min_lr:g}, above the peak learning rate of {optimizer.lr:g}: set it lower."
            )

    def build(self, optimizer: torch.optim.Optimizer, steps: int, steps_per_epoch: float) -> Scheduler:
        """timm's scheduler over so many steps."""
        warmup = round(self.warmup_epochs * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps
        steps -= round(self.cooldown_epochs * steps_per_epoch)
        curve = {"t_initial": max(2, steps - warmup if self.warmup_first else steps), "lr_min": self.min_lr}
        # timm goes down one step before the one that is named
        falls = [round(epoch * steps_per_epoch) + 1 for epoch in sorted(self.decay_epochs)]
        arguments: dict[str, Any] = {
            "cosine": curve,
            "steps": {"decay_t": falls, "decay_rate": self.decay_rate},
            "poly": curve | {"power": self.power},
        }[self.name]
        return SCHEDULERS[self.name](
            optimizer,
            **arguments,
            warmup_t=min(warmup, steps),
            warmup_lr_init=self.warmup_lr,
            warmup_prefix=self.warmup_first,
            t_in_epochs=False,
        )
