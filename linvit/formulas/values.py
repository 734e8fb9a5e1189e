"""Numbers of a formula before they become device code: operations on other numbers, simplified as they are made.

The `axes` of a value are what it differs along: TOKEN, CHANNEL, both (a tile) or neither (one number for a head).
Values with the same key are the same number, so nothing is computed twice.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKEN, CHANNEL = 1, 2
TILE = TOKEN | CHANNEL
LARGEST_POWER = 8  # that is multiplied out


class Operation(NamedTuple):
    """An operation as text of Triton and of C++, and as a function of torch."""

    triton: str
    cpp: str
    torch: Callable[..., Tensor]


OPERATIONS = {
    "neg": Operation("-{}", "-{}", torch.neg),
    "abs": Operation("tl.abs({})", "std::fabs({})", torch.abs),
    "exp": Operation("power_of_two({} * LOG2E)", "exp_of({})", torch.exp),
    "log": Operation("tl.log({})", "log_of({})", torch.log),
    "sqrt": Operation("tl.sqrt({})", "std::sqrt({})", torch.sqrt),
    "sin": Operation("tl.sin({})", "std::sin({})", torch.sin),
    "cos": Operation("tl.cos({})", "std::cos({})", torch.cos),
    "erf": Operation("tl.erf({})", "std::erf({})", torch.erf),
    "floor": Operation("tl.floor({})", "std::floor({})", torch.floor),
    "add": Operation("{} + {}", "{} + {}", torch.add),
    "sub": Operation("{} - {}", "{} - {}", torch.sub),
    "mul": Operation("{} * {}", "{} * {}", torch.mul),
    "div": Operation("{} / {}", "{} / {}", torch.div),
    "max": Operation("tl.maximum({}, {}, LOUD)", "max_of({}, {})", torch.maximum),
    "min": Operation("tl.minimum({}, {}, LOUD)", "min_of({}, {})", torch.minimum),
    "lt": Operation("{} < {}", "{} < {}", torch.lt),
    "le": Operation("{} <= {}", "{} <= {}", torch.le),
    "eq": Operation("{} == {}", "{} == {}", torch.eq),
    "and": Operation("both({}, {})", "{} & {}", torch.logical_and),
    "or": Operation("either({}, {})", "{} | {}", torch.logical_or),
    "not": Operation("{} == 0", "!{}", torch.logical_not),
    "where": Operation("tl.where({}, {}, {})", "select({}, {}, {})", torch.where),
    "sum": Operation("row_sum({}, WIDTH)", "{} + {}", lambda x: x.sum(-1, keepdim=True)),
    "amax": Operation("row_max({}, WIDTH)", "max_of({}, {})", lambda x: x.amax(-1, keepdim=True)),
    "amin": Operation("row_min({}, WIDTH)", "min_of({}, {})", lambda x: x.amin(-1, keepdim=True)),
    # Written with those above when they become device code.
    "tanh": Operation("", "", torch.tanh),
    "expm1": Operation("", "", torch.expm1),
    "log1p": Operation("", "", torch.log1p),
    "pow": Operation("", "", torch.pow),
}
CONDITIONS = ("lt", "le", "eq", "and", "or", "not")
COMMUTATIVE = ("add", "mul", "max", "min", "eq", "and", "or")
REDUCTIONS = ("sum", "amax", "amin")


@dataclass(frozen=True)
class Value:
    """A number, or a condition, for each token and channel, for each of these, or for a head."""

    op: str
    operands: tuple["Value", ...] = field(compare=False, repr=False)
    data: Any = field(compare=False)
    axes: int = field(compare=False)
    key: str

    @property
    def is_condition(self) -> bool:
        return self.op in CONDITIONS or (self.op == "constant" and isinstance(self.data, bool))

    def __neg__(self) -> "Value":
        return make("neg", self)

    def __add__(self, other: "Value | float") -> "Value":
        return make("add", self, other)

    def __sub__(self, other: "Value | float") -> "Value":
        return make("sub", self, other)

    def __rsub__(self, other: float) -> "Value":
        return make("sub", other, self)

    def __mul__(self, other: "Value | float") -> "Value":
        return make("mul", self, other)

    def __truediv__(self, other: "Value | float") -> "Value":
        return make("div", self, other)

    def __rtruediv__(self, other: float) -> "Value":
        return make("div", other, self)

    __radd__, __rmul__ = __add__, __mul__


def _value(op: str, operands: tuple[Value, ...], data: Any, axes: int) -> Value:
    text = f"{op}({','.join(operand.key for operand in operands)}){data!r}{axes}"
    return Value(op, operands, data, axes, hashlib.sha256(text.encode()).hexdigest()[:20])


def named(name: str, axes: int) -> Value:
    """A number that device code is given."""
    return _value("input", (), name, axes)


def constant(number: float | bool) -> Value:
    return _value("constant", (), number if isinstance(number, bool) else float(number), 0)


def number_of(value: "Value | float") -> Value:
    """The value as a number: a condition is 1 or 0."""
    if not isinstance(value, Value):
        return constant(float(value))
    return make("where", value, 1.0, 0.0) if value.is_condition else value


def condition_of(value: "Value | float") -> Value:
    if not isinstance(value, Value):
        return constant(bool(value))
    return value if value.is_condition else make("not", make("eq", value, 0.0))


def make(op: str, *given: "Value | float") -> Value:
    """The operation, simplified where this changes no rounding but that of divisions by constants and of squares."""
    logical = {"and": 2, "or": 2, "not": 1, "where": 1}.get(op, 0)
    operands = tuple(condition_of(x) if i < logical else number_of(x) for i, x in enumerate(given))
    if op in COMMUTATIVE:
        operands = tuple(sorted(operands, key=lambda x: (x.op == "constant", x.key)))
    if all(x.op == "constant" for x in operands) and op not in REDUCTIONS:
        with torch.no_grad():
            numbers = [
                torch.tensor(x.data, dtype=None if isinstance(x.data, bool) else torch.float64) for x in operands
            ]
            result = OPERATIONS[op].torch(*numbers).item()
        return constant(result)
    simpler = _RULES[op](*operands) if op in _RULES else None
    if simpler is not None:
        return simpler
    axes = 0
    for operand in operands:
        axes |= operand.axes
    return _value(op, operands, None, axes & TOKEN if op in REDUCTIONS else axes)


def _is(value: Value, number: float | bool) -> bool:
    return value.op == "constant" and value.data == number


def _add(a: Value, b: Value) -> Value | None:
    if _is(b, 0):
        return a
    if _is(b, 1) and a.op == "sub" and _is(a.operands[1], 1):  # elu(x) + 1
        return a.operands[0]
    for x, y in ((a, b), (b, a)):
        if y.op == "neg":
            return x - y.operands[0]
    return None


def _sub(a: Value, b: Value) -> Value | None:
    if _is(b, 0):
        return a
    return a + b.operands[0] if b.op == "neg" else -b if _is(a, 0) else None


def _mul(a: Value, b: Value) -> Value | None:
    if _is(b, 1):
        return a
    if _is(b, -1):
        return -a
    for x, y in ((a, b), (b, a)):
        if y.op == "neg":
            return -(x * y.operands[0])
        if y.op == "mul" and y.operands[0] == y.operands[1] != x:  # so that the square is no number of its own
            return x * y.operands[0] * y.operands[0]
    return None


def _div(a: Value, b: Value) -> Value | None:
    if b.op == "constant" and b.data and math.isfinite(1 / b.data):
        return a * (1 / b.data)
    return -(a.operands[0] / b) if a.op == "neg" else None


def _neg(a: Value) -> Value | None:
    if a.op == "neg":
        return a.operands[0]
    return a.operands[1] - a.operands[0] if a.op == "sub" else None


def _and(a: Value, b: Value) -> Value | None:
    return a if _is(b, True) or a == b else b if _is(b, False) else None


def _or(a: Value, b: Value) -> Value | None:
    return a if _is(b, False) or a == b else b if _is(b, True) else None


def _where(condition: Value, a: Value, b: Value) -> Value | None:
    if condition.op == "constant":
        return a if condition.data else b
    if a == b:
        return a
    if condition.op == "not":
        return make("where", condition.operands[0], b, a)
    return None


def _pow(a: Value, b: Value) -> Value | None:
    if b.op != "constant":
        return None
    if b.data in (0.5, -0.5):
        return make("sqrt", a) if b.data > 0 else 1 / make("sqrt", a)
    if not float(b.data).is_integer() or abs(b.data) > LARGEST_POWER:
        return None
    if b.data < 0:
        return 1 / make("pow", a, -b.data)
    product = constant(1)
    for _ in range(int(b.data)):
        product = product * a if product.op != "constant" else a
    return product


_RULES: dict[str, Callable[..., Value | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "and": _and,
    "or": _or,
    "not": lambda a: a.operands[0] if a.op == "not" else None,
    "where": _where,
    "pow": _pow,
}


def in_order(outputs: Iterable[Value]) -> list[Value]:
    """The outputs and all that they are computed from, each after its operands."""
    ordered: dict[Value, None] = {}

    def visit(value: Value) -> None:
        if value not in ordered:
            for operand in value.operands:
                visit(operand)
            ordered[value] = None

    for output in outputs:
        visit(output)
    return list(ordered)


def rebuilt(outputs: Iterable[Value], rule: Callable[[Value, tuple[Value, ...]], Value]) -> list[Value]:
    """The outputs with rule(value, its new operands) in place of every value."""
    outputs, new = list(outputs), dict[Value, Value]()
    for value in in_order(outputs):
        new[value] = rule(value, tuple(new[operand] for operand in value.operands))
    return [new[output] for output in outputs]
