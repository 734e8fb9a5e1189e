"""Where the formula runs: plain torch, or the Triton kernels."""

from typing import Any

from torch import Tensor

BACKENDS = ("auto", "torch", "triton")


def runs_on_triton(backend: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    """Whether the kernels take these arguments of `linear_attention`: only where "triton" asks for them.

    "auto" is torch for now: the kernels have passed their tests in Triton's interpreter, and have not run on a GPU.

    Raises:
        ValueError: for an unknown backend, or "triton" where the kernels cannot run; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend != "triton":
        return False
    from linvit.kernels import obstacle

    reason = obstacle(query, key, value, **options)
    if reason is not None:
        raise ValueError(f"backend='triton' cannot run: {reason}; use 'auto' or 'torch'")
    return True
