"""Formulas as functions of Triton."""

import linecache
import math
from collections.abc import Mapping, Sequence
from typing import Any

from linvit.formulas.device import lowered
from linvit.formulas.trace import Formula
from linvit.formulas.values import CHANNEL, OPERATIONS, TILE, TOKEN, Value, in_order

HEADER = """import triton
import triton.language as tl

from ..kernels.device_code import INTERPRETED, LOG2E, LOUD, power_of_two
from ..kernels.tiles import visible_tokens


@triton.jit
def both(a, b):
    # the interpreter makes numbers of a condition that it widens
    return (a.to(tl.int32) & b.to(tl.int32)) != 0 if INTERPRETED else a & b


@triton.jit
def either(a, b):
    return (a.to(tl.int32) | b.to(tl.int32)) != 0 if INTERPRETED else a | b


@triton.jit
def existing(x, FILL: tl.constexpr, WIDTH: tl.constexpr):
    COLUMNS: tl.constexpr = x.shape[len(x.shape) - 1]
    if COLUMNS != WIDTH:
        inside = tl.arange(0, COLUMNS) < WIDTH
        if len(x.shape) == 2:
            inside = inside[None, :]
        x = tl.where(inside, x, FILL)
    return x


@triton.jit
def row_sum(x, WIDTH: tl.constexpr):
    return tl.sum(existing(x, 0.0, WIDTH), len(x.shape) - 1)


@triton.jit
def row_max(x, WIDTH: tl.constexpr):
    return tl.max(existing(x, float("-inf"), WIDTH), len(x.shape) - 1)


@triton.jit
def row_min(x, WIDTH: tl.constexpr):
    return tl.min(existing(x, float("inf"), WIDTH), len(x.shape) - 1)


@triton.jit
def store_sum(given, place, x):
    _, _, sums, tile, mask, at, start = given
    visible = visible_tokens(mask, at, start, True, x.shape[0])
    pointer = sums[0] + tl.program_id(0).to(tl.int64) * sums[1] + tile * sums[2] + place
    if len(x.shape) == 2:
        tl.store(pointer + tl.arange(0, x.shape[1]), tl.sum(tl.where(visible[:, None], x, 0.0), 0))
    else:
        tl.store(pointer, tl.sum(tl.where(visible, x, 0.0), 0))
"""


NUMBERS = "num, den, mass, scale, eps"


def triton_source(formula: Formula) -> str:
    """A module with these functions:

        forward(x, parameters, WIDTH) -> y
        backward(x, dy, parameters, WIDTH) -> dx and what is to be summed over tokens, as tiles or rows
        forward(num, den, mass, scale, eps) -> gain, level
        backward(dgain, dlevel, num, den, mass, scale, eps) -> dnum, dden and what is to be summed

    `parameters` is a tuple, of a number or a row of channels each; a normalizer takes it at the end, if there are any.
    And `value` and `gradient`, as the kernels call them: see `linvit.kernels.device_code`.
    """
    d = [f"d{name}" for name in formula.results]
    if formula.is_map:
        forward, axes = [*formula.names, "parameters", "WIDTH: tl.constexpr"], TILE
        backward = [*formula.names, *d, "parameters", "WIDTH: tl.constexpr"]
    else:
        forward, axes = [*formula.names, *(["parameters"] if formula.parameters else [])], TOKEN
        backward = [*d, *forward]
    sums = [TILE if varies else TOKEN for _, varies in formula.sums]
    given = [*formula.gradients, *(value for value, _ in formula.sums)]
    return (
        f"{HEADER}{_function('forward', forward, formula.outputs, [axes] * len(formula.outputs))}"
        f"{_function('backward', backward, given, [axes] * len(formula.gradients) + sums)}"
        f"{_of_a_map(formula) if formula.is_map else _of_a_normalizer(formula)}"
    )


