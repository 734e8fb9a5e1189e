"""What the backward pass computes again instead of keeping it from the forward pass."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

NOTHING, CHEAP, BLOCKS = WHAT = ("nothing", "cheap", "blocks")
"""All activations are kept; only inputs, products and attention; of blocks only the inputs."""
CONVOLUTION = torch.ops.aten.convolution.default
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}
GROUPS = 8  # the argument of a convolution
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recomputed(what: str, module: nn.Module, *inputs: Any, block: bool = False) -> Tensor:
    """The module's output; its backward pass computes `what` again, a name in WHAT. block: it is one of the blocks."""
    if what == NOTHING or not (block or what == CHEAP) or not torch.is_grad_enabled():
        output: Tensor = module(*inputs)
        return output
    if torch.compiler.is_compiling():  # which keeps the statistics of batch norms itself
        kept: dict[str, Any] = (
            {} if what == BLOCKS else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
        )
        return cast(Tensor, checkpoint(module, *inputs, use_reentrant=False, **kept))
    contexts = partial(_contexts, what, module)
    return cast(Tensor, checkpoint(module, *inputs, use_reentrant=False, context_fn=contexts))


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keeps what is expensive; depthwise convolutions are as cheap as norms."""
    expensive = arguments[GROUPS] == 1 if operator is CONVOLUTION else _is_expensive(operator)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_expensive(operator: Any) -> bool:
    name = str(operator)
    ours = name.startswith("linvit.") and "depthwise" not in name
    return operator in PRODUCTS or ours or "scaled_dot_product" in name


def _contexts(what: str, module: nn.Module) -> Contexts:
    """Those of a module's two forward passes: in the second, batch norms keep the statistics of the first."""
    first, second = create_selective_checkpoint_contexts(_policy) if what == CHEAP else (nullcontext(), nullcontext())
    return first, _keeping_statistics(module, second)


@contextmanager
def _keeping_statistics(module: nn.Module, inside: AbstractContextManager[Any]) -> Iterator[None]:
    norms = [(m, m.momentum, m.num_batches_tracked) for m in module.modules() if isinstance(m, _BatchNorm)]
    for norm, _, _ in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with inside:
            yield
    finally:
        for norm, momentum, number in norms:
            norm.momentum, norm.num_batches_tracked = momentum, number
