"""Distillation: a network learns what a trained teacher predicts for the same mixed images.

Hard: a second head learns the predicted class. Soft: the only head learns the probabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

import timm
from torch import Tensor, nn, no_grad
from torch.nn.functional import cross_entropy, kl_div

from linvit.errors import SettingError, quoted, refuse
from linvit.files import reason_of
from linvit.ranges import Checked, OneOf, Range, Share
from linvit.tasks.initialization import initialize

HARD, SOFT = "hard", "soft"


@dataclass
class Distillation(Checked):
    """Settings of distillation.

    Hard: DeiT (arXiv 2012.12877), equation 3. The released code of CARE distills from the DeiT authors' regnety_160,
    which its paper does not mention. Soft: Hinton et al. (arXiv 1503.02531), the divergence of the probabilities at a
    temperature, times the square of that temperature.

    Args:
        teacher: A timm model by name, or with its own arguments, {name: …}; null for no distillation.
        checkpoint: Run or file of weights of the teacher; null uses timm's pretrained weights, downloaded if necessary.
        weight: Weight of the teacher's term in the loss, 0..1.
        kind: "hard" for networks with two heads, "soft" for networks with one.
        temperature: By which the logits of both are divided in soft distillation.
    """

    teacher: str | dict[str, Any] | None = None
    checkpoint: str | None = None
    weight: Share = 0.5
    kind: Annotated[str, OneOf((HARD, SOFT))] = HARD
    temperature: Annotated[float, Range(above=0)] = 1.0

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.teacher is None:
            raise SettingError(
                f"`checkpoint` is {self.checkpoint}, but there is no `teacher`: name one, or leave it out."
            )

    def build(self, network: nn.Module, num_classes: int, channels: int) -> "Teacher | None":
        """The teacher, if one is named; with kind "hard" the network then returns both heads' logits in training."""
        if self.teacher is None:
            return None
        student = cast(Any, network)  # timm's networks have methods that nn.Module does not declare
        two_heads = hasattr(network, "set_distilled_training") and isinstance(student.get_classifier(), tuple)
        arguments = dict(self.teacher) if isinstance(self.teacher, Mapping) else {"name": self.teacher}
        name, student_name = arguments.pop("name", None), type(network).__name__
        refuse(
            self.kind == HARD
            and not two_heads
            and (
                f"`teacher` is set, but {student_name} has one head and hard distillation needs two: set `kind=soft`,"
                " leave the teacher out, or choose a care_ model."
            ),
            self.kind == SOFT
            and two_heads
            and f"`kind` is {SOFT!r}, but {student_name} has two heads: set it to {HARD!r}, or create it with one.",
            (not isinstance(name, str) or not timm.is_model(name))
            and f"timm does not know the `teacher` {quoted(name)}: correct its name.",
        )
        assert isinstance(name, str)
        if two_heads:
            student.set_distilled_training(True)
        try:
            teacher = self._create(name, arguments, num_classes, channels)
        except TypeError as error:
            raise SettingError(
                f"The `teacher` {name} cannot be built with {', '.join(arguments)} ({reason_of(error)}): correct them."
            ) from error
        return Teacher(teacher, self.weight, self.temperature if self.kind == SOFT else None)

    def _create(self, name: str, arguments: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        if self.checkpoint is not None:
            teacher = timm.create_model(name, **arguments, num_classes=num_classes, in_chans=channels)
            initialize(teacher, self.checkpoint, same_classes=True)
            return teacher
        config = timm.get_pretrained_cfg(name)
        classes = config.num_classes if config is not None and config.has_weights else None
        refuse(
            classes is None
            and f"timm has no pretrained weights for the teacher {name}: set `checkpoint` to a file of them.",
            classes != num_classes
            and (
                f"The pretrained weights of the teacher {name} have {classes} classes, but the data has {num_classes}:"
                " set `checkpoint` to a teacher of this data."
            ),
        )
        try:
            return timm.create_model(name, **arguments, pretrained=True, in_chans=channels)
        except Exception as error:  # each hub client has its own
            source = config and (config.hf_hub_id or config.url)
            raise SettingError(
                f"The pretrained weights of the teacher {name} could not be downloaded"
                f" ({reason_of(error)}): fetch {source} by hand and set `checkpoint` to the file."
            ) from error


class Teacher:
    """Keeps a frozen network outside of the student's parameters and checkpoints.

    temperature: of soft distillation; None for hard distillation.
    """

    def __init__(self, network: nn.Module, weight: float, temperature: float | None = None) -> None:
        self.network = network.eval().requires_grad_(False)
        self.weight, self.temperature = weight, temperature

    @no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Its logits (batch, classes) of images (batch, channels, height, width)."""
        return self.network.to(images.device)(images)

    def mix(self, loss: Tensor, distilled: Tensor, images: Tensor) -> Tensor:
        """(1 − weight) · loss + weight · what the logits (batch, classes) differ from its predictions by.

        Hard: cross entropy with the predicted class. Soft: the divergence from its probabilities.
        """
        logits = self.logits(images)
        if self.temperature is None:
            difference = cross_entropy(distilled, logits.argmax(1))
        else:
            ours, its = ((y.float() / self.temperature).log_softmax(1) for y in (distilled, logits))
            difference = self.temperature**2 * kl_div(ours, its, reduction="batchmean", log_target=True)
        return (1 - self.weight) * loss + self.weight * difference
