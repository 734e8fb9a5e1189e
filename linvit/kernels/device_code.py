"""The names of feature maps and normalizers as device code, which the kernels take as arguments.

Parameters come as the tuple (pointer to rows of all heads, head); no name has any.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from linvit.formulas.trace import Formula
from linvit.formulas.triton_source import triton_functions, triton_source

Parameters = Callable[[int, int], Tensor]


class FeatureMap(NamedTuple):
    """κ as device code.

    Attributes:
        code: functions of x (a tile in float32), parameters and the shape of the tile that returns κ(x), and of x, the
            gradient of κ(x), parameters and shape that returns that of x.
        positive: whether κ is never negative.
        parameters: gives them for a number of heads and of columns; None without any.
    """

    code: tuple[Any, Any]
    positive: bool
    parameters: Parameters | None = None


class Normalizer(NamedTuple):
    """The two numbers per query that make out = gain · covariance + level · u, as in `linvit.formulas.normalizer`.

    Attributes:
        code: functions of num, den, mass, scale, eps and parameters that returns gain and level, and of dgain, dlevel
            and the same that returns dnum and dden.
        proportional: whether level = gain · num and gain does not depend on num, so that out = gain · Rκ(q) S with
            the S of values that are not centred.
    """

    code: tuple[Any, Any]
    proportional: bool
    parameters: Parameters | None = None


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _nothing():
    pass


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors too."""
    return not isinstance(_nothing, triton.JITFunction)


INTERPRETED = tl.constexpr(interpreted())
PTX = tl.constexpr(not interpreted() and torch.version.hip is None)
LOUD = tl.constexpr(tl.PropagateNan.ALL)  # what is not a number stays so


@triton.jit
def power_of_two(x):
    """2^x; numbers below the normal ones become zero, which saves three instructions of eight."""
    if PTX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def elu1(x, given, SHAPE):
    return tl.maximum(x, 0.0) + power_of_two(tl.minimum(x * LOG2E, 0.0, LOUD))


@triton.jit
def elu1_backward(x, dy, given, SHAPE):
    return dy * power_of_two(tl.minimum(x * LOG2E, 0.0, LOUD))


@triton.jit
def relu(x, given, SHAPE):
    return tl.maximum(x, 0.0, LOUD)


@triton.jit
def relu_backward(x, dy, given, SHAPE):
    return tl.where(x > 0, dy, 0.0)


@triton.jit
def exp(x, given, SHAPE):
    return power_of_two(x * LOG2E)


@triton.jit
def exp_backward(x, dy, given, SHAPE):
    return dy * power_of_two(x * LOG2E)


@triton.jit
def identity(x, given, SHAPE):
    return x


@triton.jit
def identity_backward(x, dy, given, SHAPE):
    return dy


@triton.jit
def divide(num, den, mass, scale, eps, given):
    gain = 1 / (den + eps)
    return gain, num * gain


@triton.jit
def divide_backward(dgain, dlevel, num, den, mass, scale, eps, given):
    gain = 1 / (den + eps)
    return dlevel * gain, -(dgain + dlevel * num) * gain * gain


@triton.jit
def magnitude(num, den, mass, scale, eps, given):
    share = scale / (scale * den + eps)
    return scale + share, scale * (num - den) + share * num


@triton.jit
def magnitude_backward(dgain, dlevel, num, den, mass, scale, eps, given):
    share = scale / (scale * den + eps)
    return dlevel * (share + scale), -(dgain + dlevel * num) * share * share - dlevel * scale


@triton.jit
def subtract(num, den, mass, scale, eps, given):
    return tl.zeros_like(den) + scale, scale * (num - den) + 1


@triton.jit
def subtract_backward(dgain, dlevel, num, den, mass, scale, eps, given):
    return dlevel * scale, -dlevel * scale


@triton.jit
def sum(num, den, mass, scale, eps, given):
    return tl.zeros_like(den) + mass, mass * num


@triton.jit
def sum_backward(dgain, dlevel, num, den, mass, scale, eps, given):
    return dlevel * mass, tl.zeros_like(den)


@triton.jit
def none(num, den, mass, scale, eps, given):
    return tl.zeros_like(den) + 1, num


@triton.jit
def none_backward(dgain, dlevel, num, den, mass, scale, eps, given):
    return dlevel, tl.zeros_like(den)


FEATURE_MAPS = {
    "elu1": FeatureMap((elu1, elu1_backward), True),
    "relu": FeatureMap((relu, relu_backward), True),
    "exp": FeatureMap((exp, exp_backward), True),
    "identity": FeatureMap((identity, identity_backward), False),
}
NORMALIZERS = {
    "divide": Normalizer((divide, divide_backward), True),
    "magnitude": Normalizer((magnitude, magnitude_backward), False),
    "subtract": Normalizer((subtract, subtract_backward), False),
    "sum": Normalizer((sum, sum_backward), True),
    "none": Normalizer((none, none_backward), True),
}


def name_of(formula: Formula) -> str:
    """The name under which the kernels find a formula from now on."""
    table: dict[str, Any] = FEATURE_MAPS if formula.is_map else NORMALIZERS
    name = f"formula {formula.digest}" + f" {id(formula)}" * bool(formula.parameters)
    if name not in table:
        functions = triton_functions(triton_source(formula), formula.digest, ("value", "gradient"))
        code = functions["value"], functions["gradient"]
        parameters = partial(_parameters, formula) if formula.parameters else None
        if formula.is_map:
            table[name] = FeatureMap(code, formula.is_positive, parameters)
        else:
            table[name] = Normalizer(code, formula.is_proportional, parameters)
    return name


def _parameters(formula: Formula, heads: int, columns: int) -> Tensor:
    """(heads, parameters, columns) with zeros beyond the width; of a normalizer (heads, parameters)."""
    rows = [x.float().expand(heads, -1) for x in formula.parameter_tensors(formula.tensors)]
    if formula.is_map:
        rows = [pad(x, (0, columns - x.shape[-1])) for x in rows]
    return torch.stack(rows, 1).contiguous()
