"""Optimizer and learning-rate schedule, shared by all tasks and set by the `optimizer` and `schedule` of a recipe."""

from dataclasses import dataclass, field
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import nn


@dataclass
class Optimizer:
    """timm's optimizer by name, without weight decay on biases, norms and other one-dimensional parameters.

    Args:
        name: A name that timm.optim.list_optimizers knows.
        lr: Peak learning rate, for a global batch of lr_batch images where that is set.
        lr_batch: The learning rate is lr × global batch / lr_batch; null means lr as it stands.
        weight_decay: Weight decay of the decayed parameters.
        layer_decay: Factor of the learning rate from each layer to the one below it; null means none.
        options: Further keyword arguments of the optimizer, betas for example.
    """

    name: str = "adamw"
    lr: float = 1e-3
    lr_batch: int | None = None
    weight_decay: float = 0.05
    layer_decay: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, network: nn.Module, global_batch: int) -> torch.optim.Optimizer:
        """Raises ValueError, listing the near names, for an unknown optimizer."""
        if self.name not in list_optimizers():
            raise ValueError(f"Unknown optimizer {self.name!r}: timm knows {', '.join(list_optimizers())}.")
        return create_optimizer_v2(
            network,
            opt=self.name,
            lr=self.lr * global_batch / self.lr_batch if self.lr_batch else self.lr,
            weight_decay=self.weight_decay,
            layer_decay=self.layer_decay,
            **self.options,
        )


@dataclass
class Schedule:
    """Linear warm-up, one cosine down to min_lr, and a cool-down that stays there; a function of the step alone.

    Args:
        warmup_epochs: Length of the warm-up in epochs, fractions allowed.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate after the last step of the cosine.
        cooldown_epochs: Length of the stay at min_lr at the end, part of the run's epochs.
        warmup_first: The cosine starts at its top after the warm-up (true), or runs underneath it from step 0 (false).
    """

    warmup_epochs: float = 0.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    cooldown_epochs: float = 0.0
    warmup_first: bool = False

    def build(self, optimizer: torch.optim.Optimizer, steps: int, steps_per_epoch: float) -> CosineLRScheduler:
        warmup = round(self.warmup_epochs * steps_per_epoch)
        steps -= round(self.cooldown_epochs * steps_per_epoch)
        return CosineLRScheduler(
            optimizer,
            t_initial=max(1, steps - warmup if self.warmup_first else steps),
            lr_min=self.min_lr,
            warmup_t=min(warmup, steps),
            warmup_lr_init=self.warmup_lr,
            warmup_prefix=self.warmup_first,
            t_in_epochs=False,
        )
