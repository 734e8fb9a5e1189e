"""Feature maps and normalizers as device code, which the kernels take as arguments.

Names and functions of users take the same way: `linvit.formulas` traces the function of torch and writes the device
code. With its arguments a function gets `given`: a pointer to the rows of all heads' parameters, and the head. A
derivative also gets where the rows of sums over the tokens of each tile go (pointer, strides of a program and a tile),
which tile it is, and what `visible_tokens` needs: mask, `at` and the first token.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from linvit.formulas import Formula, named_formula
from linvit.formulas.triton_source import triton_functions, triton_source


class DeviceCode(NamedTuple):
    """A feature map or normalizer.

    Attributes:
        functions: of a map, of x (a tile in float32), `given` and the shape of the tile, which returns κ(x), and of x,
            the gradient of κ(x), `given` and shape, which returns that of x. Of a normalizer, of num, den, mass, scale,
            eps and `given`, which returns gain and level, and of dgain, dlevel and the same, which returns dnum and
            dden.
        positive: of a map, whether κ is never negative.
        proportional: of a normalizer, whether level = gain · num and gain does not depend on num, so that out = gain ·
            Rκ(q) S with the S of values that are not centred.
    """

    functions: tuple[Any, Any]
    positive: bool = False
    proportional: bool = False


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


_by_name: dict[tuple[str, bool], DeviceCode] = {}


def name_of(formula: Formula) -> str:
    """The name under which the kernels find a formula from now on."""
    name = f"formula {formula.digest}"
    if (name, formula.is_map) not in _by_name:
        functions = triton_functions(triton_source(formula), formula.digest, ("value", "gradient"))
        positive, proportional = formula.is_map and formula.is_positive, not formula.is_map and formula.is_proportional
        _by_name[name, formula.is_map] = DeviceCode(tuple(functions.values()), positive, proportional)
    return name


def device_code(name: str, is_map: bool) -> DeviceCode:
    """That of a name from `name_of`, or of one in the tables of `linvit.formulas`."""
    if (name, is_map) not in _by_name:
        _by_name[name, is_map] = _by_name[name_of(named_formula(name, is_map)), is_map]
    return _by_name[name, is_map]
