"""Sampling images from noise with diffusers' samplers and classifier-free guidance, and the quality of such images.

The quality is a Fréchet distance in the features of a classifier, and the classes that it predicts.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics.image.fid import FrechetInceptionDistance

from linvit.errors import SettingError
from linvit.files import explained, replacing
from linvit.ranges import OneOf, Range, check

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
    check({"steps": Annotated[int, Range(2, TRAIN_STEPS)]}, {"steps": steps})
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
    missing = "Sampling images needs diffusers, which is not installed: pip install 'linvit[generation]'."
    with explained(missing, ImportError):
        from diffusers import DDIMScheduler, DDPMScheduler
    times, between = spaced(steps)
    about = {"num_train_timesteps": steps, "trained_betas": between.tolist(), "clip_sample": clips}
    kind: Callable[..., Any] = DDIMScheduler if sampler == "ddim" else DDPMScheduler
    variance = {"variance_type": "learned_range" if learn_sigma else "fixed_large"}
    scheduler = kind(**about, **({"set_alpha_to_one": True} if sampler == "ddim" else variance))
    scheduler.set_timesteps(steps)
    return times, scheduler


FILE = "classifier.safetensors"
EPOCHS, BATCH, RATE, FEATURES = 20, 64, 2e-3, 32


class SmallClassifier(nn.Module):
    """A small convolutional classifier for images of any size; a call returns the 32 features before the last layer.

    Args:
        channels: of the images.
        num_classes: number of classes.
    """

    num_features = FEATURES

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(32, FEATURES, 3, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * FEATURES, FEATURES),
            nn.GELU(),
        )
        self.head = nn.Linear(FEATURES, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Features (batch, 32)."""
        return self.body(images)

    def predict(self, images: Tensor) -> Tensor:
        """The predicted class of each image, int64 (batch,)."""
        logits: Tensor = self.head(self(images))
        return logits.argmax(-1)


class ReadyClassifier(nn.Module):
    """A network whose weights come with linvit; a call returns the features before its last layer.

    Args:
        name: of the network, with its tag, such as mavit_nano.cifar10.
        num_classes: number of classes, in the order of the network's.
    """

    network: Any  # of timm, whose methods nn.Module does not declare
    mean: Tensor
    std: Tensor

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        config = check_classifier(name, num_classes)
        self.network = timm.create_model(name, pretrained=True).eval().requires_grad_(False)
        self.num_features = int(self.network.head_hidden_size)
        self.register_buffer("mean", torch.tensor(config.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(config.std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Features (batch, num_features) of images in −1 … 1."""
        return self._head(images, True)

    def predict(self, images: Tensor) -> Tensor:
        """The predicted class of each image, int64 (batch,)."""
        return self._head(images, False).argmax(-1)

    def _head(self, images: Tensor, features: bool) -> Tensor:
        pixels = (images + 1) / 2
        maps = self.network.forward_features((pixels - self.mean) / self.std)
        return self.network.forward_head(maps, pre_logits=features)


Classifier = SmallClassifier | ReadyClassifier


def check_classifier(name: str, num_classes: int) -> PretrainedCfg:
    """The description of a network with its weights in this copy of linvit; raises ValueError for other names, and for
    a network with other classes."""
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if config is None or not config.file or not Path(config.file).is_file():
        raise SettingError(
            f"`classifier` is {name!r}, expected a network whose weights come with linvit (`linvit models` lists them):"
            " change it, or leave it out to train a small classifier."
        )
    if config.num_classes != num_classes:
        raise SettingError(
            f"`classifier` is {name!r} with {config.num_classes} classes, but the data have {num_classes}: change it,"
            " or leave it out to train a small classifier."
        )
    return config


def trained_classifier(dataset: Dataset[Any], channels: int, num_classes: int, folder: Path | None) -> SmallClassifier:
    """Trains a classifier on a data set of (image, label), the same for every run: seed 0, on the CPU.

    If a folder is given, the classifier is stored there and reused. Training takes 20 epochs, seconds for small images.
    """
    file = folder / FILE if folder else None
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
        torch.manual_seed(0)
        classifier = SmallClassifier(channels, num_classes)
        if file and file.is_file():
            damaged = (
                f"The classifier in {file} is damaged or belongs to other data: delete the file to train it again."
            )
            with explained(damaged, (SafetensorError, RuntimeError)):
                classifier.load_state_dict(load_file(file))
            return classifier.eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(classifier.parameters(), RATE)
        batches = DataLoader(dataset, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, EPOCHS * len(batches))
        for _ in range(EPOCHS):
            for images, labels in batches:
                optimizer.zero_grad()
                cross_entropy(classifier.head(classifier(images)), labels).backward()
                optimizer.step()
                schedule.step()
    if file:
        with replacing(file) as temporary:
            save_file(classifier.state_dict(), temporary)
    return classifier.eval().requires_grad_(False)


def distance_to(classifier: Classifier, real: Iterable[Tensor]) -> FrechetInceptionDistance:
    """A metric that has seen the real images: update it with generated ones, then compute.

    The Fréchet distance of FID (arXiv 1706.08500) in the classifier's features, not comparable with published FIDs.
    """
    measure = FrechetInceptionDistance(classifier, reset_real_features=False)
    for images in real:
        measure.update(images, real=True)
    return measure