def _of_a_map(formula: Formula) -> str:
    """`value` and `gradient` of a map; a head has `rows` rows of parameters, and of sums."""
    rows = max(len(formula.parameters), len(formula.sums))
    place = "row + {} * SHAPE[1]"
    loads = "".join(
        f"tl.load({place.format(i)}{' + tl.arange(0, SHAPE[1])' * bool(x.axes)}), "
        for i, x in enumerate(formula.parameters)
    )
    load = [f"    row = given[0] + given[1] * {rows} * SHAPE[1]"] if rows else []
    value = ["def value(x, given, SHAPE):", *load, f"    return forward(x, ({loads}), SHAPE[2])"]
    gradient = ["def gradient(x, dy, given, SHAPE):", *load, f"    result = backward(x, dy, ({loads}), SHAPE[2])"]
    gradient += [f"    store_sum(given, {i} * SHAPE[1], result[{1 + i}])" for i in range(len(formula.sums))]
    return _jitted(value, [*gradient, f"    return result{'[0]' * bool(formula.sums)}"])


def _of_a_normalizer(formula: Formula) -> str:
    """The same of a normalizer, whose rows are single numbers."""
    rows = max(len(formula.parameters), len(formula.sums))
    loads = "".join(f"tl.load(given[0] + given[1] * {rows} + {i}), " for i in range(len(formula.parameters)))
    parameters = f", ({loads})" * bool(loads)
    value = [f"def value({NUMBERS}, given):", f"    return forward({NUMBERS}{parameters})"]
    gradient = [f"def gradient(dgain, dlevel, {NUMBERS}, given):"]
    gradient += [f"    result = backward(dgain, dlevel, {NUMBERS}{parameters})"]
    gradient += [f"    store_sum(given, {i}, result[{2 + i}])" for i in range(len(formula.sums))]
    return _jitted(value, [*gradient, "    return result[0], result[1]"])


def _jitted(*functions: Sequence[str]) -> str:
    return "".join("\n".join(["", "", "@triton.jit", *lines, ""]) for lines in functions)


def _function(name: str, arguments: Sequence[str], outputs: Sequence[Value], axes: Sequence[int]) -> str:
    outputs = lowered(outputs)
    names: dict[Value, str] = {}
    lines = ["", "", "@triton.jit", f"def {name}({', '.join(arguments)}):"]
    for value in in_order(outputs):
        if value.op == "input":
            number = value.data.removeprefix("parameter")
            names[value] = f"parameters[{number}]" if number.isdigit() else value.data
        elif value.op == "constant":
            names[value] = _number(value.data)
        else:
            union = 0
            for operand in value.operands:
                union |= operand.axes
            texts = [_aligned(names[operand], operand.axes, union) for operand in value.operands]
            names[value] = f"t{len(lines) - 4}"
            lines.append(f"    {names[value]} = {OPERATIONS[value.op].triton.format(*texts)}")
    like = "x" if "x" in arguments else "den"
    results = [_full(names[value], value, wanted, like) for value, wanted in zip(outputs, axes, strict=True)]
    return "\n".join([*lines, f"    return {', '.join(results)}", ""])


def _aligned(name: str, axes: int, union: int) -> str:
    if union == TILE and axes == TOKEN:
        return f"{name}[:, None]"
    return f"{name}[None, :]" if union == TILE and axes == CHANNEL else name


def _full(name: str, value: Value, axes: int, like: str) -> str:
    """The value as a tile or a row; rows of a normalizer's mass may be one number."""
    if axes == TOKEN and like == "x":
        return name if value.axes == TOKEN else f"tl.sum(tl.zeros_like(x), 1) + {name}"
    rows = {"num", "den", "dgain", "dlevel"} & {x.data for x in in_order([value]) if x.op == "input"}
    if (like == "den" and rows) or value.axes == axes == TILE:
        return name
    if value.op == "constant":
        return f"tl.full({like}.shape, {name}, tl.float32)"
    return f"tl.zeros_like({like}) + {_aligned(name, value.axes, axes)}"


def _number(number: float | bool) -> str:
    return repr(number) if isinstance(number, bool) or math.isfinite(number) else f'float("{number}")'


def triton_functions(
    source: str, digest: str, names: Sequence[str] = ("forward", "backward"), given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Functions of a source, which may use those given, for Triton, which reads their text where tracebacks do."""
    place = f"<linvit formula {digest}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    named = {"__name__": f"linvit_formula_{digest}", "__package__": __package__}  # for the relative imports of HEADER
    module: dict[str, Any] = {**named, **(given or {})}
    exec(compile(source, place, "exec"), module)
    return {name: module[name] for name in names if name in module}
