"""Sampling images from noise with diffusers' samplers and classifier-free guidance."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Protocol, cast

import torch
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.ranges import OneOf, check

TRAIN_STEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02  # of the linear schedule of DDPM (arXiv 2006.11239), which DiT trains on
SAMPLERS = ("ddim", "ddpm")


class Sampled(Protocol):
    """A network that can be sampled from: it predicts noise, (batch, channels or twice as many, side, side)."""

    channels: int
    input_size: int
    num_classes: int
    learn_sigma: bool

    def __call__(self, images: Tensor, times: Tensor, labels: Tensor, /) -> Tensor: ...


def betas() -> Tensor:
    """The variance that each of the 1,000 steps adds, float64 (1000,)."""
    return torch.linspace(FIRST_BETA, LAST_BETA, TRAIN_STEPS, dtype=torch.float64)


def kept_signal() -> Tensor:
    """ᾱ: the share of an image's variance that remains after each step, float64 (1000,)."""
    return (1 - betas()).cumprod(0)


def spaced(steps: int) -> tuple[Tensor, Tensor]:
    """`steps` evenly spaced times out of the 1,000, including the first and last, and the betas between them.

    Improved DDPM (arXiv 2102.09672), section 4: the shorter process has the same ᾱ at the times that it keeps.
    """
    if not 2 <= steps <= TRAIN_STEPS:
        raise SettingError(f"`steps` is {steps}, expected from 2 to {TRAIN_STEPS} sampling steps: change it.")
    times = torch.linspace(0, TRAIN_STEPS - 1, steps, dtype=torch.float64).round().long()
    kept = kept_signal()[times]
    before = torch.cat((kept.new_ones(1), kept[:-1]))
    return times, 1 - kept / before


def seeded(seeds: Iterable[int]) -> list[torch.Generator]:
    """A generator on the CPU for each seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@torch.no_grad()
def sample(
    network: nn.Module,
    labels: Tensor,
    steps: int = 50,
    guidance: float = 1.0,
    sampler: str = "ddim",
    seed: int | Iterable[int] = 0,
    clips: bool = True,
) -> Tensor:
    """One image for each label, (batch, channels, side, side), in the range that the network was trained on.

    Args:
        network: a DiT in evaluation mode, or anything with its channels, input_size, num_classes and learn_sigma.
        labels: int64 (batch,).
        steps: number of sampling steps, from 2 to 1,000.
        guidance: scale g of classifier-free guidance, unconditional + g·(conditional − unconditional); 1 is off.
        sampler: "ddim" (arXiv 2010.02502, no noise on the way) or "ddpm", with learned variance if there is one.
        seed: seed of all noise, which is sampled on the CPU; or a seed for the noise of each image.
        clips: whether each step's estimate of the image is clipped to −1 … 1, as it should be for pixels, not latents.
    """
    dit = cast(Sampled, network)
    check({"sampler": Annotated[str, OneOf(SAMPLERS)]}, {"sampler": sampler})
    times, scheduler = _scheduler(sampler, steps, clips, dit.learn_sigma)
    from diffusers.utils.torch_utils import randn_tensor

    device, dtype = labels.device, next(network.parameters()).dtype
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seeded(seed)
    shape = (len(labels), dit.channels, dit.input_size, dit.input_size)
    images: Tensor = randn_tensor(shape, generator).to(device, dtype)
    for step in scheduler.timesteps:
        time = times[step].to(device).expand(len(labels))
        noise = _noise(dit, images, time, labels, guidance)
        if sampler == "ddim":
            # a clipped image needs its own noise: the network's would leave what was cut off in the next image
            step_noise = noise[:, : dit.channels]
            images = scheduler.step(step_noise, step, images, use_clipped_model_output=clips).prev_sample
        else:
            images = scheduler.step(noise, step, images, generator=generator).prev_sample
    return images


def _noise(network: Sampled, images: Tensor, time: Tensor, labels: Tensor, guidance: float) -> Tensor:
    if guidance == 1:
        return network(images, time, labels)
    nothing = torch.full_like(labels, network.num_classes)
    both = network(torch.cat((images, images)), torch.cat((time, time)), torch.cat((labels, nothing)))
    guided, without = both.chunk(2)
    channels = network.channels
    noise = without[:, :channels] + guidance * (guided[:, :channels] - without[:, :channels])
    return torch.cat((noise, guided[:, channels:]), 1)


def _scheduler(sampler: str, steps: int, clips: bool, learn_sigma: bool) -> tuple[Tensor, Any]:
    try:
        from diffusers import DDIMScheduler, DDPMScheduler
    except ImportError as error:
        raise ValueError(
            "Sampling images needs diffusers, which is not installed: pip install 'linvit[generation]'."
        ) from error
    times, between = spaced(steps)
    about = {"num_train_timesteps": steps, "trained_betas": between.tolist(), "clip_sample": clips}
    kind: Callable[..., Any] = DDIMScheduler if sampler == "ddim" else DDPMScheduler
    variance = {"variance_type": "learned_range" if learn_sigma else "fixed_large"}
    scheduler = kind(**about, **({"set_alpha_to_one": True} if sampler == "ddim" else variance))
    scheduler.set_timesteps(steps)
    return times, scheduler
