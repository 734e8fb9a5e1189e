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

    "auto" is the C++ kernel if `linvit.kernels.cpu.build` has been called and it can run, otherwise torch: the
    Triton kernels have passed their tests in Triton's interpreter, but have not run on a GPU yet.

    Raises:
        TypeError: if `backend` is not a string.
        ValueError: for an unknown backend, or one that cannot run; the message says why.
    """
    if not isinstance(backend, str):
        raise TypeError(f"`backend` is {kind(backend)}, expected one of {', '.join(BACKENDS)}")
    if backend not in BACKENDS:
        raise ValueError(f"`backend` is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "torch" or (backend == "auto" and built_for_cpu() is None):
        return None
    from linvit import kernels

    home = kernels if backend == "triton" else kernels.cpu
    reason = home.obstacle(query, key, value, **options)
    if reason is None:
        kernel: Callable[..., Tensor] = home.linear_attention
        return kernel
    if backend == "auto":
        return None
    raise ValueError(f"`backend` is {backend!r}, which cannot run: {reason}; use 'auto' or 'torch'")


def built_for_cpu() -> ModuleType | None:
    """`linvit.kernels.cpu` if it has been built in this process; None if not, and in exported programs."""
    if torch.compiler.is_exporting():
        return None  # other processes run them
    module = sys.modules.get("linvit.kernels.cpu")
    return module if module is not None and module.ready() else None
