"""Hard distillation: a second head learns the class that a trained teacher predicts for the same mixed images."""

from dataclasses import dataclass
from typing import Any, cast

import timm
from torch import Tensor, nn, no_grad
from torch.nn.functional import cross_entropy

from linvit.files import reason_of
from linvit.ranges import Checked, Share
from linvit.tasks.initialization import initialize


@dataclass
class Distillation(Checked):
    """Settings of hard distillation, for networks with two heads.

    DeiT (arXiv 2012.12877), equation 3. The released code of CARE distills from the DeiT authors' regnety_160, which
    its paper does not mention.

    Args:
        teacher: Name of a timm model; null for no distillation.
        checkpoint: Run or file of weights of the teacher; null uses timm's pretrained weights, downloaded if necessary.
        weight: Weight of the teacher's term in the loss, 0..1.
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
        """The teacher, if one is named; the network then returns the logits of both heads while training.

        Raises ValueError for a network with one head, and for a teacher that is unknown, cannot be downloaded or has
        other classes.
        """
        if self.teacher is None:
            return None
        student = cast(Any, network)  # timm's networks have methods that nn.Module does not declare
        if not hasattr(network, "set_distilled_training") or not isinstance(student.get_classifier(), tuple):
            raise ValueError(
                f"`teacher` is set, but {type(network).__name__} has one head and distillation needs two:"
                " set it to null, or choose a care_ model."
            )
        if not timm.is_model(self.teacher):
            raise ValueError(f"timm does not know the `teacher` {self.teacher!r}: correct its name.")
        student.set_distilled_training(True)
        return Teacher(self._create(self.teacher, num_classes, channels), self.weight)

    def _create(self, name: str, num_classes: int, channels: int) -> nn.Module:
        if self.checkpoint is not None:
            teacher = timm.create_model(name, num_classes=num_classes, in_chans=channels)
            initialize(teacher, self.checkpoint, same_classes=True)
            return teacher
        config = timm.get_pretrained_cfg(name)
        if config is None or not config.has_weights:
            raise ValueError(
                f"timm has no pretrained weights for the teacher {name}: set `checkpoint` to a file of them."
            )
        if config.num_classes != num_classes:
            raise ValueError(
                f"The pretrained weights of the teacher {name} have {config.num_classes} classes, but the data"
                f" has {num_classes}: set `checkpoint` to a teacher of this data."
            )
        try:
            return timm.create_model(name, pretrained=True, in_chans=channels)
        except Exception as error:  # each hub client has its own
            raise ValueError(
                f"The pretrained weights of the teacher {name} could not be downloaded"
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
        """The predicted class of each image: int64 (batch,), from images (batch, channels, height, width)."""
        return cast(Tensor, self.network.to(images.device)(images).argmax(1))

    def mix(self, loss: Tensor, distilled: Tensor, images: Tensor) -> Tensor:
        """(1 − weight) · loss + weight · cross entropy of the logits (batch, classes) with its predictions."""
        return (1 - self.weight) * loss + self.weight * cross_entropy(distilled, self.names(images))
