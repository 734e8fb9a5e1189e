"""The loss of noise prediction: the squared error of the noise, plus a variational bound if the variance is learned."""

import math

import torch
from torch import Tensor, nn

from linvit.tasks.sampling import betas, kept_signal


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
