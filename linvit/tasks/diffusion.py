"""Image generation: a network learns to predict the noise in images, and is measured by what it draws."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from linvit.tasks.diffusion_loss import DiffusionLoss
from linvit.tasks.drawn import distance_to, trained_judge
from linvit.tasks.sampling import TRAIN_STEPS, known_sampler, sample
from linvit.tasks.task import Task

GUIDED = 2.0


class Diffusion(Task):
    """Trains a network on the noise of DDPM's 1,000 steps, and lets it draw an image for every held-out label.

    Args:
        network: A DiT, or anything that `sample` can use.
        class_dropout: Share of the labels that are hidden while training, which guidance needs.
        draws: Whether validation draws an image for each held-out one and measures them, see `measure_drawn`.
        sampler: ddim or ddpm.
        steps: Sampling steps while validating.
        clips: Whether sampling keeps the image it foresees in −1 … 1: pixels yes, latents no.
        kwargs: Those of Task.

    loss is the error of the noise on the held-out images, each at its own fixed time and noise. Of drawn images,
    fid is the distance to the training images in the features of a classifier of our own, drawn_accuracy the share
    that it reads as the class asked for; guided_fid and guided_accuracy are those at guidance 2. floor_fid is the
    distance of the held-out images, noise_fid that of noise, judge_accuracy the share of held-out images read rightly.
    """

    score = "fid"
    lowest = True

    def __init__(
        self,
        network: nn.Module,
        class_dropout: float = 0.1,
        draws: bool = True,
        sampler: str = "ddim",
        steps: int = 50,
        clips: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        if not 0 <= class_dropout < 1:
            raise ValueError(f"task.class_dropout is {class_dropout}, expected a share from 0 to below 1.")
        self.class_dropout = class_dropout
        self.draws, self.sampler, self.steps, self.clips = draws, known_sampler(sampler), steps, clips
        if not draws:
            self.score = "loss"
        self.noise_loss = DiffusionLoss()
        self.losses = nn.ModuleDict({kind: MeanMetric() for kind in self.networks()})
        self.images = SumMetric()
        self.held_out: list[tuple[Tensor, Tensor]] = []

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return self.network(images, times, labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        times = torch.randint(TRAIN_STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        hidden = torch.rand(len(images), device=images.device) < self.class_dropout
        labels = labels.masked_fill(hidden, self.network.num_classes)
        predicted = self(self.noise_loss.noised(images, times, noise), times, labels)
        return self.learn(self.noise_loss(predicted, images, times, noise).mean(), len(images))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        generator = torch.Generator().manual_seed(batch_idx)
        times = torch.randint(TRAIN_STEPS, (len(images),), generator=generator).to(images.device)
        noise = torch.randn(images.shape, generator=generator).to(images)
        for kind, network in self.networks().items():
            predicted = network(self.noise_loss.noised(images, times, noise), times, labels)
            error = (predicted[:, : images.shape[1]].float() - noise).square().flatten(1).mean(1)
            self.losses[kind].update(error)
        self.images.update(len(images))
        if self.draws:
            self.held_out.append((images, labels))

    def on_validation_epoch_end(self) -> None:
        drawn = self.measure_drawn() if self.draws else {}
        for kind, loss in self.losses.items():
            self.log_measures(kind, {"loss": loss.compute()} | drawn.get(kind, {}))
            loss.reset()
        self.log("val/images", self.images.compute())
        self.images.reset()
        self.held_out.clear()

    def measure_drawn(self) -> dict[str, dict[str, float]]:
        """The measures of drawn images by network; the moving average alone draws, where there is one."""
        if self.trainer.world_size > 1:
            raise ValueError("Drawn images are measured in one process: set task.draws=false, or trainer.devices=1.")
        source = self.trainer.datamodule
        training = source.train_set()
        folder = Path(self.trainer.default_root_dir)
        judge = trained_judge(training, source.channels, source.num_classes, folder).to(self.device)
        real = (images.to(self.device) for images, _ in DataLoader(training, 256))
        distance = distance_to(judge, real).to(self.device)

        def measured(batches: list[Tensor]) -> tuple[float, float]:
            right = total = 0
            finite = True
            distance.reset()
            for images, (_, labels) in zip(batches, self.held_out, strict=True):
                finite = finite and bool(judge(images).isfinite().all())
                distance.update(images, real=False)
                right += int((judge.read(images) == labels).sum())
                total += len(labels)
            # LAPACK may end the process on eigenvalues of what is not finite
            return distance.compute().item() if finite else math.nan, right / total

        found: dict[str, float] = {}
        kind = "ema" if self.ema else "raw"
        for name, guidance in (("", 1.0), ("guided_", GUIDED)):
            fid, accuracy = measured(self._draw(self.networks()[kind], guidance))
            found |= {f"{name}fid": fid, f"{name or 'drawn_'}accuracy": accuracy}
        floor, judged = measured([images for images, _ in self.held_out])
        found |= {"floor_fid": floor, "judge_accuracy": judged}
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(images.shape, generator=generator).to(images) for images, _ in self.held_out]
        found["noise_fid"] = measured(noise)[0]
        return {kind: found}

    def _draw(self, network: nn.Module, guidance: float) -> list[Tensor]:
        network.eval()
        return [
            sample(network, labels, self.steps, guidance, self.sampler, number, self.clips)
            for number, (_, labels) in enumerate(self.held_out)
        ]
