"""Checks of tensors and networks that a caller passes, with one sentence for each wrong one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise TypeError unless all are tensors, ValueError unless they are dense and on the device of the first."""
    first, device = next(iter(tensors)), None
    for name, x in tensors.items():
        check_dense(name, x)
        if device is None:
            device = x.device
        elif x.device != device:
            raise ValueError(f"`{name}` is on {x.device} and `{first}` on {device}, expected one device: move one")


def check_dense(name: str, x: object) -> None:
    """Raise TypeError unless the argument is a tensor, ValueError for a sparse, nested or similar one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` is {kind(x)}, expected a tensor")
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(f"`{name}` is a {layout} tensor, expected a dense one: convert it")


def check_network(name: str, network: object) -> None:
    """Raise TypeError unless the argument is a module."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"`{name}` is {kind(network)}, expected an nn.Module, such as timm.create_model returns")


def check_floating(name: str, dtype: torch.dtype, remedy: str = "cast it") -> None:
    """Raise ValueError unless operator and networks compute with this dtype."""
    if dtype not in FLOATS:
        raise ValueError(f"`{name}` is {dtype}, expected float16, bfloat16, float32 or float64: {remedy}")


def kind(value: object) -> str:
    """The type of a wrong value, for an error message."""
    return "None" if value is None else f"of type {type(value).__name__}"


def is_traced() -> bool:
    """Whether a compiler, an exporter or torch.jit traces the code, so that sizes may be symbols."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
