"""A linear network that starts from a network with softmax attention, and what it learns from that one.

timm knows it as "linearized", any softmax network that `linearize` takes, with linear attention in its place:

    timm.create_model("linearized", base="vit_small_patch14_dinov2", mechanism="mala", pattern="LLLLLLSSSSSS")

That model has no weights of its own. To start from a trained network, use `linvit.linearize` on it, or `linvit
linearize`; both store weights that fit this name.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import timm
from timm.models import PretrainedCfg, generate_default_cfgs
from torch import nn

from linvit.arguments import check_network
from linvit.errors import SettingError, keys_of
from linvit.layers.attention import AXES
from linvit.layers.conformer import FrameAttention
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.operator import LEARNED, AttentionLayer, Lesson, Operator
from linvit.layers.swapped import LocalMlp
from linvit.layers.token_attention import TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.models.backbone import Backbone
from linvit.models.by_name import check_model
from linvit.models.family import imagenet_cfg, register
from linvit.models.hugging_face import of_transformers
from linvit.models.pretrained import create
from linvit.models.slots import Slot, slots_of
from linvit.models.swap import (
    ARGUMENTS,
    NAME,
    NO_WEIGHTS,
    attention_for,
    each_letter,
    rebuilt_from,
    record,
    swap_attention,
)
from linvit.ranges import check, check_keys, declared, lookup

KEPT = {"name", "base", "mechanism", "pattern", "attention", "swapped"}
"""Arguments of the base with names that "linearized" has too."""
default_cfgs = generate_default_cfgs({f"{NAME}.untrained": imagenet_cfg()})


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
    if lookup("mechanism", mechanism, MECHANISMS).axes is None:
        raise SettingError(f"`mechanism` is {mechanism!r}, expected linear attention: choose another, such as 'mala'.")
    student = copy.deepcopy(model)
    kept = {id(module) for module in student.modules()}
    if of_transformers(student):
        return swap_attention(student, mechanism, pattern, attention)
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
    check_keys("attention", attention, AXES)
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
        old = layer.attention.operator
        new = Operator(mechanism, old.heads, old.head_width, causal=old.causal, place=old.place, **attention)
        new.shares = old.shares
        layer.attention.operator = new.train(old.training)
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
        if isinstance(module, AttentionLayer) and module.operator.options is None and not module.operator.nonlinear:
            if isinstance(module, FrameAttention):
                raise ValueError(
                    "the softmax attention of a Conformer has a projection of positions, which linear attention has"
                    " not: it cannot be replaced"
                )
            stage = int(path.split(".")[1]) if isinstance(model, Backbone) else None
            layers.append(SoftmaxLayer(path, module, len(layers) if stage is None else stage))
    return layers


class Place(NamedTuple):
    """One softmax attention of a teacher: the path of what its block calls, the letter of a pattern that decides about
    it, what it computes from the arguments of that call, and its slot, if it is not one of our layers."""

    layer: str
    letter: int
    present: Any
    slot: Slot | None = None


def _places(teacher: nn.Module) -> list[Place]:
    slots = slots_of(teacher)
    if slots is None:
        return [Place(layer.path, layer.letter, layer.attention) for layer in softmax_layers(teacher)]
    names = {id(module): name for name, module in teacher.named_modules()}
    return [
        Place(f"{names[id(slot.block)]}.attn", slot.letter, slot.present or slot.block.attn, slot)
        for slot in slots.slots
    ]


def lessons(student: nn.Module, teacher: nn.Module, scores: bool = False) -> list[Lesson]:
    """One lesson for each attention of the student that replaces one of the teacher, in the order of the blocks.

    scores: also prepare for the scores of both.

    Raises ValueError if there is none, because the student kept all softmax attention; for scores of an attention that
    does not see all tokens, or of another number of heads.
    """
    given = []
    for layer, _, present, slot in _places(teacher):
        for name, module in student.get_submodule(layer).named_modules():
            if isinstance(module, AttentionLayer) and module.operator.options is not None:
                scoring = present
                if slot is not None:
                    whole = scores and slot.whole
                    scoring = attention_for(slot, "softmax", {"mechanism": "softmax"}) if whole else None
                given.append(Lesson(layer, f"{layer}.{name}".rstrip("."), present, scoring))
                break
    if not given:
        raise SettingError("the network has kept softmax attention in all blocks: set an L in its `pattern`")
    for lesson in given if scores else ():
        learning, taught = (cast(AttentionLayer, student.get_submodule(lesson.attention)), lesson.scoring)
        if taught is None or learning.operator.heads != taught.operator.heads:
            raise ValueError(
                f"the attention {lesson.layer} of the teacher does not see all tokens, or has another number of heads,"
                " so its scores cannot be matched: match outputs instead"
            )
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
    return {place.layer: place.letter for place in _places(teacher)}


def _create(
    name: str,
    pretrained: bool,
    base: str | Mapping[str, Any] = "deit_tiny_patch16_224",
    mechanism: str = "mala",
    pattern: str | None = None,
    attention: dict[str, Any] | None = None,
    swapped: bool = False,
    pretrained_cfg: Any = None,
    **arguments: Any,
) -> nn.Module:
    """base: a model of timm by name, or with its own arguments, {"name": …}; further arguments are passed on to it.

    swapped: replace its attention with `swap_attention` instead of `linearize`.
    """
    check({"base": str | dict[str, Any], "swapped": bool}, {"base": base, "swapped": swapped})
    given = {"name": base} if isinstance(base, str) else dict(base)
    with keys_of("base"):
        check_model(given.get("name", ""))
    cfg = pretrained_cfg or timm.get_pretrained_cfg(given["name"]) or PretrainedCfg(**imagenet_cfg())
    if pretrained_cfg is None:
        cfg = replace(cfg, **NO_WEIGHTS, architecture=NAME)
    if arguments.get("features_only") and arguments.get("out_indices") is None:
        features: Any = create_base(given, features_only=True)
        arguments["out_indices"] = features.feature_info.out_indices  # those of the base

    def build(**arguments: Any) -> nn.Module:
        change = swap_attention if swapped else linearize
        return change(create_base(given, **arguments), mechanism, pattern, attention)

    # the base's own arguments too, or timm would put those of its configuration, such as the image size, over them
    arguments = {**{name: value for name, value in given.items() if name not in KEPT}, **arguments}
    return create(build, name, pretrained, {"feature_cls": "getter"}, pretrained_cfg=cfg, **arguments)


register(_create, [NAME], __name__)
