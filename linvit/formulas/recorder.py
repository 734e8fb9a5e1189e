"""Notes what a function of torch and its derivative compute, operation by operation."""

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from linvit.formulas.operations import ASKING, CHEAP, FILLS, POINTWISE, SAME, VIEWS, variance
from linvit.formulas.values import (
    CHANNEL,
    REDUCTIONS,
    Value,
    condition_of,
    constant,
    make,
    named,
    number_of,
)

AXES = ("batch", "heads", "tokens", "width")
RUN = "run_and_note"  # the function that calls the user's
HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))  # folders of lines that are not the user's
DTYPES = (torch.float32, torch.float64, torch.bool)
Axes = tuple[str | None, ...]


class Untraceable(ValueError):  # noqa: N818
    """A function that cannot become device code; the sentence says which operation, and where."""


class AcrossHeads(Untraceable):
    """One that combines heads, but maybe no tokens: plain torch can compute the features that a kernel reads."""


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor that PyTorch computes before or after the kernel runs."""

    index: int


class Known(NamedTuple):
    """A tensor of a trace: its value, with names of its axes, or its slot. Constants, scale and eps have both."""

    tensor: Tensor
    value: Value | None
    axes: Axes
    slot: int | None


class Outside:
    """The steps that PyTorch computes itself, before or after the kernel runs.

    Attributes:
        held: tensors that the function holds, and, to be given, sums over tokens; by slot.
        steps: function and arguments, by the slot of the result.
        late: slots of sums over tokens and of what depends on them.
    """

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}
        self.steps: dict[int, tuple[Any, Any, Any]] = {}
        self.late: set[int] = set()

    def holding(self, held: dict[int, Tensor]) -> "Outside":
        """The same steps from other tensors."""
        other = copy(self)
        other.held = held
        return other

    def hold(self, tensor: Tensor) -> int:
        """A new slot for a tensor that is not computed."""
        slot = len(self.held) + len(self.steps)
        self.held[slot] = tensor
        return slot

    def add(self, function: Any, args: Any, kwargs: Any) -> int:
        slot = len(self.held) + len(self.steps)
        self.steps[slot] = function, args, kwargs
        if any(isinstance(x, Slot) and x.index in self.late for x in tree_leaves((args, kwargs))):
            self.late.add(slot)
        return slot

    def compute(self, slots: Sequence[int], given: Mapping[int, Tensor]) -> list[Tensor]:
        """The tensors of these slots, where `given` has those of others."""
        done = {**self.held, **given}

        def computed(x: Any) -> Any:
            if not isinstance(x, Slot):
                return x
            if x.index not in done:
                function, args, kwargs = self.steps[x.index]
                args, kwargs = tree_map(computed, (args, kwargs))
                done[x.index] = function(*args, **kwargs)
            return done[x.index]

        return [computed(Slot(slot)) for slot in slots]


class Recorder(TorchDispatchMode):
    """Notes each operation on tensors: as a value if it depends on a token, otherwise as a step outside.

    Attributes:
        sizes: of AXES.
        derivative: whether the operations are those of the derivative.
        call: the function of torch that the user has called.
        parameters: values of tensors that enter the device code, by slot and sizes (heads or 1, width or 1).
        sums: slots and values of what the derivative sums over tokens, and whether it differs between channels.
    """

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes
        self.known: dict[int, Known] = {}
        self.outside = Outside()
        self.derivative, self.call = False, ""
        self.parameters: dict[tuple[int, tuple[int, int]], Value] = {}
        self.sums: list[tuple[int, Value, bool]] = []

    def note(self, tensor: Tensor, value: Value, axes: Axes, slot: int | None = None) -> Tensor:
        """Lets the tensor stand for the value."""
        value = condition_of(value) if tensor.dtype == torch.bool else number_of(value)
        if slot is None and value.op == "constant" and not self.is_wide(tensor.shape):
            options = {"dtype": tensor.dtype, "device": tensor.device}
            slot = self.outside.add(torch.full, (tuple(tensor.shape), value.data), options)
        self.known[id(tensor)] = Known(tensor, value, axes, slot)
        return tensor

    def knowledge(self, tensor: Tensor) -> Known:
        if id(tensor) not in self.known:
            slot = self.outside.hold(tensor)
            self.known[id(tensor)] = Known(tensor, None, (None,) * tensor.dim(), slot)
        return self.known[id(tensor)]

    def is_wide(self, shape: Sequence[int]) -> bool:
        """Whether the shape has an axis of batch or tokens."""
        return bool({self.sizes[0], self.sizes[2]} & set(shape))

    def usual_axes(self, shape: Sequence[int]) -> Axes:
        """The names of the axes of a tensor that broadcasts to (batch, heads, tokens, width)."""
        last = zip(AXES[-len(shape) :], self.sizes[-len(shape) :], shape, strict=False)
        names = [name if size == whole > 1 else None for name, whole, size in last]
        return tuple(names) if len(names) == len(shape) else (None,) * len(shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in ASKING:
            self.refuse(name, "needs numbers that are not known before the kernel runs")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(name, "draws random numbers, and a formula is the same in every call")
        if not func._schema.is_mutable:
            return self.dispatch(func, name, args, kwargs)
        functional = functional_of(func, name)
        if functional is None:
            self.refuse(name, "writes into a tensor, and has no device code")
        changed = args[0]
        storage = changed.untyped_storage().data_ptr()
        others = [x.tensor for x in self.known.values() if x.tensor is not changed]
        known = self.known.get(id(changed))
        given = known is None or known.slot in self.outside.held or (known.value and known.value.op == "input")
        if given or any(x.untyped_storage().data_ptr() == storage for x in others):
            self.refuse(name, "writes into a tensor that is given, kept or a view of another")
        result = self.dispatch(functional, name[:-1], args, kwargs)
        self.known[id(changed)] = self.known.pop(id(result))._replace(tensor=changed.copy_(result))
        return changed

    def dispatch(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in FILLS:
            out = func(*args, **kwargs)
            return self.note(out, constant(FILLS[name](*args, **kwargs)), self.usual_axes(out.shape))
        if name.startswith("lift_fresh") and id(args[0]) not in self.known and args[0].dim() == 0:
            return self.note(func(*args), constant(args[0].item()), ())
        tensors = [self.knowledge(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        both = bool(tensors) and all(x.value is not None for x in tensors) and name in POINTWISE
        if not both and all(x.slot is not None for x in tensors):
            return self.outside_step(func, name, args, kwargs)
        if any(x.slot in self.outside.late for x in tensors):
            self.refuse(name, "mixes tokens")
        if name in POINTWISE:
            return self.pointwise(func, name, args, kwargs)
        if name in REDUCTIONS:
            return self.reduction(func, name, args, kwargs)
        if name in SAME or name in VIEWS:
            return self.view(func, name, args, kwargs)
        call, self.call = self.call, self.call or name  # rather than the name of a part
        with self:
            decomposed = variance if name == "var" else decomposition_table.get(func, func.decompose)
            out = decomposed(*args, **kwargs)
        self.call = call
        if out is NotImplemented:
            self.refuse(
                name, "is no pointwise operation and no reduction over the channels of a head that the kernels know"
            )
        return out

    def outside_step(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        results = out if isinstance(out, tuple | list) else [out]
        if any(self.is_wide(x.shape) for x in results if isinstance(x, Tensor)):
            if name == "expand":
                return self.note(out, *self.entered(name, self.knowledge(args[0]), self.usual_axes(out.shape)))
            self.refuse(name, "makes a tensor that differs from token to token")
        args, kwargs = tree_map(self.in_step, (args, kwargs))
        slot = self.outside.add(func, args, kwargs)
        for index, result in enumerate(results):
            if isinstance(result, Tensor):
                place = slot if result is out else self.outside.add(operator.getitem, (Slot(slot), index), {})
                self.known[id(result)] = Known(result, None, (None,) * result.dim(), place)
        return out

    def in_step(self, x: Any) -> Any:
        """The argument as it is stored with a step: tensors are replaced by their slots."""
        slot = self.knowledge(x).slot if isinstance(x, Tensor) else None
        return x if slot is None else Slot(slot)

    def entered(self, name: str, known: Known, axes: Axes) -> tuple[Value, Axes]:
        """The value of an operand, and the axes of the result with those that it brings."""
        if known.value is not None:
            return known.value, axes
        names, sizes = list(axes), {"heads": 1, "width": 1}
        usual = AXES[-len(axes) :] if len(axes) <= len(AXES) else axes
        for place, size in enumerate(known.tensor.shape, len(axes) - known.tensor.dim()):
            if size > 1:
                axis = names[place] or usual[place]
                if axis not in ("heads", "width") or (axis == "heads" and sizes["width"] > 1):
                    shape = tuple(known.tensor.shape)
                    self.refuse(
                        name, f"combines its argument with a tensor of shape {shape}, which is none for heads and width"
                    )
                names[place], sizes[axis] = axis, size
        assert known.slot is not None
        return self.parameter(known.slot, (sizes["heads"], sizes["width"])), tuple(names)

    def parameter(self, slot: int, sizes: tuple[int, int]) -> Value:
        """The value of a tensor from outside; of a cheap step, in device code."""
        function, args, kwargs = self.outside.steps.get(slot, (None, (), {}))
        name = function._schema.name.split("::")[1] if isinstance(function, torch._ops.OpOverload) else ""
        if name in CHEAP and len([x for x in args if isinstance(x, Slot)]) == 1:
            args = [self.parameter(x.index, sizes) if isinstance(x, Slot) else x for x in args]
            return POINTWISE[name](*args, **kwargs)
        key = slot, sizes
        if key not in self.parameters:
            self.parameters[key] = named(f"parameter{len(self.parameters)}", CHANNEL if sizes[1] > 1 else 0)
        return self.parameters[key]

    def pointwise(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        out = func(*args, **kwargs)
        if out.dtype not in DTYPES:
            self.refuse(name, f"gives {out.dtype}, and device code computes in float32")
        axes: list[str | None] = [None] * out.dim()
        operands = [self.knowledge(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for known in operands:
            for place, axis in enumerate(known.axes, out.dim() - len(known.axes)):
                if axis is not None and axes[place] not in (None, axis):
                    self.refuse(name, f"combines {axes[place]} with {axis}")
                axes[place] = axis or axes[place]
        names, values = tuple(axes), {}
        for known in operands:
            values[id(known.tensor)], names = self.entered(name, known, names)
        if len(set(filter(None, names))) < len(list(filter(None, names))):
            self.refuse(name, "combines every number of an axis with every other")
        slot = None
        if all(known.slot is not None for known in operands) and not self.is_wide(out.shape):
            slot = self.outside.add(func, *tree_map(self.in_step, (args, kwargs)))
        args, kwargs = tree_map(lambda x: values[id(x)] if isinstance(x, Tensor) else x, (args, kwargs))
        return self.note(out, POINTWISE[name](*args, **kwargs), names, slot)

    def reduction(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
        known = self.knowledge(args[0])
        assert known.value is not None
        chosen = given.get("dim", given.get("dims"))
        chosen = [chosen] if isinstance(chosen, int) else chosen or range(len(known.axes))
        places = {place % len(known.axes) for place in chosen}
        axes = {known.axes[place] for place in places}
        if axes & {"batch", "tokens"} and self.derivative and name == "sum":
            return self.sum_over_tokens(func, known, args, kwargs)
        if axes & {"batch", "heads", "tokens"}:
            if axes & {"batch", "tokens"}:
                self.refuse(name, "combines tokens")
            self.refuse(name, "combines heads", AcrossHeads)
        count = math.prod(known.tensor.shape[place] for place in places if known.axes[place] is None)
        value = number_of(known.value)
        if "width" in axes and value.axes & CHANNEL:
            value = make(name, value)
        elif "width" in axes:
            count *= self.sizes[3]
        if name == "sum":
            value = value * count
        keeps = given.get("keepdim", False)
        left = [None if place in places else axis for place, axis in enumerate(known.axes)]
        return self.note(
            func(*args, **kwargs), value, tuple(axis for place, axis in enumerate(left) if keeps or place not in places)
        )

    def sum_over_tokens(self, func: Any, known: Known, args: Any, kwargs: Any) -> Tensor:
        assert known.value is not None
        if any(axis not in (None, usual) for axis, usual in zip(known.axes, AXES, strict=False)) or len(known.axes) < 4:
            self.refuse("sum", "is over tokens whose axis was moved")
        slot = self.outside.hold(known.tensor)
        self.outside.late.add(slot)
        value = number_of(known.value)
        self.sums.append((slot, value, known.axes[3] is not None or bool(value.axes & CHANNEL)))
        out = func(*args, **kwargs)
        self.known[id(out)] = Known(
            out, None, (None,) * out.dim(), self.outside.add(func, (Slot(slot), *args[1:]), kwargs)
        )
        return out

    def view(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        known, out = self.knowledge(args[0]), func(*args, **kwargs)
        assert known.value is not None
        if out.dtype not in DTYPES:
            self.refuse(name, f"gives {out.dtype}, and device code computes in float32")
        if name in SAME:
            return self.note(out, known.value, known.axes)
        probe = torch.empty(known.tensor.shape, device="meta")
        moved = func(probe, *args[1:], **kwargs)
        by_place = dict(zip(zip(probe.shape, probe.stride(), strict=True), known.axes, strict=True))
        kept = {by_place.get(place) for place in zip(moved.shape, moved.stride(), strict=True)}
        if {"batch", "tokens"} <= kept and "heads" in known.axes and "heads" not in kept:
            self.refuse(name, "combines heads", AcrossHeads)
        axes = []
        for size, stride, usual in zip(moved.shape, moved.stride(), self.usual_axes(moved.shape), strict=True):
            if size > 1 and stride and (size, stride) not in by_place:
                self.refuse(name, "cuts or joins axes")
            axes.append(None if size == 1 else usual if stride == 0 else by_place[size, stride])
        if moved.numel() < probe.numel():
            self.refuse(name, "cuts or joins axes")
        return self.note(out, known.value, tuple(axes))

    def refuse(self, name: str, fault: str, kind: type[Untraceable] = Untraceable) -> NoReturn:
        """Raises Untraceable: the operation of this name with the user's line that called it, and its fault."""
        frame, place = sys._getframe(1), "in the derivative"
        while frame.f_back is not None and frame.f_code.co_name != RUN:
            if not frame.f_code.co_filename.startswith(HIDDEN):
                place = f"({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
                break
            frame = frame.f_back
        raise kind(f"`{(self.call or name).strip('_')}` {place} {fault}")


def functional_of(func: Any, name: str) -> Any:
    """The operation that returns what an operation of this name writes into its first argument; None if there is none.

    Their overloads are those of equal types: pow_(Tensor, number) is called Scalar, but pow.Scalar is (number, Tensor).
    """
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    types = [str(x.type) for x in func._schema.arguments]
    return next((x for x in overloads if [str(y.type) for y in x._schema.arguments] == types), None)


class Calls(TorchFunctionMode):
    """Tells a recorder the function that the user has called; lets full_like take a number that is a tensor."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.recorder.call = getattr(func, "__name__", "").replace("__get__", "")
        if func in (torch.full_like, torch.full) and len(args) > 1 and isinstance(args[1], Tensor):
            return args[1].expand(args[0].shape if isinstance(args[0], Tensor) else args[0])
        return func(*args, **(kwargs or {}))
