"""Image classification: one network, its moving average, the loss and top-1/top-5."""

import difflib
import inspect
import math
import random
import re
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.tasks.distillation import Distillation
from linvit.tasks.initialization import initialize
from linvit.tasks.optimization import Optimizer, Schedule


class Classification(lightning.LightningModule):
    """Trains timm.create_model(**model) on (images, targets), and measures the raw network and its moving average.

    Args:
        model: `name` and further keyword arguments of timm.create_model; the data gives num_classes and in_chans.
        num_classes: Number of classes of the data.
        channels: Number of channels of the data's images.
        label_smoothing: Share of the target spread over all classes.
        mixup: Alpha of mixup, 0 for none.
        cutmix: Alpha of CutMix, 0 for none.
        mix_probability: Share of the batches that are mixed.
        mix_switch: Share of CutMix among the mixed batches where both are on.
        ema_decay: Decay a step of the weights' exponential moving average; null for no average.
        ema_warmup: The decay rises from 0 to ema_decay, 1 − (1 + step)^(−2/3), so that short runs average too.
        ema_batch: The decay is ema_decay^(global batch / ema_batch); null means ema_decay as it stands.
        channels_last: Keeps the channels of weights and images innermost in memory, which convolutions like.
        compile: Trains and validates the raw network through torch.compile; the saved weights keep their names.
        seed: Stochastic depth and mixing of step n are drawn from (seed, n, process).

    Raises ValueError for a model that is unknown to timm or contradicts the data.
    """

    def __init__(
        self,
        model: dict[str, Any],
        num_classes: int,
        channels: int = 3,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_probability: float = 1.0,
        mix_switch: float = 0.5,
        ema_decay: float | None = None,
        ema_warmup: bool = True,
        ema_batch: int | None = None,
        channels_last: bool = False,
        compile: bool = False,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        distillation: Distillation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.network = build_network(model, num_classes, channels).to(memory_format=self.memory_format)
        self.ema = ModelEmaV3(self.network, decay=ema_decay, use_warmup=ema_warmup) if ema_decay else None
        if self.ema:
            self.ema.requires_grad_(False)  # else DDP waits for their gradients
        self.ema_batch = ema_batch
        if compile:
            self.network.compile()  # in place, so that the keys of the weights stay
        self.optimizer = optimizer or Optimizer()
        self.schedule = schedule or Schedule()
        self.seed = seed
        self.mix = _mixing(mixup, cutmix, mix_probability, mix_switch, label_smoothing, num_classes)
        if self.mix:
            self.loss: nn.Module = SoftTargetCrossEntropy()
        else:
            self.loss = LabelSmoothingCrossEntropy(label_smoothing) if label_smoothing else nn.CrossEntropyLoss()

        self.teacher = distillation.build(self.network, num_classes, channels) if distillation else None

        # saved with the weights, so that an epoch resumed in its middle reports the mean over all of it
        self.train_loss = MeanMetric()
        self.train_loss.persistent(True)
        self.measures = nn.ModuleDict({kind: _measures(num_classes) for kind in self.networks()})
        self.images = SumMetric()

    def networks(self) -> dict[str, nn.Module]:
        """The networks to measure: raw, and ema where the recipe keeps a moving average."""
        return {"raw": self.network, "ema": self.ema.module} if self.ema else {"raw": self.network}

    def start_from(self, source: str | Path) -> str:
        """Takes weights and moving average from a run or file of weights, see initialize."""
        line = initialize(self.network, source)
        if self.ema:
            self.ema.set(self.network)
        return line

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.contiguous(memory_format=self.memory_format))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainer = self.trainer
        per_process = trainer.datamodule.batch_size if trainer.datamodule else 1
        global_batch = per_process * trainer.world_size * trainer.accumulate_grad_batches
        if self.ema and self.ema_batch:
            self.ema.decay **= global_batch / self.ema_batch
        optimizer = self.optimizer.build(self.network, global_batch)
        steps = int(trainer.estimated_stepping_batches)
        trainer.fit_loop.setup_data()  # Lightning has counted the batches, unless max_steps alone bounds the run
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        self.rate = self.schedule.build(optimizer, steps, per_epoch)
        return optimizer

    def on_train_epoch_start(self) -> None:
        self.train_loss.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Randomness and learning rate are functions of the step, so there is no state of theirs to save or to lose.
        self.rate.step_update(self.global_step)
        drawn = np.random.SeedSequence([self.seed, self.trainer.fit_loop.total_batch_idx, self.global_rank])
        seed = int(drawn.generate_state(1)[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        if self.mix:
            even = len(targets) // 2 * 2  # Mixup pairs images; an unreadable one can leave an odd batch
            images, targets = self.mix(images[:even].clone(), targets[:even])
        loss = self._loss(images, targets)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss became {loss.item()} at step {self.global_step}, so training stopped and the checkpoints"
                " before it stay: lower optimizer.lr, raise schedule.warmup_epochs or set trainer.gradient_clip_val,"
                " then go on with --resume."
            )
        self.train_loss.update(loss.detach(), weight=len(images))
        self.log("train/loss_step", loss.detach(), prog_bar=True)
        return loss

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        if self.teacher is None:
            return self.loss(self(images), targets)
        logits, distilled = self(images)
        return self.teacher.mix(self.loss(logits, targets), distilled, images)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.ema:
            self.ema.update(self.network, step=self.global_step + 1)

    def on_train_epoch_end(self) -> None:
        self.log("train/loss", self.train_loss.compute())
        self.log("lr", max(group["lr"] for group in self.trainer.optimizers[0].param_groups))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        self.images.update(len(targets))
        images = images.contiguous(memory_format=self.memory_format)
        for kind, network in self.networks().items():
            logits = network(images)
            measures = self.measures[kind]
            measures["loss"].update(nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
            measures["top1"].update(logits, targets)
            measures["top5"].update(logits, targets)

    def on_validation_epoch_end(self) -> None:
        for kind, measures in self.measures.items():
            for name, measure in measures.items():
                key = name if kind == "raw" else f"{kind}_{name}"
                self.log(f"val/{key}", measure.compute(), prog_bar=name == "top1")
                measure.reset()
        self.log("val/images", self.images.compute())
        self.images.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for kind, network in self.networks().items():
            for name, parameter in network.named_parameters():
                if not torch.isfinite(parameter).all():
                    raise FloatingPointError(
                        f"The parameter {name} of the {kind} network is no longer finite at step {self.global_step}, so"
                        " nothing was saved and the checkpoints before it stay: lower optimizer.lr, then --resume."
                    )


def build_network(model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
    """timm.create_model(**model) for the data's classes and channels; raises ValueError where they contradict."""
    arguments = dict(model)
    name = arguments.pop("name", None)
    if not name:
        raise ValueError("The recipe names no model: add `model: {name: …}` with a name that `linvit models` lists.")
    for key, given in (("num_classes", num_classes), ("in_chans", channels)):
        if arguments.setdefault(key, given) != given:
            raise ValueError(
                f"model.{key} is {arguments[key]} but the data has {given}: remove model.{key}, the data sets it."
            )
    check_model(name)
    try:
        return timm.create_model(name, **arguments)
    except TypeError as error:
        unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        owner = unknown and getattr(inspect.getmodule(timm.model_entrypoint(name)), unknown[1], None)
        if owner is None:
            raise
        near = difflib.get_close_matches(unknown[2], inspect.signature(owner).parameters, n=1, cutoff=0.0)
        raise ValueError(f"{name} has no argument {unknown[2]!r}: did you mean 'model.{near[0]}'?") from error


def check_model(name: str) -> None:
    """Raises ValueError, offering the nearest name, for a model that timm does not know."""
    if not timm.is_model(name) and ":" not in name:
        near = difflib.get_close_matches(name, timm.list_models(), n=1, cutoff=0.0)
        raise ValueError(f"Unknown model {name!r}: did you mean {near[0]!r}? `linvit models` lists ours.")


def _mixing(
    mixup: float, cutmix: float, probability: float, switch: float, smoothing: float, num_classes: int
) -> Mixup | None:
    if not (mixup or cutmix):
        return None
    return Mixup(mixup, cutmix, None, probability, switch, "batch", True, smoothing, num_classes)


def _measures(num_classes: int) -> nn.ModuleDict:
    def accuracy(top_k: int) -> MulticlassAccuracy:
        return MulticlassAccuracy(num_classes, top_k=min(top_k, num_classes), average="micro")

    return nn.ModuleDict({"loss": MeanMetric(), "top1": accuracy(1), "top5": accuracy(5)})
