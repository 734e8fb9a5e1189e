"""The choice of the backend: plain torch, the Triton kernels, or the C++ kernel."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linvit.arguments import kind

BACKENDS = ("auto", "torch", "triton", "cpp")


def kernel_for(backend: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Callable[..., Tensor] | None:
    """The kernel for these arguments of `linear_attention`; None for plain torch.

    "auto" is plain torch, unless a kernel can run and is ready: on a GPU the Triton kernels once `linvit check-gpu` has
    recorded that they are exact there, on a CPU the C++ kernel once `linvit.kernels.cpu.build` has been called.
    """
    if not isinstance(backend, str):
        raise TypeError(f"`backend` is {kind(backend)}, expected one of {', '.join(BACKENDS)}")
    if backend not in BACKENDS:
        raise ValueError(f"`backend` is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "torch" or (backend == "auto" and not _ready(query, options.get("causal"))):
        return None
    from linvit import kernels

    home = kernels if backend == "triton" or (backend == "auto" and query.is_cuda) else kernels.cpu
    reason = home.obstacle(query, key, value, **options)
    if reason is None:
        return home.linear_attention
    if backend == "auto":
        return None
    raise ValueError(f"`backend` is {backend!r}, which cannot run: {reason}; use 'auto' or 'torch'")


def _ready(query: Tensor, causal: bool | str | None) -> bool:
    """Whether "auto" may use a kernel on this device."""
    if not query.is_cuda:
        return built_for_cpu() is not None
    if torch.compiler.is_exporting():
        return False
    from linvit.kernels import record

    return record.passed(query.device, bool(causal))


def built_for_cpu() -> ModuleType | None:
    """`linvit.kernels.cpu` if it has been built in this process; None if not, and in exported programs."""
    if torch.compiler.is_exporting():
        return None  # other processes run them
    module = sys.modules.get("linvit.kernels.cpu")
    return module if module is not None and module.ready() else None
