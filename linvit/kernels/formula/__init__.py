"""Device code of users' formulas: traced from functions of torch, written in Triton and C++.

A function is traced once; its numbers become constants, its tensors are read at each call. To change a number, make a
new function.
"""

from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from linvit.kernels.formula.recorder import Untraceable as Untraceable
from linvit.kernels.formula.trace import Formula as Formula
from linvit.kernels.formula.trace import trace_map, trace_normalizer

KEPT = 256  # formulas
_formulas: OrderedDict[Any, tuple[Any, Formula | Untraceable]] = OrderedDict()


def formula_of(function: Callable[..., Any], heads: int, width: int | None, device: torch.device) -> Formula:
    """The formula of a feature map for heads of that width, or of a normalizer if there is none.

    Raises:
        Untraceable: if the function cannot become device code.
    """
    key = (*_identity(function), heads, width, device)
    if key not in _formulas:
        made: Formula | Untraceable
        try:
            made = (
                trace_normalizer(function, heads, device)
                if width is None
                else trace_map(function, heads, width, device)
            )
        except Untraceable as error:
            made = error
        _formulas[key] = function, made  # the function keeps alive what the key names
        if len(_formulas) > KEPT:
            _formulas.popitem(last=False)
    made = _formulas[key][1]
    if isinstance(made, Untraceable):
        raise Untraceable(str(made))
    return made


def _identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Equal for functions that compute the same from the same tensors, such as those of one `lambda` of a loop."""
    if not isinstance(function, FunctionType):
        return (function,)
    code, cells = function.__code__, [cell.cell_contents for cell in function.__closure__ or ()]
    names = [function.__globals__.get(name) for name in code.co_names]
    values = [*cells, *(function.__defaults__ or ()), *names]
    return code, *(x if isinstance(x, int | float) else id(x) for x in values)
