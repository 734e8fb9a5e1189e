"""The base of all tasks: a network with its moving average, optimizer and schedule, and reproducible steps."""

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import lightning
import numpy as np
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, distributed, nn
from torchmetrics import MeanMetric, Metric, SumMetric

from linvit.environment import replica, sharing
from linvit.errors import SettingError
from linvit.ranges import Checked, Count, OneOf, Range, Seed, some_of
from linvit.tasks.initialization import ALL, COPIED, initialize
from linvit.tasks.measures import AVERAGED, Measured
from linvit.tasks.optimization import Optimizer, Schedule

RECOMPUTED = ("nothing", "cheap", "blocks")


class Task(lightning.LightningModule, Checked):
    """Trains a network on the loss of a subclass; randomness and learning rate depend on the step alone.

    Args:
        network: The network to train.
        ema_decay: Decay per step of the weights' exponential moving average; null for no average.
        ema_warmup: Whether the decay rises from 0 to ema_decay as 1 − (1 + step)^(−2/3), which suits short runs.
        ema_batch: Batch size that ema_decay is meant for: the decay is ema_decay^(global batch / ema_batch). null uses
            ema_decay unchanged.
        channels_last: Whether weights and images have the memory format channels_last, often faster for convolutions;
            null means on GPUs in a training by `linvit train`, and otherwise no.
        recompute: What the backward pass computes again to need less memory: "nothing"; "cheap", all but products
            and attention, in networks of our families; "blocks", all of every block. The gradients are the same.
        compile: Whether the raw network is trained and validated through torch.compile; the saved weights keep their
            names.
        cpp: Whether the C++ kernels are built first, as by `linvit.kernels.cpu.build`: training on a CPU is faster with
            them, in all linear attention of this process.
        optimizer: Settings of the optimizer; by default those of `Optimizer`.
        schedule: Settings of the learning-rate schedule; by default those of `Schedule`.
        copied: Which weights a linearized network gets from a softmax network that it starts from: "all", "attention"
            (projections, norms and gates of all attention), "feed_forward" (everything else) or "nothing".
        frozen: Names of modules of the network, such as backbone.body or stages.0, that are not trained: they keep
            their weights and compute as in evaluation, batch norms with the statistics that they have.
        seed: Seed of stochastic depth, dropout and sampling, together with the step and the process
            (processes that share the rows of an image draw the same).

    A subclass calls `learn` on its training loss and passes its torchmetrics to `keep`, from which `measured` computes
    the measures; they are logged as val/NAME, with the prefix ema_ for the moving average. The class attribute
    `measures` declares them, `score` names the one that checkpoints are compared by, `headline` those in the line
    printed after each epoch, and `counted` names the samples of a validation (`count`).
    """

    measures: Measured
    score: str
    headline: tuple[str, ...]
    counted: str = "images"

    def __init__(
        self,
        network: nn.Module,
        ema_decay: Annotated[float, Range(0, below=1)] | None = None,
        ema_warmup: bool = True,
        ema_batch: Count | None = None,
        channels_last: bool | None = None,
        recompute: Annotated[str, OneOf(RECOMPUTED)] = RECOMPUTED[0],
        compile: bool = False,
        cpp: bool = False,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        copied: Annotated[str, OneOf(COPIED)] = ALL,
        frozen: Sequence[str] = (),
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.network = network.to(memory_format=self.memory_format)
        modules = {name: module for name, module in network.named_modules() if name}
        for name in frozen:
            if name not in modules:
                known = [module for module in modules if module.count(".") <= name.count(".")]
                raise SettingError(f"`frozen` has {name!r}, expected modules of the network: {some_of(known, name)}.")
            modules[name].requires_grad_(False).eval()
        if frozen and not any(parameter.requires_grad for parameter in network.parameters()):
            raise SettingError(f"`frozen` is {frozen}, which leaves nothing to train: name fewer modules.")
        self.ema = ModelEmaV3(self.network, decay=ema_decay, use_warmup=ema_warmup) if ema_decay else None
        if self.ema:
            self.ema.requires_grad_(False)  # else DDP waits for their gradients
        self.ema_batch = ema_batch
        if recompute != RECOMPUTED[0]:
            _set_recomputing(network, recompute)
        if compile:
            self.network.compile()  # in place, so that the keys of the weights stay
        if cpp:
            from linvit.kernels import cpu

            cpu.build()
        self.optimizer = optimizer or Optimizer()
        self.schedule = schedule or Schedule()
        self.schedule.check_peak(self.optimizer)
        self.copied = copied
        self.seed = seed
        self.rehearsing = False
        # saved with the weights, so that an epoch resumed in its middle reports the mean over all of it
        self.train_loss = MeanMetric()
        self.train_loss.persistent(True)
        self.count = exact_sum()

    def networks(self) -> dict[str, nn.Module]:
        """The networks to measure: raw, and ema if the recipe keeps a moving average."""
        return {"raw": self.network, "ema": self.ema.module} if self.ema else {"raw": self.network}

    @property
    def monitor(self) -> str:
        """The measure that chooses the best checkpoint: that of the moving average if there is one."""
        return AVERAGED + self.score if self.ema else self.score

    def start_from(self, source: str | Path, same_classes: bool | None = None) -> str:
        """Starts weights and moving average from a run or a file of weights, see `initialize`."""
        line = initialize(self.network, source, same_classes, self.copied)
        if self.ema:
            self.ema.set(self.network)
        return line

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainer = self.trainer
        source = getattr(trainer, "datamodule", None)
        per_process = source.batch_size if source else 1
        global_batch = per_process * replica()[1] * trainer.accumulate_grad_batches
        if self.ema and self.ema_batch:
            self.ema.decay **= global_batch / self.ema_batch
        optimizer = self.optimizer.build(self.network, global_batch)
        beside = list(self.beside())
        if beside:
            optimizer.add_param_group({"params": beside})
        steps = int(trainer.estimated_stepping_batches)
        trainer.fit_loop.setup_data()  # Lightning has counted the batches, unless max_steps alone bounds the run
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        self.rate = self.schedule.build(optimizer, steps, per_epoch)
        return optimizer

    def beside(self) -> Iterable[nn.Parameter]:
        """Parameters outside of the network, which are trained with it and without weight decay: none."""
        return ()

    def on_train_epoch_start(self) -> None:
        self.train_loss.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Randomness and learning rate are functions of the step, so there is no state of theirs to save or to lose.
        self.rate.step_update(self.global_step)
        sequence = np.random.SeedSequence([self.seed, self.trainer.fit_loop.total_batch_idx, replica()[0]])
        seed = int(sequence.generate_state(1)[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def learn(self, loss: Tensor, num_images: int) -> Tensor:
        """Logs the loss and returns it; raises FloatingPointError if it is not finite."""
        if self.rehearsing:
            return loss
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss became {loss.item()} at step {self.global_step}, so training stopped; the checkpoints before"
                " it stay: lower the learning rate, warm up longer or clip gradients, then train again with"
                " `resume=True`."
            )
        self.train_loss.update(loss.detach(), weight=num_images)
        self.log("train/loss_step", loss.detach(), prog_bar=True, batch_size=num_images)
        return loss

    def rehearse(self, batch: Any) -> None:
        """Computes the gradients of a batch and forgets them: weights, statistics and measures stay as they are."""
        before = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        self.rehearsing = True
        try:
            cast(Tensor, self.training_step(batch, 0)).backward()
        finally:
            self.rehearsing = False
            self.zero_grad()
            for buffer, kept in before:
                buffer.copy_(kept)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.ema:
            self.ema.update(self.network, step=self.global_step + 1)

    def on_train_epoch_end(self) -> None:
        self.log("train/loss", self.train_loss.compute())
        self.log("lr", max(group["lr"] for group in self.trainer.optimizers[0].param_groups))

    def on_validation_epoch_start(self) -> None:
        """Gives every process the buffers of process 0, which are saved: batch norms have their own in each."""
        if self.trainer.world_size > 1:
            for network in self.networks().values():
                for buffer in network.buffers():
                    distributed.broadcast(buffer, 0)

    def keep(self, metrics: Callable[[], dict[str, nn.Module]]) -> None:
        """Creates `self.metrics`: these torchmetrics for each of `networks`, reset after every validation."""
        self.metrics = nn.ModuleDict({kind: nn.ModuleDict(metrics()) for kind in self.networks()})

    def kept(self, kind: str) -> dict[str, Metric]:
        """The torchmetrics of one of `networks`."""
        return {name: cast(Metric, metric) for name, metric in cast(nn.ModuleDict, self.metrics[kind]).items()}

    def measured(self, kind: str) -> dict[str, Any]:
        """The measures of one of `networks` after a validation: by default the values of its torchmetrics."""
        return {name: metric.compute() for name, metric in self.kept(kind).items()}

    def on_validation_epoch_end(self) -> None:
        for kind in self.metrics:
            self.log_measures(kind, self.measured(kind))
            for metric in self.kept(kind).values():
                metric.reset()
        self.log(f"val/{self.counted}", self.count.compute() / sharing())
        self.count.reset()

    def log_measures(self, kind: str, measured: dict[str, Any]) -> None:
        """Logs the measures of one of `networks` as val/NAME, with its prefix."""
        for name, value in measured.items():
            self.log(f"val/{name if kind == 'raw' else f'{kind}_{name}'}", value, prog_bar=name == self.score)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for kind, network in self.networks().items():
            for name, parameter in network.named_parameters():
                if not torch.isfinite(parameter).all():
                    raise FloatingPointError(
                        f"The parameter {name} of the {kind} network is no longer finite at step {self.global_step}, so"
                        " nothing was saved; the checkpoints before it stay: lower the learning rate, then train again"
                        " with `resume=True`."
                    )


def _set_recomputing(network: nn.Module, what: str) -> None:
    """Raises SettingError for a network that cannot."""
    for method, arguments in (("set_recomputing", (what,)), ("set_grad_checkpointing", ())):
        able = next((module for module in network.modules() if hasattr(module, method)), None)
        if able is not None and (arguments or what == RECOMPUTED[-1]):
            with contextlib.suppress(AssertionError):  # timm's way of saying no
                getattr(able, method)(*arguments)
                return
    raise SettingError(
        f"`recompute` is {what!r}, which this network cannot: set it to {RECOMPUTED[0]}"
        f"{f', or {RECOMPUTED[-1]} for a network of timm' if what != RECOMPUTED[-1] else ''}."
    )


def exact_sum() -> SumMetric:
    """A sum in float64."""
    total = SumMetric()
    total.set_dtype(torch.float64)
    return total
