"""Formulas from functions of torch: they run on small tensors, derivative included, and each operation is noted.

What depends on no token, such as softplus of a learned temperature, stays with torch: before the device code, whose
parameters it gives, and after it, from sums over tokens to the gradients of the tensors that the function holds.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from linvit.formulas.device import ranges
from linvit.formulas.recorder import AcrossHeads, Calls, Outside, Recorder, Untraceable
from linvit.formulas.values import TILE, TOKEN, Value, constant, in_order, named

SIZES = (11, 13, 17, 19, 23, 29)  # of batch and tokens, so that their axes are known by size


@dataclass(frozen=True)
class Formula:
    """A function as device code, and what torch computes before and after it.

    Attributes:
        names, results: of the inputs and of the outputs.
        outputs: values of the results.
        gradients: of x, or of num and den.
        sums: values of the derivative that are to be summed over batch and tokens; True where they differ
            between channels.
        parameters: inputs from outside.
    """

    names: tuple[str, ...]
    results: tuple[str, ...]
    outputs: tuple[Value, ...]
    gradients: tuple[Value, ...]
    sums: tuple[tuple[Value, bool], ...]
    parameters: tuple[Value, ...]
    outside: Outside
    parameter_slots: tuple[tuple[int, tuple[int, int]], ...]
    sum_slots: tuple[int, ...]
    gradient_slots: dict[int, int | None]

    @property
    def signature(self) -> str:
        """Equal for the same formula."""
        values = [x.key for x in (*self.outputs, *self.gradients, *(x for x, _ in self.sums))]
        steps = [f"{slot} {step!r}" for slot, step in self.outside.steps.items()]
        rest = self.parameter_slots, self.sum_slots, self.gradient_slots, list(self.outside.held)
        return "\n".join([*values, *steps, repr(rest)])

    @cached_property
    def digest(self) -> str:
        """Names the device code of the formula; equal for equal code, in every process."""
        values = [*self.outputs, *self.gradients, *(x for x, _ in self.sums)]
        varies = [varies for _, varies in self.sums]
        return hashlib.sha256(f"{[x.key for x in values]}{varies}".encode()).hexdigest()[:16]

    @property
    def is_map(self) -> bool:
        return self.results == ("y",)

    @cached_property
    def is_positive(self) -> bool:
        """Whether the results are known to be zero or above."""
        known = ranges(self.outputs)
        return all(known[x][0] >= 0 for x in self.outputs)

    @cached_property
    def is_proportional(self) -> bool:
        """Of a normalizer, whether level is gain · num, and gain does not depend on num."""
        gain, level = self.outputs
        num = named("num", TOKEN)
        return level == gain * num and num not in in_order([gain])

    @cached_property
    def uses_mass(self) -> bool:
        """Of a normalizer."""
        return named("mass", TOKEN) in in_order(self.outputs)

    @property
    def held(self) -> dict[int, Tensor]:
        """The tensors that the function holds, by their slots."""
        return self.outside.held

    def holding(self, tensors: dict[int, Tensor]) -> "Formula":
        """The formula of a function that differs in these tensors."""
        other = copy(self)
        object.__setattr__(other, "outside", self.outside.holding({**self.held, **tensors}))
        return other

    @property
    def tensors(self) -> list[Tensor]:
        """Scale and eps of a normalizer, and the tensors that the function holds; in the methods below, others of their
        shapes stand for them."""
        return list(self.outside.held.values())

    @property
    def has_all_gradients(self) -> bool:
        """Whether the derivative is also by all tensors that need a gradient."""
        return not [slot for slot, x in self.held.items() if x.requires_grad and slot not in self.gradient_slots]

    def parameter_rows(self, heads: int, width: int, columns: int, eps: float) -> Tensor | None:
        """The parameters as device code reads them, (heads, any, columns) of float32: a row each, zeros from width on.

        What device code sums over tokens, in the order of `sums`, is the gradient of these rows; from it the tensors
        that the function holds get theirs. None without parameters.

        Args:
            heads, width: of the queries; a normalizer has one column.
            columns: of a row of a feature map, at least the width.
            eps: of the normalizer.
        """
        if not self.parameters:
            return None
        if self.is_map:
            rows: Tensor = _Rows.apply(self, (heads, width, columns), *self.tensors)
            return rows
        scale_and_eps = [x.new_tensor(number) for x, number in zip(self.tensors, (width**-0.5, eps), strict=False)]
        rows = _Rows.apply(self, (heads, 1, 1), *scale_and_eps, *self.tensors[2:])
        return rows

    def parameter_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parameters, (heads or 1, width or 1) each."""
        slots = [slot for slot, _ in self.parameter_slots]
        with torch.no_grad():
            computed = self.outside.compute(slots, dict(zip(self.outside.held, tensors, strict=True)))
        return [x.reshape(sizes) for x, (_, sizes) in zip(computed, self.parameter_slots, strict=True)]

    def tensor_gradients(self, tensors: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of tensors that have one, from the sums over tokens, (batch, heads, 1, width or 1) each."""
        given = {**dict(zip(self.outside.held, tensors, strict=True)), **dict(zip(self.sum_slots, sums, strict=True))}
        slots = [self.gradient_slots.get(slot) for slot in self.outside.held]
        with torch.no_grad():
            computed = iter(self.outside.compute([slot for slot in slots if slot is not None], given))
        return [None if slot is None else next(computed) for slot in slots]


class _Rows(torch.autograd.Function):
    """See `Formula.parameter_rows`."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, sizes: tuple[int, int, int], *tensors: Tensor) -> Tensor:
        heads, width, columns = sizes
        ctx.formula, ctx.width = formula, width
        ctx.save_for_backward(*tensors)
        rows = [pad(x.float().expand(heads, width), (0, columns - width)) for x in formula.parameter_tensors(tensors)]
        rows += [torch.zeros_like(rows[0])] * (len(formula.sums) - len(rows))
        return torch.stack(rows, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, rows = ctx.saved_tensors, grad.unbind(1)
        sums = [rows[i][None, :, None, : ctx.width if varies else 1] for i, (_, varies) in enumerate(ctx.formula.sums)]
        gradients = ctx.formula.tensor_gradients(tensors, sums)
        return None, None, *(None if g is None else g.to(x.dtype) for g, x in zip(gradients, tensors, strict=True))


class Argument(NamedTuple):
    """An input of a function that is traced: `axes` as of a value; and whether the derivative is by it."""

    name: str
    shape: tuple[int, ...]
    axes: int
    differentiated: bool = True


def run_and_note(
    function: Callable[..., Sequence[Tensor]],
    names: Sequence[str],
    given: Sequence[Argument],
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Formula:
    """Calls the function, whose results have these names, and its derivative on random numbers, and notes both."""
    recorder, random = Recorder(sizes), torch.Generator(device).manual_seed(sizes[0])

    def tensor(name: str, shape: Sequence[int], axes: int) -> Tensor:
        numbers = torch.rand(shape, generator=random, device=device, dtype=torch.float32)
        slot = None if shape else recorder.outside.hold(numbers)
        return recorder.note(numbers, named(name, axes), recorder.usual_axes(shape), slot)

    arguments = [tensor(*argument[:3]) for argument in given]
    wanted = [x.requires_grad_() for x, argument in zip(arguments, given, strict=True) if argument.differentiated]
    try:
        with recorder, Calls(recorder):
            results = function(*arguments)
        d = [tensor(f"d{name}", x.shape, given[0].axes) for name, x in zip(names, results, strict=True)]
        held = [slot for slot, x in recorder.outside.held.items() if x.requires_grad]
        inputs = [*wanted, *(recorder.outside.held[slot] for slot in held)]
        gradients: Sequence[Tensor | None] = (None,) * len(inputs)
        differentiable = [(x, dx) for x, dx in zip(results, d, strict=True) if x.requires_grad]
        recorder.derivative, recorder.call = True, ""
        if differentiable:
            with recorder:
                sources, given_gradients = zip(*differentiable, strict=True)
                gradients = torch.autograd.grad(sources, inputs, given_gradients, allow_unused=True)
    except Untraceable:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Untraceable(f"the function fails for a tensor of shape {tuple(arguments[0].shape)}: {reason}") from error

    def value(x: Tensor | None) -> Value:
        if x is None:
            return constant(0)
        return recorder.entered("the result", recorder.knowledge(x), recorder.usual_axes(x.shape))[0]

    slots = [None if x is None else recorder.knowledge(x).slot for x in gradients[len(wanted) :]]
    outputs, of_inputs = tuple(map(value, results)), tuple(map(value, gradients[: len(wanted)]))
    for slot, _, _ in recorder.sums:
        del recorder.outside.held[slot]
    return Formula(
        names=tuple(argument.name for argument in given),
        results=tuple(names),
        outputs=outputs,
        gradients=of_inputs,
        sums=tuple((x, varies) for _, x, varies in recorder.sums),
        parameters=tuple(recorder.parameters.values()),
        outside=recorder.outside,
        parameter_slots=tuple(recorder.parameters),
        sum_slots=tuple(slot for slot, _, _ in recorder.sums),
        gradient_slots=dict(zip(held, slots, strict=True)),
    )


def _traced(
    function: Callable[..., Sequence[Tensor]],
    names: Sequence[str],
    arguments: Callable[[tuple[int, int, int, int]], Sequence[Argument]],
    heads: int,
    width: int,
    device: torch.device | str,
) -> Formula:
    """The formula, which must be the same for other numbers of tokens and other values.

    Raises:
        Untraceable: if it is not, or an operation cannot become device code.
    """
    batch, tokens, other_batch, other_tokens = [size for size in SIZES if size not in (heads, width)][:4]
    first, second = [
        _apart(run_and_note, function, names, arguments(sizes), sizes, torch.device(device))
        for sizes in ((batch, heads, tokens, width), (other_batch, heads, other_tokens, width))
    ]
    if first.signature != second.signature:
        raise Untraceable(
            "the function computes something else for other tensors, as if it knew their numbers or how many there are"
        )
    return first


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result in a thread without autocast, modes of torch or an operator that is running."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(function, *arguments).result()


def _sees_one_token(function: Callable[[Tensor], Sequence[Tensor]], heads: int, width: int, device: Any) -> bool:
    """Whether the function of the last token by itself is what it is among others."""
    x = torch.linspace(0.1, 1, 6 * heads * width, device=device).reshape(2, heads, 3, width)
    (among_others,), (alone,) = function(x), function(x[1:, :, 2:])
    return torch.allclose(among_others[1:, :, 2:], alone, equal_nan=True)


def trace_map(
    function: Callable[[Tensor], Tensor], heads: int, width: int, device: torch.device | str = "cpu"
) -> Formula:
    """A feature map of tensors (batch, heads, tokens, width), float32; its result is `y`, from `x`.

    Args:
        device: of the tensors that the function holds.

    Raises:
        Untraceable: as the class says; AcrossHeads if it combines heads but no tokens.
    """

    def checked(x: Tensor) -> list[Tensor]:
        y = function(x)
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            kind = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise Untraceable(f"the function returns {kind} for {x.dtype} of shape {tuple(x.shape)}")
        return [y]

    try:
        return _traced(checked, ("y",), lambda sizes: [Argument("x", sizes, TILE)], heads, width, device)
    except AcrossHeads as error:
        if _apart(_sees_one_token, checked, heads, width, device):
            raise
        raise Untraceable(f"{error}, and the function also combines tokens") from None


def trace_normalizer(
    function: Callable[..., tuple[Tensor, Tensor]], heads: int, device: torch.device | str = "cpu"
) -> Formula:
    """A normalizer; its results are `gain` and `level`, from `num`, `den`, `mass`, `scale` and `eps`.

    Raises:
        Untraceable: as the class says; also if the function uses scale or eps where a tensor cannot stand.
    """

    def checked(*arguments: Tensor) -> list[Tensor]:
        results = function(*arguments)
        if not isinstance(results, tuple | list) or [isinstance(x, Tensor) for x in results] != [True, True]:
            raise Untraceable(f"the function returns a {type(results).__name__}, expected two tensors: gain and level")
        return [x.expand(arguments[0].shape) for x in results]

    def arguments(sizes: tuple[int, int, int, int]) -> list[Argument]:
        shape = *sizes[:3], 1
        rows = [Argument(name, shape, TOKEN, name != "mass") for name in ("num", "den", "mass")]
        return [*rows, Argument("scale", (), 0, False), Argument("eps", (), 0, False)]

    return _traced(checked, ("gain", "level"), arguments, heads, 1, device)
