"""What the new attention of a linearized network learns from the attention that it replaces."""

from collections.abc import Sequence
from itertools import chain
from typing import cast

from torch import nn

from linvit.errors import SettingError
from linvit.layers.operator import AttentionLayer, Lesson
from linvit.models.linearizing import softmax_layers
from linvit.models.slots import Slot, slots_of
from linvit.models.swap import attention_for


def lessons(student: nn.Module, teacher: nn.Module, scores: bool = False) -> list[Lesson]:
    """One lesson for each attention of the student that replaces one of the teacher, in the order of the blocks.

    scores: also prepare for the scores of both.

    Raises ValueError if there is none, because the student kept all softmax attention; for scores of an attention that
    does not see all tokens, or of another number of heads.
    """
    slots = slots_of(teacher)
    given = _of_operators(student, teacher) if slots is None else _of_slots(student, teacher, slots.slots, scores)
    if not given:
        raise SettingError("the network has kept softmax attention in all blocks: set an L in its `pattern`")
    for lesson in given if scores else ():
        learning, taught = (cast(AttentionLayer, student.get_submodule(lesson.attention)), lesson.scoring)
        if taught is None:
            raise ValueError(
                f"the attention {lesson.layer} of the teacher does not see all tokens, so its scores cannot be matched:"
                " match outputs instead"
            )
        if learning.operator.heads != taught.operator.heads:
            raise ValueError(
                f"the attention {lesson.layer} has the scores of {learning.operator.heads} heads, the teacher's of"
                f" {taught.operator.heads}, so they cannot be matched: match outputs instead"
            )
    return given


def _of_slots(student: nn.Module, teacher: nn.Module, slots: Sequence[Slot], scores: bool) -> list[Lesson]:
    names = {id(module): name for name, module in teacher.named_modules()}
    given = []
    for slot in slots:
        layer = f"{names[id(slot.block)]}.attn"
        inside = student.get_submodule(layer)
        attention = next((name for name, module in inside.named_modules() if isinstance(module, AttentionLayer)), None)
        if attention is not None:
            present = slot.present or cast(nn.Module, slot.block.attn)
            scoring = attention_for(slot, "softmax", {"mechanism": "softmax"}) if scores and slot.whole else None
            given.append(Lesson(layer, f"{layer}.{attention}".rstrip("."), present, scoring))
    return given


def _of_operators(student: nn.Module, teacher: nn.Module) -> list[Lesson]:
    """Of our own networks, in which only the operator of an attention was replaced."""
    given = []
    for path, present, _ in softmax_layers(teacher):
        attention = student.get_submodule(path)
        if isinstance(attention, AttentionLayer) and attention.operator.options is not None:
            given.append(Lesson(path, path, present, present))
    return given


def share(student: nn.Module, teacher: nn.Module, given: Sequence[Lesson]) -> None:
    """Makes the teacher's tensors those of the student too, except in the attention of the lessons.

    Nothing but that attention can then be trained.
    """
    learning = {id(p) for lesson in given for p in student.get_submodule(lesson.attention).parameters()}
    theirs = dict(chain(teacher.named_parameters(), teacher.named_buffers()))
    for name, module in student.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in list(held.items()):
                same = theirs.get(f"{name}.{key}" if name else key)
                if tensor is not None and same is not None and id(tensor) not in learning:
                    held[key] = same
    for parameter in (*teacher.parameters(), *student.parameters()):
        parameter.requires_grad_(id(parameter) in learning)


def letters_of(teacher: nn.Module) -> dict[str, int]:
    """Which letter of a pattern decides about each attention of a teacher, by the path of its lesson."""
    slots = slots_of(teacher)
    if slots is None:
        return {layer.path: layer.letter for layer in softmax_layers(teacher)}
    paths = {id(module): name for name, module in teacher.named_modules()}
    return {f"{paths[id(slot.block)]}.attn": slot.letter for slot in slots.slots}
