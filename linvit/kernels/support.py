"""The limits of the kernels. Imports no Triton, so that it can also report that Triton is missing."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FEATURE_MAPS = ("elu1", "relu", "exp", "identity")
WEIGHTINGS = ("uniform", "query_mean")
NORMALIZERS = ("divide", "magnitude", "subtract", "none", "sum")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128
OLDEST = (8, 0)


def obstacle(query: Tensor, key: Tensor, value: Tensor, *, causal: bool | str = False, **options: Any) -> str | None:
    """Why these arguments of `linear_attention` cannot run on the kernels, as a clause; None if they can."""
    reason = inputs_obstacle(query, value, **options)
    if reason is not None:
        return reason
    if not torch.compiler.is_compiling() and transforms():
        return "forward-mode gradients or a transform of torch.func are active, and the kernels do not support them"
    weighting = options.get("weighting", "uniform")
    if weighting == "query_mean" and options.get("normalizer") == "sum":
        return "normalizer='sum' has a kernel for uniform weights only"
    if causal == "block":
        return "causal='block' has no kernel"
    if causal and weighting != "uniform":
        return f"weighting={weighting!r} has no causal kernel"
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"head widths are {query.shape[-1]} and {value.shape[-1]}, and the kernels support up to {WIDEST}"
    if len({query.device, key.device, value.device}) > 1:
        return f"the tensors are on {query.device}, {key.device} and {value.device}"
    missing: str | None = machine_obstacle(query.device)
    return missing


def inputs_obstacle(
    query: Tensor,
    value: Tensor,
    *,
    feature_map: Any = "elu1",
    weighting: Any = "uniform",
    normalizer: Any = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    state: Any = None,
    shard: Any = None,
    cu_seqlens: Any = None,
) -> str | None:
    """Why neither the GPU nor the CPU kernels support these arguments, as a clause; None if one of them may."""
    maps = feature_map if isinstance(feature_map, tuple | list) else (feature_map, feature_map)
    for name, given, known in (
        ("the queries' feature_map", maps[0], FEATURE_MAPS),
        ("the keys' feature_map", maps[1], FEATURE_MAPS),
        ("weighting", weighting, WEIGHTINGS),
        ("normalizer", normalizer, NORMALIZERS),
    ):
        if not isinstance(given, str) or given not in known:
            shown = f"{given!r}" if isinstance(given, str) else f"a {type(given).__name__}"
            return f"{name} is {shown}, and the kernels support {', '.join(known)}"
    if state is not None or shard is not None:
        return f"the kernels support no {'shard' if state is None else 'state'}"
    if query.dtype not in DTYPES:
        return f"the tensors are {query.dtype}, and the kernels support float16, bfloat16 and float32"
    if 0 in (*query.shape, *value.shape):
        return "a tensor is empty"
    if rotary is not None and (rotary[0].dim() != 2 or any(table.requires_grad for table in rotary)):
        return "the kernels need rotary tables of shape (tokens, width / 2) without gradients"
    return None


def transforms() -> bool:
    """Whether forward-mode gradients or a transform of `torch.func` are active, which kernels do not support."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


@torch.compiler.assume_constant_result
def machine_obstacle(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of this device, as a clause; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install triton, if it supports this machine"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            return f"the GPU's compute capability is {capability[0]}.{capability[1]}, and the kernels need 8.0"
        return None
    if device.type == "cpu":
        from linvit.kernels.launch import interpreted

        if interpreted():
            return None
    return f"the tensors are on {device.type}, and the kernels need CUDA tensors"
