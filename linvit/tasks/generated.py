"""Quality of generated images: a Fréchet distance in the features of a classifier, and the classes that it predicts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from linvit.files import replacing

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
        features: Tensor = self.body(images)
        return features

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
        values: Tensor = self.network.forward_head(maps, pre_logits=features)
        return values


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
            try:
                classifier.load_state_dict(load_file(file))
            except (SafetensorError, RuntimeError) as error:
                raise ValueError(
                    f"The classifier in {file} is damaged or belongs to other data: delete the file to train it again."
                ) from error
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
