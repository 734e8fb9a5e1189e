"""CPU kernels (C++), compiled for the processor that runs them: the formula of `linvit.ops`, fused, and its gradient.

`build()` loads them, and compiles them if need be; where the wheel brought them compiled, the first call that can use
them loads them. From then on `linear_attention` uses its kernel wherever it can (backend="auto"), and depthwise
convolutions use `linvit.kernels.cpu.depthwise` for the gradient of their weight.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, library

from linvit.formulas import Formula
from linvit.kernels.cpu import depthwise as depthwise
from linvit.kernels.cpu.compiling import compile_formula, load, prebuilt
from linvit.kernels.support import (
    DTYPES,
    FEATURE_MAPS,
    NORMALIZERS,
    WEIGHTINGS,
    inputs_obstacle,
    transforms,
    uses_mass,
)

_aside = False
Map = str | Formula  # a feature map or normalizer
MAP_NUMBERS, NORMALIZER_NUMBERS = ({name: i for i, name in enumerate(names)} for names in (FEATURE_MAPS, NORMALIZERS))


@cache
def build() -> None:
    """Loads the compiled kernels: those of the wheel, or those compiled on this machine (which takes half a minute).

    Raises:
        ValueError: if they must be compiled, and there is no C++ compiler or ninja, or compiling fails; the message
            says what to do.
    """
    load()
    library.register_fake("linvit_cpu::attend", _shape, allow_override=True)
    library.register_fake("linvit_cpu::attend_backward", _shapes_of_gradients, allow_override=True)
    library.register_autograd("linvit_cpu::attend", _gradients, setup_context=_save)


@cache
def load_prebuilt() -> None:
    """Loads the compiled kernels if the wheel brought those for this torch and this processor; never compiles.

    If they cannot be loaded, the log says so, and plain torch computes.
    """
    if not prebuilt().is_file():
        return
    try:
        build()
    except (OSError, RuntimeError) as error:
        logging.getLogger(__name__).warning(
            "The C++ kernel that came with linvit cannot be loaded, plain PyTorch is used: %s", error
        )


def is_aside() -> bool:
    """Whether `aside` is active."""
    return _aside


@torch.compiler.assume_constant_result
def ready() -> bool:
    """Whether `build` has loaded the kernel into this process, and `aside` is not active."""
    return build.cache_info().currsize > 0 and not _aside


@contextmanager
def aside() -> Iterator[None]:
    """A context in which backend="auto" does not use the kernel, in all threads: for comparisons."""
    global _aside
    before, _aside = _aside, True
    try:
        yield
    finally:
        _aside = before


def obstacle(query: Tensor, key: Tensor, value: Tensor, *, causal: bool | str = False, **options: Any) -> str | None:
    """Why these arguments of `linear_attention` cannot run on the kernel, as a clause; None if they can."""
    if not query.is_cpu:
        return f"the tensors are on {query.device}, and the kernel needs CPU tensors"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit is tracing the model, and cannot trace the kernel"
    if not torch.compiler.is_compiling() and transforms():
        return "forward-mode gradients or a transform of torch.func are active, and the kernel does not support them"
    rule = options.get("normalizer", "divide")
    if options.get("weighting") == "query_mean" and uses_mass(rule) and needs_gradients(query, key, value):
        return "the normalizer uses the mass, which has a gradient for uniform weights only"
    reason = inputs_obstacle(query, value, causal=causal, **options)
    if reason is not None:
        return reason
    try:
        for given in (*options.get("feature_map", ()), rule):
            if isinstance(given, Formula):
                compile_formula(given)
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd must record the call."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def plain_attention(
    query: Any, key: Any, value: Any, rotary: Any, feature_map: Any, weighting: Any, normalizer: Any, eps: Any
) -> Tensor | None:
    """`linvit.ops.linear_attention` of arguments that nobody has checked; None if those checks have to decide.

    It takes calls without gradients whose axes are names. The operator compares the shapes itself, in less than a
    microsecond; the checks and the choice of a kernel in Python take a quarter of a call of 49 tokens.
    """
    if not (type(query) is type(key) is type(value) is Tensor and type(eps) is float and 0 <= eps < math.inf):
        return None
    if not (type(feature_map) is type(weighting) is type(normalizer) is str and weighting in WEIGHTINGS):
        return None
    by_map, by_normalizer = MAP_NUMBERS.get(feature_map), NORMALIZER_NUMBERS.get(normalizer)
    if by_map is None or by_normalizer is None or query.dtype not in DTYPES or transforms():
        return None
    cos, sin = rotary or (None, None)
    for table in rotary or ():
        if type(table) is not Tensor or table.dtype != torch.float32 or not table.is_cpu:
            return None
    if not (key.is_cpu and value.is_cpu) or needs_gradients(query, key, value, cos, sin):
        return None
    arguments = *(None,) * 8, by_map, by_map, by_normalizer, weighting == "query_mean", eps, 0
    try:
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = torch.ops.linvit_cpu.attend.default(query, key, value, cos, sin, *arguments)
            return out
    except RuntimeError:  # the checks say what is wrong
        return None


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: tuple[Map, Map] = ("elu1", "elu1"),
    weighting: str = "uniform",
    normalizer: Map = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    causal: bool | str = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    blocks: tuple[Tensor, Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`linvit.ops.linear_attention` on arguments that it has checked and for which `obstacle` returns None.

    Query, key, value, mixing and tensors of formulas get first derivatives; the backward pass recomputes everything
    from these. The order of sums depends only on the number of threads.

    Args:
        query, key, value, weighting, rotary, causal, block_size, cu_seqlens, eps: as there.
        feature_map, normalizer: names, or formulas in place of functions.
        key_mask: True where a token counts, (batch, heads, tokens).
        blocks: the tokens block by block, int64 (tokens,); where blocks begin among them, and their number, int64
            (blocks + 1,); and the mixing, (blocks, blocks) or (heads, blocks, blocks).

    Returns:
        (batch, heads, queries, value width) in the inputs' dtype; heads inside tokens if the queries are so.
    """
    if not ready():
        build()
    cos, sin = (None, None) if rotary is None else (table.float().contiguous() for table in rotary)
    visible = None if key_mask is None else key_mask.contiguous()
    bounds = None if cu_seqlens is None else cu_seqlens.long().contiguous()
    numbers, parameters = _numbered(query, (*feature_map, normalizer), eps)
    order, cuts, mixing = (None, None, None) if blocks is None else blocks
    if mixing is not None:
        mixing = mixing.float().expand(query.shape[1], -1, -1).contiguous()
    tensors = query, key, value, cos, sin, visible, bounds, order, cuts, mixing, *parameters
    arguments = *tensors, *numbers, weighting == "query_mean", eps, block_size or int(causal)
    attend = torch.ops.linvit_cpu.attend.default
    if torch.compiler.is_compiling() or needs_gradients(query, key, value, mixing, *parameters):
        out: Tensor = attend(*arguments)
        return out
    with torch._C._AutoDispatchBelowAutograd():  # saves a third of the call's constant cost
        out = attend(*arguments)
        return out


