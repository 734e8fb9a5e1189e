"""Image generation: trains a network to predict noise in images, and measures the images that it generates."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from linvit.environment import replica
from linvit.errors import SettingError
from linvit.ranges import OneOf, Range
from linvit.tasks.measures import LOSS, Measure, counted
from linvit.tasks.sampling import (
    SAMPLERS,
    TRAIN_STEPS,
    Classifier,
    ReadyClassifier,
    Sampled,
    betas,
    check_classifier,
    distance_to,
    kept_signal,
    sample,
    seeded,
    trained_classifier,
)
from linvit.tasks.task import Task

GUIDED = 2.0


class Diffusion(Task):
    """Trains a network to predict the noise of DDPM's 1,000 steps; validation generates an image per held-out label.

    Args:
        network: A DiT, or another network that `sample` accepts.
        class_dropout: Share of labels dropped in training; without, there is no guidance to generate or measure with.
        generates: Whether validation generates an image per held-out one and measures them.
        sampler: ddim or ddpm.
        steps: Sampling steps while validating.
        clips: Whether sampling clips its estimate of the image to −1 … 1: true for pixels, false for latents.
        classifier: The network that measures generated images, one whose weights come with linvit, such as
            mavit_nano.cifar10; by default a small one that is trained on the training images.
        kwargs: Further arguments of Task.

    loss is the error of the noise on the held-out images, each at its own fixed time and noise. Of generated images,
    fid is the distance to the training images in the features of a classifier, generated_accuracy the share that it
    assigns to the class asked for; guided_fid and guided_accuracy are those at guidance 2. floor_fid is the
    distance of the held-out images, noise_fid that of noise, classifier_accuracy its accuracy on held-out images.
    """

    score = "fid"
    headline: tuple[str, ...] = ("fid", "generated_accuracy")
    measures: Mapping[str, Measure] = {
        **LOSS,
        "fid": Measure("FID-like", "number", lower_is_better=True, panel="FID-like"),
        "generated_accuracy": Measure("class accuracy", panel="accuracy"),
        "guided_fid": Measure("FID-like, guided", "number", lower_is_better=True, panel="FID-like"),
        "guided_accuracy": Measure("class accuracy, guided", panel="accuracy"),
        "floor_fid": Measure("FID-like of held-out images", "number", lower_is_better=True),
        "noise_fid": Measure("FID-like of noise", "number", lower_is_better=True),
        "classifier_accuracy": Measure("accuracy of the classifier"),
        **counted("images"),
    }

    def __init__(
        self,
        network: nn.Module,
        class_dropout: Annotated[float, Range(0, below=1)] = 0.1,
        generates: bool = True,
        sampler: Annotated[str, OneOf(SAMPLERS)] = "ddim",
        steps: Annotated[int, Range(2, TRAIN_STEPS)] = 50,
        clips: bool = True,
        classifier: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.class_dropout = class_dropout
        self.generates, self.sampler, self.steps, self.clips = generates, sampler, steps, clips
        if classifier is not None:
            check_classifier(classifier, cast(Sampled, network).num_classes)
        self.classifier = classifier
        if not generates:
            self.score, self.headline, self.measures = "loss", (), {**LOSS, **counted("images")}
        elif not class_dropout:
            self.measures = {name: about for name, about in self.measures.items() if not name.startswith("guided_")}
        self.noise_loss = DiffusionLoss()
        self.keep(lambda: {"loss": MeanMetric()})
        self.held_out: list[tuple[Tensor, Tensor, list[int]]] = []  # images, labels, numbers

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return self.network(images, times, labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        times = torch.randint(TRAIN_STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        hidden = torch.rand(len(images), device=images.device) < self.class_dropout
        labels = labels.masked_fill(hidden, cast(Sampled, self.network).num_classes)
        predicted = self(self.noise_loss.noised(images, times, noise), times, labels)
        return self.learn(self.noise_loss(predicted, images, times, noise).mean(), len(images))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        rank, world = replica()
        first = batch_idx * cast(Any, self.trainer).datamodule.val_batch_size
        numbers = [rank + world * place for place in range(first, first + len(images))]  # of the images, in all data
        generators = seeded(numbers)
        times = torch.cat([torch.randint(TRAIN_STEPS, (1,), generator=each) for each in generators]).to(images.device)
        noise = torch.stack([torch.randn(images.shape[1:], generator=each) for each in generators]).to(images)
        for kind, network in self.networks().items():
            predicted = network(self.noise_loss.noised(images, times, noise), times, labels)
            error = (predicted[:, : images.shape[1]].float() - noise).square().flatten(1).mean(1)
            self.kept(kind)["loss"].update(error)
        self.count.update(len(images))
        if self.generates:
            self.held_out.append((images, labels, numbers))

    def on_validation_epoch_end(self) -> None:
        self.generated = self.measure_generated() if self.generates else {}
        super().on_validation_epoch_end()
        self.held_out.clear()

    def measured(self, kind: str) -> dict[str, Any]:
        return super().measured(kind) | self.generated.get(kind, {})

    def measure_generated(self) -> dict[str, dict[str, float]]:
        """Measures of generated images, by kind of weights: the moving average if there is one, else the raw ones."""
        if self.trainer.world_size > 1:
            raise SettingError(
                "Generated images are measured in one process: set `generates=false`, or use one device."
            )
        source = cast(Any, self.trainer).datamodule
        training = source.train_set()
        classifier = self._classifier(training, source.channels, source.num_classes).to(self.device)
        real = (images.to(self.device) for images, _ in DataLoader(training, 256))
        distance = distance_to(classifier, real).to(self.device)

        def measured(batches: list[Tensor]) -> tuple[float, float]:
            right = total = 0
            finite = True
            distance.reset()
            for images, (_, labels, _) in zip(batches, self.held_out, strict=True):
                finite = finite and bool(classifier(images).isfinite().all())
                distance.update(images, real=False)
                right += int((classifier.predict(images) == labels).sum())
                total += len(labels)
            # LAPACK may crash on eigenvalues of matrices that are not finite
            return distance.compute().item() if finite else math.nan, right / total

        measures: dict[str, float] = {}
        kind = "ema" if self.ema else "raw"
        network = self.networks()[kind].eval()
        for name, guidance in (("", 1.0), ("guided_", GUIDED))[: 2 if self.class_dropout else 1]:
            batches = [
                sample(network, labels, self.steps, guidance, self.sampler, numbers, self.clips)
                for _, labels, numbers in self.held_out
            ]
            fid, accuracy = measured(batches)
            measures |= {f"{name}fid": fid, f"{name or 'generated_'}accuracy": accuracy}
        floor, accuracy = measured([images for images, _, _ in self.held_out])
        measures |= {"floor_fid": floor, "classifier_accuracy": accuracy}
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(images.shape, generator=generator).to(images) for images, _, _ in self.held_out]
        measures["noise_fid"] = measured(noise)[0]
        return {kind: measures}

    def _classifier(self, training: Dataset[Any], channels: int, num_classes: int) -> Classifier:
        if self.classifier:
            return ReadyClassifier(self.classifier, num_classes)
        return trained_classifier(training, channels, num_classes, Path(self.trainer.default_root_dir))


class DiffusionLoss(nn.Module):
    """DDPM's 1,000 steps: adds noise to images, and computes the loss of a prediction of the noise.

    Without learned variance, the mean squared error of the noise (DDPM, arXiv 2006.11239, equation 14). With it, plus
    0.001·L_vlb (Improved DDPM, arXiv 2102.09672, equations 15 and 16): the KL divergence of each step, in bits per
    dimension as in its released code, times 1,000 steps, in which the predicted mean is not trained. The samplers of
    diffusers read the learned variance, but it has no such loss.
    """

    signal: Tensor
    spread: Tensor
    log_beta: Tensor
    log_posterior: Tensor
    of_start: Tensor
    of_image: Tensor

    def __init__(self) -> None:
        super().__init__()
        beta, kept = betas(), kept_signal()
        before = torch.cat((kept.new_ones(1), kept[:-1]))
        posterior = beta * (1 - before) / (1 - kept)  # 0 at the first step; the released code uses the second's there
        tables = {
            "signal": kept.sqrt(),
            "spread": (1 - kept).sqrt(),
            "log_beta": beta.log(),
            "log_posterior": torch.cat((posterior[1:2], posterior[1:])).log(),
            "of_start": beta * before.sqrt() / (1 - kept),
            "of_image": (1 - before) * (1 - beta).sqrt() / (1 - kept),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def noised(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """Images after `times` steps (batch,): √ᾱ·image + √(1 − ᾱ)·noise."""
        return _at(self.signal, times) * images + _at(self.spread, times) * noise

    def forward(self, predicted: Tensor, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """The loss per image, float32 (batch,); predicted has as many channels as the noise, or twice as many."""
        predicted = predicted.float()
        guessed, variance = predicted[:, : noise.shape[1]], predicted[:, noise.shape[1] :]
        error = (guessed - noise).square().flatten(1).mean(1)
        return error + self._bound(guessed.detach(), variance, images, times, noise) if variance.shape[1] else error

    def _bound(self, guessed: Tensor, variance: Tensor, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        noised = self.noised(images, times, noise)
        start = (noised - _at(self.spread, times) * guessed) / _at(self.signal, times)
        true_mean, mean = (_at(self.of_start, times) * x + _at(self.of_image, times) * noised for x in (images, start))
        share = (variance + 1) / 2
        low, high = _at(self.log_posterior, times), _at(self.log_beta, times)
        log_variance = share * high + (1 - share) * low
        kl = 0.5 * (
            log_variance - low - 1 + (low - log_variance).exp() + (true_mean - mean).square() / log_variance.exp()
        )
        first = -_discrete_log_likelihood(images, mean, 0.5 * log_variance)
        nats = torch.where(times[:, None, None, None] == 0, first, kl)
        return nats.flatten(1).mean(1) / math.log(2)


def _at(table: Tensor, times: Tensor) -> Tensor:
    return table[times][:, None, None, None]


def _discrete_log_likelihood(images: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-likelihood of 8-bit values in −1 … 1 under a normal distribution; the outer bins extend to infinity."""
    normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)  # Task.learn reports NaN and infinity
    below = torch.where(images < -0.999, torch.zeros_like(images), normal.cdf(images - 1 / 255))
    above = torch.where(images > 0.999, torch.ones_like(images), normal.cdf(images + 1 / 255))
    return (above - below).clamp(min=1e-12).log()
