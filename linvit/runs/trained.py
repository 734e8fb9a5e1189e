"""A trained network with what its checkpoint says about it: what everything that uses a run begins with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from timm.data import ImageNetInfo, resolve_data_config
from torch import nn

from linvit.data.images.image import Preprocessing
from linvit.errors import SettingError
from linvit.models.by_name import bundled_weights
from linvit.runs.folder import read_curves
from linvit.tasks.classification import Classification
from linvit.tasks.task import Task

WEIGHTS = {"raw": "raw weights", "ema": "moving average"}


@dataclass(repr=False)
class Trained:
    """A trained network with its task, class names, preprocessing and recipe.

    path: the checkpoint or weight file; None for random weights. recipe: all values of the run's recipe; None for
    weights without one. name: the network's name in tables and reports. stored: further facts about the data from the
    checkpoint, such as the category ids of a detector.
    """

    task: Task
    class_names: list[str]
    preprocessing: Any
    path: Path | None
    name: str
    recipe: dict[str, Any] | None = None
    stored: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.class_names)} classes, path={str(self.path)!r})"

    @property
    def folder(self) -> Path:
        """The run's folder, or the folder of the weight file; below runs/ without a file and for one in the package."""
        if self.path is None:
            return Path("runs") / "untrained" / self.name.replace("/", "_")
        if self.path == bundled_weights(self.name):
            return Path("runs") / self.name
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else self.path.parent

    @property
    def network(self) -> nn.Module:
        """The network in evaluation mode, with the moving average of its weights if there is one."""
        return list(self.task.networks().values())[-1].eval()

    @property
    def weights(self) -> str:
        """Which weights `network` has, in words."""
        if self.path is None:
            return "random weights"
        return WEIGHTS[list(self.task.networks())[-1]]

    @property
    def history(self) -> list[dict[str, float]]:
        """The training curves, one row per epoch; empty if the folder has no metrics.csv."""
        return [] if self.path is None else read_curves(self.folder)

    def placed_network(self, weights: str | None = None) -> tuple[nn.Module, torch.device]:
        """The network with "raw" or "ema" weights (default: as `network`), on a GPU if there is one, and its device."""
        networks = self.task.networks()
        if weights is not None and weights not in networks:
            raise SettingError(
                f"`weights` is {weights!r}, but the checkpoint contains {' and '.join(networks)}: choose one."
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network = self.network if weights is None else networks[weights]
        return network.to(device).eval(), device


def classifier_parts(network: nn.Module) -> tuple[Classification, list[str], Preprocessing]:
    """Task, class names and preprocessing of a timm classifier, as timm knows them."""
    count = cast(int, network.num_classes)
    config = resolve_data_config(model=network)
    preprocessing = Preprocessing(
        tuple(config["input_size"][1:]),
        tuple(config["mean"]),
        tuple(config["std"]),
        config["interpolation"],
        config["crop_pct"],
    )
    names = list(cast(Mapping[str, Any], network.pretrained_cfg).get("label_names", ()))
    if len(names) != count:
        imagenet = ImageNetInfo("imagenet-1k")
        names = [imagenet.index_to_description(index) if count == 1000 else str(index) for index in range(count)]
    return Classification(network, max(1, count), preprocessing.channels), names, preprocessing