def _numbered(
    query: Tensor, formulas: tuple[Map, Map, Map], eps: float
) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Two feature maps and a normalizer as the operator knows them, and their parameters by batch entry and head."""
    batch, heads, _, width = query.shape
    numbers: list[int] = []
    parameters: list[Tensor | None] = []
    for given, by_name in zip(formulas, (MAP_NUMBERS, MAP_NUMBERS, NORMALIZER_NUMBERS), strict=True):
        if isinstance(given, str):
            numbers.append(by_name[given])
            parameters.append(None)
        else:
            numbers.append(compile_formula(given))
            rows = given.parameter_rows(heads, width, width, eps)
            parameters.append(None if rows is None else rows.flatten(1).expand(batch, -1, -1))
    return tuple(numbers), tuple(parameters)


def _shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return _room(query, value.shape[-1])


def _shapes_of_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    parameters = [x.new_empty(x.shape) for x in rest[6:10] if x is not None]
    return [*(_room(x, x.shape[-1]) for x in (query, key, value)), *parameters]


def _room(like: Tensor, width: int) -> Tensor:
    """An empty tensor (batch, heads, tokens, width) in the memory order of `like`: heads inside tokens, or outside."""
    batch, heads, tokens, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return like.new_empty(batch, heads, tokens, width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:13])
    ctx.rule = inputs[13:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("`backend` is 'cpp', which has no second derivatives (create_graph=True): use 'torch'")
    gradients = iter(torch.ops.linvit_cpu.attend_backward(grad, *ctx.saved_tensors, *ctx.rule))
    given = [True] * 3 + [False] * 6 + [x is not None for x in ctx.saved_tensors[9:]] + [False] * len(ctx.rule)
    return tuple(next(gradients) if has else None for has in given)
