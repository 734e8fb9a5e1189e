"""Where the formula runs: plain torch, the Triton kernels, or the C++ kernel."""

import sys
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton", "cpp")


def choose_backend(backend: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str:
    """ "torch", "triton" or "cpp", for these arguments of `linear_attention`.

    "auto" is the C++ kernel once `linvit.kernels.cpu.build` has been called, wherever it can run, else torch: the
    Triton kernels have passed their tests in Triton's interpreter, and have not run on a GPU.

    Raises:
        ValueError: for an unknown backend, or one that cannot run; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "cpp" if _cpp_is_built() and _obstacle("cpp", query, key, value, **options) is None else "torch"
    if backend == "torch":
        return backend
    reason = _obstacle(backend, query, key, value, **options)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot run: {reason}; use 'auto' or 'torch'")
    return backend


def _obstacle(backend: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str | None:
    from linvit import kernels

    obstacle = kernels.cpu.obstacle if backend == "cpp" else kernels.obstacle
    return obstacle(query, key, value, **options)


def _cpp_is_built() -> bool:
    """Whether someone has built the kernel; who has not does not pay for importing it."""
    if torch.compiler.is_compiling():
        return False
    module = sys.modules.get("linvit.kernels.cpu")
    return module is not None and module.ready()
