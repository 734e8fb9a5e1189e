"""Hard distillation: a second head learns the class that a trained teacher names for the same mixed images."""

from dataclasses import dataclass

import timm
from torch import Tensor, nn, no_grad
from torch.nn.functional import cross_entropy

from linvit.files import reason_of
from linvit.ranges import Checked, Share
from linvit.tasks.initialization import initialize


@dataclass
class Distillation(Checked):
    """A teacher for networks with two heads; without a name there is none.

    DeiT (arXiv 2012.12877), equation 3. The released code of CARE trains so with regnety_160 of the DeiT authors; its
    paper does not mention it.

    Args:
        teacher: A model's name for timm.create_model; null for no distillation.
        checkpoint: The teacher's run or file of weights; null takes timm's pretrained ones, downloaded if need be.
        weight: Share of the teacher in the loss.
    """

    teacher: str | None = None
    checkpoint: str | None = None
    weight: Share = 0.5

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.teacher is None:
            raise ValueError(
                f"`checkpoint` is {self.checkpoint}, but there is no `teacher`: name one, or leave it out."
            )

    def build(self, network: nn.Module, num_classes: int, channels: int) -> "Teacher | None":
        """Sets the network to give both heads' logits while training, and returns the teacher, if one is named.

        Raises ValueError for a network with one head, and for a teacher that is unknown, cannot be had or has other
        classes.
        """
        if self.teacher is None:
            return None
        if not hasattr(network, "set_distilled_training") or not isinstance(network.get_classifier(), tuple):
            raise ValueError(
                f"`teacher` is set, but {type(network).__name__} has one head and distillation needs two:"
                " set it to null, or choose a care_ model."
            )
        if not timm.is_model(self.teacher):
            raise ValueError(f"The `teacher` {self.teacher!r} is no model that timm knows: correct its name.")
        network.set_distilled_training(True)
        return Teacher(self._create(num_classes, channels), self.weight)

    def _create(self, num_classes: int, channels: int) -> nn.Module:
        if self.checkpoint is not None:
            teacher = timm.create_model(self.teacher, num_classes=num_classes, in_chans=channels)
            initialize(teacher, self.checkpoint, same_classes=True)
            return teacher
        config = timm.get_pretrained_cfg(self.teacher)
        if config is None or not config.has_weights:
            raise ValueError(
                f"timm has no pretrained weights for the teacher {self.teacher}: set `checkpoint` to a file of them."
            )
        if config.num_classes != num_classes:
            raise ValueError(
                f"The pretrained weights of the teacher {self.teacher} know {config.num_classes} classes, but the data"
                f" has {num_classes}: set `checkpoint` to a teacher of this data."
            )
        try:
            return timm.create_model(self.teacher, pretrained=True, in_chans=channels)
        except Exception as error:  # each hub client has its own
            raise ValueError(
                f"The pretrained weights of the teacher {self.teacher} could not be downloaded"
                f" ({reason_of(error)}): fetch {config.hf_hub_id or config.url} by hand and set"
                " `checkpoint` to the file."
            ) from error


class Teacher:
    """Keeps a frozen network outside of the student's parameters and checkpoints."""

    def __init__(self, network: nn.Module, weight: float) -> None:
        self.network = network.eval().requires_grad_(False)
        self.weight = weight

    @no_grad()
    def names(self, images: Tensor) -> Tensor:
        """The class (batch,), int64, of each image (batch, channels, height, width)."""
        return self.network.to(images.device)(images).argmax(1)

    def mix(self, loss: Tensor, distilled: Tensor, images: Tensor) -> Tensor:
        """(1 − weight) · loss + weight · cross entropy of the distilled logits (batch, classes) with what it names."""
        return (1 - self.weight) * loss + self.weight * cross_entropy(distilled, self.names(images))
