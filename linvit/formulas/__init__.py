"""Feature maps and normalizers: functions of torch, by name or of users, and the device code that is traced from them.

A function is traced once; its numbers become constants, and its tensors are read at each call. A new function of the
same code is traced again, up to a limit, if it has other numbers or objects; not for other tensors of the same kind.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from linvit.formulas.feature_map import FEATURE_MAPS
from linvit.formulas.normalizer import NORMALIZERS
from linvit.formulas.recorder import AcrossHeads as AcrossHeads
from linvit.formulas.recorder import Untraceable as Untraceable
from linvit.formulas.trace import Formula as Formula
from linvit.formulas.trace import trace_map, trace_normalizer

MOST = 256  # formulas that are kept, and traces of functions with the same code
FAILURE = 32  # traces that one in vain counts as
_formulas: OrderedDict[Any, tuple[list[Any], Formula | Untraceable, dict[int, int]]] = OrderedDict()
_traces: OrderedDict[int, "Traces"] = OrderedDict()  # by the id of the code
BY_VALUE = int, float, str  # what functions find that is the same if it is equal


@dataclass
class Traces:
    """How often functions of a code were traced, and the latest error. The code is kept, so that its id stays."""

    code: Any
    count: int = 0
    error: Untraceable | None = None


@cache
def named_formula(name: str, is_map: bool) -> Formula:
    """That of a name, of any number of heads and width; raises Untraceable if it joins tokens or heads."""
    return trace_map(FEATURE_MAPS[name], 2, 3) if is_map else trace_normalizer(NORMALIZERS[name], 2)


def formula_of(function: Callable[..., Any], heads: int, width: int | None, device: torch.device) -> Formula:
    """The formula of a feature map for heads of that width, or of a normalizer if there is none.

    Raises:
        Untraceable: if the function cannot become device code; AcrossHeads if it could, were there one head.
    """
    code, values = _parts(function)
    kinds = [x if isinstance(x, BY_VALUE) else _kind(x, values) for x in values]
    key = id(code), *kinds, heads, width, device
    entry = _formulas.get(key)
    if entry is None or _lacks_gradients(entry[1]):
        formula = _traced(function, code, heads, width, device)
        kept, places = [code, *(x for x in values if not isinstance(x, (*BY_VALUE, Tensor)))], dict[int, int]()
        if isinstance(formula, Formula):
            places = {slot: i for i, x in enumerate(values) for slot, held in formula.held.items() if held is x}
            formula = formula.holding(dict.fromkeys(places, torch.empty(0)))  # another call has its own
        _formulas[key] = entry = kept, formula, places  # kept, so that ids stay
        if len(_formulas) > MOST:
            _formulas.popitem(last=False)
    _, formula, places = entry
    if isinstance(formula, Untraceable):
        raise type(formula)(str(formula))
    return formula.holding({slot: values[i] for slot, i in places.items()}) if places else formula


def warn_of_lost_parameters(name: str, value: object) -> None:
    """Warns of a function that uses parameters: by themselves, in a module, or as a module's method.

    name: of the option whose value it is. No network knows such parameters.
    """
    used = [*_parts(value)[1], getattr(value, "__self__", None)] if callable(value) else []
    if any(
        isinstance(x, nn.Parameter) or (isinstance(x, nn.Module) and next(x.parameters(), None) is not None)
        for x in used
    ):
        warnings.warn(
            f"`{name}` is the function {getattr(value, '__name__', type(value).__name__)}, whose nn.Parameter belongs "
            "to no network: optimizers and state_dict() miss it. Make the function an nn.Module.",
            stacklevel=2,
        )


def _kind(x: Any, values: list[Any]) -> Any:
    """What a formula depends on of a tensor or object that its function finds by name."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.requires_grad, next(i for i, other in enumerate(values) if other is x)
    return id(x)


def _lacks_gradients(formula: Formula | Untraceable) -> bool:
    """Whether a tensor, of an object that the function uses, needs a gradient since it was traced."""
    return isinstance(formula, Formula) and not formula.has_all_gradients


def _traced(
    function: Callable[..., Any], code: Any, heads: int, width: int | None, device: torch.device
) -> Formula | Untraceable:
    traces = _traces.setdefault(id(code), Traces(code))
    if len(_traces) > MOST:
        _traces.popitem(last=False)
    if traces.count >= MOST:
        reason = f"functions of this code have been made {MOST} times, and each must be traced: make one and keep it"
        return traces.error or Untraceable(reason)
    traces.count += 1
    try:
        if width is None:
            return trace_normalizer(function, heads, device)
        return trace_map(function, heads, width, device)
    except Untraceable as error:
        traces.count += FAILURE
        traces.error = error
        return error


def _parts(function: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """The code of a function, and the objects and numbers that it finds by name: the same if it computes the same."""
    if isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        names = map(function.__globals__.get, function.__code__.co_names)
        return function.__code__, [*cells, *defaults, *names]
    if isinstance(function, partial):
        code, values = _parts(function.func)
        return code, [*values, *function.args, *function.keywords, *function.keywords.values()]
    if isinstance(function, nn.Module):
        numbers = [x for each in function.modules() for x in vars(each).values() if isinstance(x, int | float)]
        return function, [*function.parameters(), *function.buffers(), *numbers]
    return function, []
