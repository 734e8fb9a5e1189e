"""What torch calls its operations, as operations on values."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from linvit.formulas.values import Value, make, number_of

Given = Value | float


def _add(a: Given, b: Given, alpha: float = 1) -> Value:
    return make("add", a, make("mul", b, alpha))


def _sub(a: Given, b: Given, alpha: float = 1) -> Value:
    return make("sub", a, make("mul", b, alpha))


def _div(a: Given, b: Given, rounding_mode: str | None = None) -> Value:
    quotient = make("div", a, b)
    if rounding_mode is None:
        return quotient
    down = make("floor", quotient)
    return (
        down if rounding_mode == "floor" else make("where", make("lt", quotient, 0.0), -make("floor", -quotient), down)
    )


def _clamp(x: Value, min: Given | None = None, max: Given | None = None) -> Value:
    raised = x if min is None else make("max", x, min)
    return raised if max is None else make("min", raised, max)


def _sign(x: Value) -> Value:
    """NaN is its own sign."""
    return make("where", make("lt", 0.0, x), 1.0, make("where", make("lt", x, 0.0), -1.0, x))


def _elu(x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    power = make("min", x, 0.0) * input_scale
    if alpha == scale == 1:
        return make("max", x, 0.0) + make("exp", power) - 1  # so that + 1 takes the constant away
    return (make("max", x, 0.0) + make("expm1", power) * alpha) * scale


def _elu_backward(grad: Value, alpha: float, scale: float, input_scale: float, is_result: bool, x: Value) -> Value:
    if is_result:
        return grad * make("where", make("le", x, 0.0), (x + alpha * scale) * input_scale, scale)
    slope = make("exp", make("min", x, 0.0) * input_scale)
    if alpha == input_scale == 1:
        return grad * (slope * scale)
    return grad * make("where", make("le", x, 0.0), slope * (alpha * scale * input_scale), scale)


POINTWISE: dict[str, Callable[..., Value]] = {
    **{name: partial(make, name) for name in ("neg", "abs", "exp", "log", "sqrt", "sin", "cos", "erf", "floor")},
    **{name: partial(make, name) for name in ("tanh", "expm1", "log1p", "pow", "mul", "where", "lt", "le", "eq")},
    "add": _add,
    "sub": _sub,
    "rsub": lambda a, b, alpha=1: _sub(b, a, alpha),
    "div": _div,
    "maximum": partial(make, "max"),
    "minimum": partial(make, "min"),
    "clamp": _clamp,
    "relu": lambda x: make("max", x, 0.0),
    "gt": lambda a, b: make("lt", b, a),
    "ge": lambda a, b: make("le", b, a),
    "ne": lambda a, b: make("not", make("eq", a, b)),
    "bitwise_and": partial(make, "and"),
    "bitwise_or": partial(make, "or"),
    "bitwise_not": partial(make, "not"),
    "exp2": lambda x: make("exp", x * math.log(2)),
    "log2": lambda x: make("log", x) * (1 / math.log(2)),
    "log10": lambda x: make("log", x) * (1 / math.log(10)),
    "rsqrt": lambda x: 1 / make("sqrt", x),
    "reciprocal": lambda x: 1 / number_of(x),
    "erfc": lambda x: 1 - make("erf", x),
    "ceil": lambda x: -make("floor", -x),
    "sign": _sign,
    "elu": _elu,
    "elu_backward": _elu_backward,
}


def variance(x: Tensor, dim: Any = None, correction: float | None = None, keepdim: bool = False, **_: Any) -> Tensor:
    """In operations that have a value."""
    dim = range(x.dim()) if dim is None else dim
    dim = [place % x.dim() for place in dim]
    squares = (x - x.mean(dim, keepdim=True)) ** 2
    count = math.prod(x.shape[place] for place in dim) - (1 if correction is None else correction)
    return squares.sum(dim, keepdim=keepdim) / count


SAME = ("clone", "detach", "alias", "_to_copy", "lift_fresh", "positive", "convert_element_type")
VIEWS = ("view", "unsqueeze", "squeeze", "expand", "transpose", "permute", "slice", "broadcast_in_dim")
FILLS: dict[str, Callable[..., float]] = {
    "full": lambda size, number, **_: number,
    "full_like": lambda x, number, **_: number,
    "new_full": lambda x, size, number, **_: number,
    "scalar_tensor": lambda number, **_: number,
    **dict.fromkeys(("ones", "new_ones"), lambda *_, **__: 1.0),
    **dict.fromkeys(("zeros", "new_zeros"), lambda *_, **__: 0.0),
}
CHEAP = ("add", "sub", "rsub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne")
"""Operations with a constant that device code does itself rather than read another parameter."""
ASKING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")
"""Operations that need numbers which are not known before the kernel runs."""
