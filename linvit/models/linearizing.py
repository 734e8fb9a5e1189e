"""A linear network that starts from a network with softmax attention."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import timm
from torch import nn

from linvit.arguments import check_network
from linvit.errors import SettingError
from linvit.layers.attention import AXES
from linvit.layers.conformer import FrameAttention
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.operator import LEARNED, AttentionLayer, Operator
from linvit.layers.swapped import LocalMlp
from linvit.layers.token_attention import TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.models.backbone import Backbone
from linvit.models.slots import slots_of
from linvit.models.swap import ARGUMENTS, each_letter, rebuilt_from, record, swap_attention
from linvit.ranges import check, declared, known, nearest


@dataclass(frozen=True)
class Origin:
    """How a linearized network, which has it as the attribute `origin`, was made.

    base: the teacher's model in timm, its name as "name" and its arguments. arguments: those of `linearize`.
    """

    base: Mapping[str, Any]
    arguments: Mapping[str, Any]

    def teacher(self) -> nn.Module:
        """The teacher, with new initial weights."""
        return create_base(self.base)

    def student(self, teacher: nn.Module) -> nn.Module:
        """Another student of a teacher."""
        return linearize(teacher, **self.arguments)


def create_base(base: Mapping[str, Any], **arguments: Any) -> nn.Module:
    """A model of timm by `base`, its name as "name" and its arguments, and further arguments."""
    given = {**base, **arguments}
    return timm.create_model(given.pop("name"), **given)


def linearize(
    model: nn.Module,
    mechanism: str = "mala",
    pattern: str | None = None,
    attention: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A copy of a network in which linear attention replaces softmax attention, to be trained further.

    Everything that both have is copied. What the mechanism adds starts so that it changes nothing: a gate as 1, local
    terms and a learned rotation as 0. So the copy begins with the teacher's layers around another operator.

    Args:
        model: a network that `swap_attention` takes, or one of ours with softmax attention: RAVLT, MAViT, CARE, a
            decoder or a DiT. It is not changed.
        mechanism: a name in MECHANISMS other than softmax.
        pattern: one letter per stage, or in networks without stages per block: L for the mechanism, S to keep softmax
            attention, bit for bit. Fewer letters are for runs of blocks. By default all are replaced.
        attention: options of the mechanism as for `swap_attention`; RALA and MALA have `rope="learned"`, unless the
            model has a rotation of its own.

    Returns:
        The network, in the mode of the model. If timm created the model, it has an `origin`, and
        `timm.models.save_for_hf` stores what rebuilds the copy, which is timm's model "linearized".

    Raises ValueError for a network without softmax attention that we know, with the part that cannot be replaced; for
    an unknown mechanism, one that cannot be used there (such as a causal decoder), an unknown option, a gate that
    cannot start as 1, and a pattern of another length.
    """
    check_network("model", model)
    check(ARGUMENTS, {"mechanism": mechanism, "pattern": pattern, "attention": attention})
    if known("mechanism", mechanism, MECHANISMS).axes is None:
        raise SettingError(f"`mechanism` is {mechanism!r}, expected linear attention: choose another, such as 'mala'.")
    student = copy.deepcopy(model)
    kept = {id(module) for module in student.modules()}
    slots = slots_of(student)
    if slots is None:
        _replace_operators(student, mechanism, pattern, attention or {})
    else:
        layer: type = TOKEN_LAYERS[mechanism]
        free = all(slot.ordered and not slot.rotated for slot in slots.slots)
        rotation = {"rope": LEARNED} if free and "rope" in declared(layer) else {}
        swap_attention(student, mechanism, pattern, {**rotation, **(attention or {})})
    for module in student.modules():
        if id(module) not in kept and isinstance(module, TokenAttention):
            module.reset_to_operator()
        elif id(module) not in kept and isinstance(module, LocalMlp):
            module.reset_to_identity()
    base = rebuilt_from(model)
    if base is not None:
        options = {"mechanism": mechanism, "pattern": pattern, "attention": attention}
        given = {name: value for name, value in options.items() if value is not None}
        record(student, model.pretrained_cfg, {"base": base, **given})
        vars(student)["origin"] = Origin(base, given)
    return student


def _replace_operators(model: nn.Module, mechanism: str, pattern: str | None, attention: Mapping[str, Any]) -> None:
    """Gives our own layers with softmax attention the operator of the mechanism."""
    for key in attention:
        if key not in AXES:
            raise SettingError(
                f"`attention` has the key {key!r}, expected some of {', '.join(AXES)}.{nearest(key, AXES)}"
            )
    layers = softmax_layers(model)
    if not layers:
        raise SettingError(
            f"`model` is a {type(model).__name__} without softmax attention that we know: choose another model, or"
            " write an adapter for its class (linvit.models.slots.adapter)."
        )
    count = len(model.stages) if isinstance(model, Backbone) else len(layers)
    letters = each_letter(pattern, count, exact=isinstance(model, Backbone))
    chosen = [layer for layer in layers if letters[layer.letter] == "L"]
    for layer in chosen:
        layer.attention.operator = _operator(layer.attention.operator, mechanism, attention)
    if isinstance(model, Backbone):
        changed = {layer.letter for layer in chosen}
        model.pattern = "".join("L" if i in changed else letter for i, letter in enumerate(model.pattern))


class SoftmaxLayer(NamedTuple):
    """A layer of ours with softmax attention: its path, and which letter of a pattern decides about it."""

    path: str
    attention: AttentionLayer
    letter: int


def softmax_layers(model: nn.Module) -> list[SoftmaxLayer]:
    """The layers of one of our own networks with softmax attention, in its order.

    Raises ValueError for a Conformer, whose attention cannot be replaced.
    """
    layers: list[SoftmaxLayer] = []
    for path, module in model.named_modules():
        if isinstance(module, AttentionLayer) and module.operator.options is None:
            if isinstance(module, FrameAttention):
                raise ValueError(
                    "the softmax attention of a Conformer has a projection of positions, which linear attention has"
                    " not: it cannot be replaced"
                )
            stage = int(path.split(".")[1]) if isinstance(model, Backbone) else None
            layers.append(SoftmaxLayer(path, module, len(layers) if stage is None else stage))
    return layers


def _operator(old: Operator, mechanism: str, axes: Mapping[str, Any]) -> Operator:
    new = Operator(mechanism, old.heads, old.head_width, causal=old.causal, place=old.place, **axes)
    new.shares = old.shares
    return new.train(old.training)
