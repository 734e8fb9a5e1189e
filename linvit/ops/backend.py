"""The choice of the backend: plain torch, the Triton kernels, or the C++ kernel."""

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linvit.arguments import is_traced, kind
from linvit.formulas import AcrossHeads, Untraceable, formula_of
from linvit.formulas.feature_map import ACROSS_HEADS, ACROSS_TOKENS, FEATURE_MAPS, resolve_feature_map
from linvit.ops.state import accumulator_dtype

BACKENDS = ("auto", "torch", "triton", "cpp")
PREBUILT = Path(__file__).parents[1] / "kernels" / "cpu" / "prebuilt"  # only in wheels with compiled kernels
LARGE = (
    1 << 18
)  # numbers in the queries, 1,024 tokens of four heads of width 64, from which on the C++ kernel saves 1 ms
NARROW = 8  # channels of a head, below which the C++ kernel is slower than torch if torch computes the features
_warn_once = cache(logging.getLogger(__name__).warning)


def kernel_for(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: Any = "elu1",
    normalizer: Any = "divide",
    **options: Any,
) -> partial[Tensor] | None:
    """The kernel for these arguments of `linear_attention`, with its maps and normalizer; None for plain torch.

    It has them as keywords, unless torch has to compute features for it.

    "auto" is plain torch, unless a kernel can run and is ready: on a GPU the Triton kernels once `linvit check-gpu` has
    recorded that they are exact there, on a CPU the C++ kernel if the wheel brought it along or once
    `linvit.kernels.cpu.build` has been called. The first large call that misses it says so in the log.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        got = repr(backend) if isinstance(backend, str) else kind(backend)
        raise ValueError(f"`backend` is {got}, expected one of {', '.join(BACKENDS)}")
    if backend == "torch":
        return None
    home = _ready(query, options.get("causal")) if backend == "auto" else None
    is_missing = backend == "auto" and home is None
    if is_missing and (query.is_cuda or is_traced() or query.numel() < LARGE):
        return None
    if home is None:
        from linvit import kernels

        home = kernels if backend == "triton" else kernels.cpu
        if is_missing and kernels.cpu.is_aside():
            return None
    try:
        maps = in_kernel = _formulas(feature_map, query)
        features = callable(maps[0]) or callable(maps[1])
        if features:
            in_kernel = tuple("identity" if callable(given) else given for given in maps)
        axes = {"feature_map": in_kernel, "normalizer": _formula(normalizer, query, False)}
        reason = home.obstacle(query, key, value, **axes, **options)
    except ValueError as error:
        reason = str(error)
    if reason is None and features and backend == "auto" and _torch_is_faster(feature_map, query, key, value):
        return None
    if reason is None and not is_missing:
        kernel = partial(home.linear_attention, **axes)
        return partial(_of_features, kernel, maps) if features else kernel
    if reason is None:
        _warn_once(
            "Attention of many tokens runs in plain PyTorch: its C++ kernel for CPUs is faster, and is used in this "
            "process from a call of linvit.kernels.cpu.build() on"
        )
    if backend == "auto":
        return None
    raise ValueError(f"`backend` is {backend!r}, which cannot run: {reason}; use 'auto' or 'torch'")


def plain_kernel_for(backend: Any, query: Any) -> Callable[..., Tensor | None] | None:
    """The C++ kernel for arguments that nobody has checked yet, if it may be used on the device of this query."""
    if type(query) is not Tensor or not query.is_cpu or is_traced() or not isinstance(backend, str):
        return None
    kernels = built_for_cpu() if backend in ("auto", "cpp") else None
    return None if kernels is None else kernels.plain_attention


def _formulas(feature_map: Any, query: Tensor) -> tuple[Any, ...]:
    """The feature maps of queries and keys, with functions traced; left as functions if torch has to compute them."""
    query_map, key_map = feature_map if isinstance(feature_map, tuple | list) else (feature_map, feature_map)
    traced = _formula(query_map, query, True, "the queries' ")
    return traced, traced if key_map is query_map else _formula(key_map, query, True, "the keys' ")


def _formula(given: Any, query: Tensor, is_map: bool, whose: str = "") -> Any:
    name = "feature_map" if is_map else "normalizer"
    if isinstance(given, str):
        if given in ACROSS_TOKENS:
            raise ValueError(f"{whose}{name}: {given!r} combines tokens")
        return FEATURE_MAPS[given] if given in ACROSS_HEADS else given
    if is_traced():
        raise ValueError(f"{whose}{name}: a compiler or exporter is tracing the model, and takes the function itself")
    try:
        return formula_of(given, query.shape[1], query.shape[-1] if is_map else None, query.device)
    except AcrossHeads:
        return resolve_feature_map(given)
    except Untraceable as error:
        raise ValueError(f"{whose}{name}: {error}") from None


def _of_features(
    kernel: Callable[..., Tensor],
    maps: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """The output of a kernel, which cannot join heads; torch computes the maps that do."""
    if key_mask is not None:
        key = key.masked_fill(~key_mask.unsqueeze(-1), 0)
    with torch.autocast(query.device.type, enabled=False):
        features = [
            given(x.to(accumulator_dtype(x.dtype))).to(x.dtype) if callable(given) else x
            for given, x in zip(maps, (query, key), strict=True)
        ]
    return kernel(*features, value, key_mask=key_mask, **options)


def _torch_is_faster(feature_map: Any, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether plain torch is, if it has to compute the features anyway: with narrow heads, or block by block."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    in_blocks = query.is_cpu and isinstance(feature_map, str) and not learns and query.numel() > LARGE
    return in_blocks or query.shape[-1] < NARROW


def softmax_kernel_for(
    query: Tensor, key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> Callable[..., Tensor] | None:
    """The kernel of softmax attention with this rotation; None for `scaled_dot_product_attention`.

    Without a rotation that is one kernel too, and faster.
    """
    if rotary is None or not _has_passed(query, "softmax"):
        return None
    from linvit import kernels

    return kernels.softmax_attention if kernels.softmax_obstacle(query, key, value, rotary=rotary) is None else None


def depthwise_kernels_for(x: Tensor) -> ModuleType | None:
    """The kernels, if those of depthwise convolutions may be used on the device of a map."""
    if not isinstance(x, Tensor) or not _has_passed(x, "depthwise"):  # symbolic tracers give something else
        return None
    from linvit import kernels

    return kernels


def product_kernels_for(x: Tensor) -> ModuleType | None:
    """The kernels, if that of products may be used on the device of a tensor."""
    if not _has_passed(x, "product"):
        return None
    from linvit import kernels

    return kernels


def _ready(query: Tensor, causal: bool | str | None) -> ModuleType | None:
    """The kernels that "auto" may use on this device."""
    if not query.is_cuda:
        return built_for_cpu()
    if not _has_passed(query, "causal" if causal else "bidirectional"):
        return None
    from linvit import kernels

    return kernels


def _has_passed(query: Tensor, calls: str) -> bool:
    """Whether a record says that the Triton kernels of these calls are exact on the GPU of a tensor."""
    if not query.is_cuda or torch.compiler.is_exporting():
        return False
    from linvit.kernels import record

    return record.passed(query.device, calls)


def built_for_cpu() -> ModuleType | None:
    """`linvit.kernels.cpu` if it has been built in this process; None if not, and in exported programs."""
    if torch.compiler.is_exporting():
        return None  # other processes run them
    _load_prebuilt()
    module = sys.modules.get(f"{__name__.removesuffix('.ops.backend')}.kernels.cpu")
    return module if module is not None and module.ready() else None


@torch.compiler.assume_constant_result
def _load_prebuilt() -> None:
    """Imports the C++ kernels only if there may be something to load."""
    if _has_prebuilt():
        from linvit.kernels import cpu

        cpu.load_prebuilt()


@cache
def _has_prebuilt() -> bool:
    return PREBUILT.is_dir()
