"""What a formula's numbers are known to be, and the same numbers in operations that devices have."""

import math
from collections.abc import Iterable

from linvit.formulas.values import Value, constant, in_order, make, rebuilt

TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""Of tanh(x) / x - 1 by x², for |x| < 0.625 (Cephes)."""
EVERYTHING = (-math.inf, math.inf)
Range = tuple[float, float]


def ranges(outputs: Iterable[Value]) -> dict[Value, Range]:
    """Least and largest number that each value may be, for any inputs that are numbers."""
    known: dict[Value, Range] = {}
    for value in in_order(outputs):
        known[value] = _range(value, [known[operand] for operand in value.operands])
    return known


def _range(value: Value, of: list[Range]) -> Range:
    op, operands = value.op, value.operands
    if op == "constant":
        return (float(value.data), float(value.data))
    if op in ("max", "amax", "min", "amin", "floor", "tanh", "sqrt", "exp", "expm1", "log1p", "log"):
        return _monotone(op, of)
    if op == "mul" and operands[0] == operands[1]:
        return 0.0, math.inf
    if op in ("mul", "div"):
        (low, _), (second_low, _) = of
        return (0.0, math.inf) if low >= 0 and second_low >= 0 else EVERYTHING
    if op in ("add", "sub"):
        (low, high), (second_low, second_high) = of
        return (low + second_low, high + second_high) if op == "add" else (low - second_high, high - second_low)
    fixed = {"abs": (0.0, math.inf), "sin": (-1.0, 1.0), "cos": (-1.0, 1.0), "erf": (-1.0, 1.0)}
    if op in fixed:
        return fixed[op]
    if op == "neg":
        return -of[0][1], -of[0][0]
    if op == "where":
        condition = operands[0]
        if (
            condition.op in ("lt", "le")
            and condition.operands[1] == operands[1]
            and condition.operands[0].op == "constant"
        ):
            of[1] = max(of[1][0], condition.operands[0].data), of[1][1]
        return min(of[1][0], of[2][0]), max(of[1][1], of[2][1])
    if (op == "sum" and of[0][0] >= 0) or (op == "pow" and of[0][0] >= 0):
        return 0.0, math.inf
    return EVERYTHING


def _monotone(op: str, of: list[Range]) -> Range:
    lows, highs = zip(*of, strict=True)
    if op in ("max", "amax"):
        return max(lows), max(highs)
    if op in ("min", "amin"):
        return min(lows), min(highs)

    def applied(x: float) -> float:
        if op in ("log", "log1p"):
            shifted = x + (op == "log1p")
            return -math.inf if shifted <= 0 else math.log(shifted)
        if op in ("exp", "expm1"):
            return (math.inf if x > 700 else math.exp(x)) - (op == "expm1")
        if op == "floor":
            return x if math.isinf(x) else math.floor(x)
        return math.tanh(x) if op == "tanh" else math.sqrt(max(x, 0.0))

    return applied(lows[0]), applied(highs[0])


def lowered(outputs: Iterable[Value]) -> list[Value]:
    """The outputs in operations that have text in Triton and C++."""
    outputs = list(outputs)
    known = ranges(outputs)

    def rule(value: Value, operands: tuple[Value, ...]) -> Value:
        if value.op == "tanh":
            return _tanh(operands[0])
        if value.op == "expm1":
            return _expm1(operands[0])
        if value.op == "log1p":
            return _log1p(operands[0])
        if value.op == "min" and value.operands[1] == constant(1) and value.operands[0].op == "add":
            for total, power in (
                operands[0].operands,
                operands[0].operands[::-1],
            ):  # the derivative of elu, from elu + 1
                if (
                    power.op == "exp"
                    and power.operands[0].op == "min"
                    and total == make("max", power.operands[0].operands[0], 0.0)
                ):
                    return power
        if value.op == "pow":
            (least, _), (least_exponent, _) = (known[operand] for operand in value.operands)
            return _pow(operands[0], operands[1], least, least_exponent)
        return make(value.op, *operands) if operands else value

    return rebuilt(outputs, rule)


def _small_tanh(x: Value) -> Value:
    square = x * x
    polynomial = constant(TANH[0])
    for coefficient in TANH[1:]:
        polynomial = polynomial * square + coefficient
    return polynomial * square * x + x


def _tanh(x: Value) -> Value:
    size = make("abs", x)
    large = 1 - 2 / (make("exp", size * 2) + 1)
    signed = make("where", make("lt", x, 0.0), -large, large)
    return make("where", make("lt", size, 0.625), _small_tanh(x), signed)


def _expm1(x: Value) -> Value:
    """tanh(x / 2) · (e^x + 1) where e^x - 1 would lose digits."""
    power = make("exp", x)
    return make("where", make("lt", make("abs", x), 1.0), _small_tanh(x * 0.5) * (power + 1), power - 1)


def _log1p(x: Value) -> Value:
    """With the logarithm of the rounded 1 + x, corrected by what was rounded away."""
    shifted = make("add", x, 1.0)
    rounded = make("sub", shifted, 1.0)
    log = make("log", shifted)
    corrected = make("where", make("eq", rounded, x), log, log * (x / rounded))
    return make("where", make("eq", shifted, 1.0), x, corrected)


def _pow(x: Value, exponent: Value, least: float, least_exponent: float) -> Value:
    """x^exponent; `least` is the least that x may be, and so for the exponent."""
    size = x if least >= 0 else make("abs", x)
    power = make("exp", exponent * make("log", size))
    if least < 0:
        odd = make("not", make("eq", make("floor", exponent * 0.5) * 2, exponent))
        signed = make("where", odd, -power, power)
        whole = make("eq", make("floor", exponent), exponent)
        power = make("where", make("lt", x, 0.0), make("where", whole, signed, math.nan), power)
    never_zero = least_exponent > 0 or (exponent.op == "constant" and exponent.data != 0)
    return power if never_zero else make("where", make("eq", exponent, 0.0), 1.0, power)
