"""TorchScript around modules that it cannot compile: scripted, they are called back in Python, by number.

Such scripted networks run in the process that scripted them and cannot be saved to a file; TorchScript is deprecated in
torch, and `torch.export` needs none of this.
"""

from itertools import count

import torch
from torch import Tensor, nn

_MODULES: dict[int, nn.Module] = {}
_NUMBERS = count(1)


class CalledBack(nn.Module):
    """A module whose forward, when scripted, hands its arguments and `number` to one of the functions below.

    Scripting keeps the module, whose parameters the scripted one shares, for as long as the process lives.
    """

    number: torch.jit.Final[int]

    def __init__(self):
        super().__init__()
        self.number = 0

    def __prepare_scriptable__(self) -> "CalledBack":
        self.number = next(_NUMBERS)
        _MODULES[self.number] = self
        return self


@torch.jit.ignore
def call_with_tokens(number: int, training: bool, x: Tensor, grid: list[int] | None) -> Tensor:
    """What the module gives for x, and for a grid if there is one."""
    module = _MODULES[number].train(training)
    return module(x) if grid is None else module(x, grid)


@torch.jit.ignore
def call_with_maps(
    number: int, query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """What the module gives for the operands of an attention."""
    return _MODULES[number](query, key, value, cos, sin)
