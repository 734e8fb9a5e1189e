"""Transfer: a linear network learns the features of the network that it was made from."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.ranges import Range, Some
from linvit.tasks.students import StudentTask, relative_errors

Place = Annotated[int, Range(-1_000, 999)]


class Transfer(StudentTask):
    """Trains a whole student, end to end, on the features of its frozen teacher; images need no labels.

    Layers after those features, such as a classifier, are not trained.

    Args:
        network: The student, a linearized network.
        original: The teacher as a network; it is stored in checkpoints.
        teacher: Run or file of weights of the teacher; null for initial weights.
        features: Numbers of blocks (in networks with stages, of stages), whose maps are those that a frozen head, such
            as a detector's, reads; -1 is the last. null for the features before pooling and classifier.
        kwargs: Further arguments of Task.

    The loss, the measure error, is |student - teacher|² / |teacher|² of each map, averaged over maps and images; worst
    is the largest of the maps.
    """

    lesson = "the features of a new, untrained network"

    def __init__(
        self,
        network: nn.Module,
        original: nn.Module,
        teacher: str | None = None,
        features: Annotated[Sequence[Place], Some()] | None = None,
        **kwargs: Any,
    ) -> None:
        self.features = None if features is None else list(features)
        super().__init__(network, original, teacher, **kwargs)
        count = 0 if features is None else len(cast(Any, network).feature_info)
        if features is not None and not all(-count <= place < count for place in features):
            raise SettingError(
                f"`features` is {list(features)}, expected numbers from {-count} to {count - 1}: change it."
            )

    @property
    def names(self) -> list[str]:
        """The maps."""
        return ["last"] if self.features is None else list(map(str, self.features))

    def setup(self, stage: str) -> None:
        """Leaves what the features do not depend on as it is; processes would wait for its gradients."""
        if stage != "fit":
            return
        about = cast(Any, self.trainer).datamodule.preprocessing
        images = torch.zeros(2, about.channels, *about.size, dtype=next(self.network.parameters()).dtype)
        training, parameters = self.network.training, list(self.network.parameters())
        total = torch.stack([y.sum() for y in self.described(self.network.eval(), images)]).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        self.network.train(training)

    def described(self, network: nn.Module, images: Tensor) -> list[Tensor]:
        """The features of images (batch, channels, height, width), one tensor (batch, …) for each of `names`."""
        images = images.contiguous(memory_format=self.memory_format)
        timms = cast(Any, network)
        if self.features is None:
            return [timms.forward_features(images)]
        count = len(timms.feature_info)
        places = [place % count if place < 0 else place for place in self.features]
        unique = sorted(set(places))
        maps = timms.forward_intermediates(images, indices=unique, intermediates_only=True)
        return [maps[unique.index(place)] for place in places]

    def errors(self, network: nn.Module, images: Tensor) -> Tensor:
        """The relative error of each map and image, (maps, batch), for a student with any weights."""
        with torch.no_grad():
            expected = self.described(self.original, images)
        given = self.described(network, images)
        return torch.stack([relative_errors(*pair) for pair in zip(given, expected, strict=True)])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images = batch[0]
        return self.learn(self.errors(self.network, images).mean(), len(images))
