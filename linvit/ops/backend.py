"""Where the formula runs: plain torch, or the Triton kernels."""

from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton")


def runs_on_triton(backend: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    """Whether the kernels take these arguments of `linear_attention`.

    "auto" takes them for CUDA tensors where they can, and never while a model is exported or traced, so that the result
    runs elsewhere.

    Raises:
        ValueError: for an unknown backend, or "triton" where the kernels cannot run; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "torch":
        return False
    if backend == "auto" and (query.device.type != "cuda" or _recorded()):
        return False
    from linvit.kernels import obstacle

    reason = obstacle(query, key, value, **options)
    if backend == "triton" and reason is not None:
        raise ValueError(f"backend='triton' cannot run: {reason}; use 'auto' or 'torch'")
    return reason is None


def _recorded() -> bool:
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
