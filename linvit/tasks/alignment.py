"""Alignment: each linear attention learns, by itself, what the attention that it replaces computes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers.operator import Lesson, Operator
from linvit.ranges import Count, OneOf
from linvit.tasks.initialization import ALL, FEED_FORWARD
from linvit.tasks.students import StudentTask, relative_errors

OUTPUTS, MAPS = "outputs", "maps"


class Alignment(StudentTask):
    """Trains the linear attention of all blocks at once on images without labels, each block by itself.

    The images go through the student, but every attention hands on what the teacher's computes, so that all blocks see
    what they see in the teacher and none waits for another. Nothing else is trained, and nothing is propagated from
    block to block: of one block at a time, and of a piece of the batch, the activations are kept. All other tensors
    are those of the teacher, not copies. Dropout and stochastic depth are off.

    Args:
        network: The student, a linearized network that shares all tensors but those of its new attention with original.
        original: The teacher as a network; it is stored in checkpoints.
        lessons: What each new attention has to learn.
        teacher: Run or file of weights of the teacher; null for initial weights.
        match: "outputs" of the attention, or its "maps" (scores), which only train queries and keys; use
            optimizer.weight_decay=0 then, or what is not trained shrinks.
        pieces: Number of pieces of a batch whose gradients are computed one after the other, which saves memory: with
            16, a step needs less than 1.3 times the memory of the teacher's inference, if its batch needs several times
            that of its weights (DINOv2-B, 256 images, bf16-mixed on a GPU: 1.35 times). 1 is four times as fast there.
        copied: Which of the teacher's weights the student starts from: "all", or "feed_forward" for new attention.
        kwargs: Further arguments of Task.

    The loss, the measure error, is |student - teacher|² / |teacher|², averaged over blocks and images; worst is the
    largest of the blocks.
    """

    lesson = "what new, untrained attention computes"

    def __init__(
        self,
        network: nn.Module,
        original: nn.Module,
        lessons: Sequence[Lesson],
        teacher: str | None = None,
        match: Annotated[str, OneOf((OUTPUTS, MAPS))] = OUTPUTS,
        pieces: Count = 16,
        copied: Annotated[str, OneOf((ALL, FEED_FORWARD))] = ALL,
        compile: bool = False,
        **kwargs: Any,
    ) -> None:
        if compile:
            raise SettingError(
                "`compile` is true, but each block computes its gradient by itself, which cannot be compiled: leave it"
                " out."
            )
        self.lessons = list(lessons)
        super().__init__(network, original, teacher, copied=copied, **kwargs)
        self.match, self.pieces = match, pieces
        scoring = [lesson.scoring for lesson in self.lessons if match == MAPS and lesson.scoring is not None]
        self.scoring = nn.ModuleList(scoring).requires_grad_(False)
        self.train(self.training)

    @property
    def names(self) -> list[str]:
        """The layers of the lessons."""
        return [lesson.layer for lesson in self.lessons]

    def train(self, mode: bool = True) -> "Alignment":
        """Student and teacher stay in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def start_from(self, source: str | Path, same_classes: bool | None = None) -> str:
        """As in Task; raises ValueError for weights of another teacher's student."""
        before = {name: tensor.clone() for name, tensor in self.original.state_dict().items()}
        line = super().start_from(source, same_classes)
        changed = [name for name, tensor in self.original.state_dict().items() if not tensor.equal(before[name])]
        if changed:
            raise SettingError(
                f"The weights in {source} have another {changed[0]} than the teacher: start from an alignment with the"
                " same `teacher`."
            )
        return line

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images = batch[0]
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        gradients: dict[Tensor, Tensor] = {}
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        factor = 1 / (len(self.lessons) * len(images))

        def gradient(errors: Tensor, parameters: Sequence[Tensor]) -> None:
            computed = torch.autograd.grad(errors.sum() * (factor * scale), parameters, allow_unused=True)
            for parameter, value in zip(parameters, computed, strict=True):
                if value is not None:
                    gradients[parameter] = value if parameter not in gradients else gradients[parameter].add_(value)

        errors = self.errors(self.network, images, gradient)
        ready = [gradients.pop(parameter, None) for parameter in trained]
        loss: Tensor = _Computed.apply(errors.mean(), scale, ready, *trained)
        return self.learn(loss, len(images))

    def errors(
        self,
        network: nn.Module,
        images: Tensor,
        gradient: Callable[[Tensor, Sequence[Tensor]], None] | None = None,
    ) -> Tensor:
        """The relative error of each lesson and image, (lessons, batch), for a student with any weights.

        images: (batch, channels, height, width). gradient: called with the errors of a piece of the batch in one lesson
        and the parameters that they depend on.
        """
        errors: dict[str, Tensor] = {}
        with ExitStack() as stack, torch.no_grad():
            for index, lesson in enumerate(self.lessons):
                layer = network.get_submodule(lesson.layer)
                scoring = self.scoring[index] if self.match == MAPS else None
                stack.enter_context(answering(layer, self._studied(network, lesson, scoring, errors, gradient)))
            network(images.contiguous(memory_format=self.memory_format))
        return torch.stack([errors[lesson.layer] for lesson in self.lessons])

    def _studied(
        self,
        network: nn.Module,
        lesson: Lesson,
        scoring: nn.Module | None,
        errors: dict[str, Tensor],
        gradient: Callable[[Tensor, Sequence[Tensor]], None] | None,
    ) -> Callable[..., Tensor]:
        """The attention's stand-in: notes its errors, and returns what the teacher computes."""
        layer, attention = network.get_submodule(lesson.layer), network.get_submodule(lesson.attention)
        forward = type(layer).forward
        parameters = [parameter for parameter in attention.parameters() if parameter.requires_grad]

        def study(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            expected = lesson.present(x, *args, **kwargs)
            noted = []
            sizes = -(-len(x) // self.pieces)
            for piece, target in zip(x.split(sizes), expected.split(sizes), strict=True):
                with torch.set_grad_enabled(gradient is not None):
                    if scoring is None:
                        error = relative_errors(forward(layer, piece, *args, **kwargs), target)
                    else:
                        given = _scores(attention, partial(forward, layer, piece, *args, **kwargs))
                        if hasattr(scoring, "source"):
                            scoring.source = attention.source  # the grid of these images
                        with torch.no_grad():
                            wanted = _scores(scoring, partial(scoring, piece, *args, **kwargs))
                        error = relative_errors(given, wanted)
                    if gradient is not None:
                        gradient(error, parameters)
                noted.append(error.detach())
            errors[lesson.layer] = torch.cat(noted)
            return expected

        return study


@contextmanager
def answering(layer: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Lets a layer compute something else for a while."""
    vars(layer)["forward"] = forward
    try:
        yield
    finally:
        del vars(layer)["forward"]


def _scores(attention: nn.Module, call: Callable[[], Tensor]) -> Tensor:
    """The matrix by which the attention multiplies its values in a call, (batch, heads, tokens, tokens)."""
    seen: list[Tensor] = []

    def note(operator: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append(cast(Operator, operator).scores(*inputs, **options))

    handle = attention.get_submodule("operator").register_forward_pre_hook(note, with_kwargs=True)
    try:
        call()
    finally:
        handle.remove()
    return seen[0]


class _Computed(torch.autograd.Function):
    """A loss whose gradients are known already, so that Lightning, accumulation and DDP treat it as any other."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.scale, ctx.gradients, ctx.likes = scale, gradients, parameters
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        factor = outputs[0] / ctx.scale
        held, ctx.gradients = ctx.gradients, None
        ready = [
            torch.zeros_like(like) if value is None else value.mul_(factor.to(value.dtype))
            for value, like in zip(held, ctx.likes, strict=True)
        ]
        return None, None, None, *ready
