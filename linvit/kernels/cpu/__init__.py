"""CPU kernels (C++), compiled for the processor that runs them: the formula of `linvit.ops`, fused, and its gradient.

`build()` loads them, and compiles them if need be; where the wheel brought them compiled, the first call that can use
them loads them. From then on `linear_attention` uses its kernel wherever it can (backend="auto"), and depthwise
convolutions use `linvit.kernels.cpu.depthwise` for the gradient of their weight.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, library

from linvit.formulas import Formula
from linvit.kernels.cpu import depthwise as depthwise
from linvit.kernels.cpu.compiling import compile_formula, load, prebuilt
from linvit.kernels.support import FEATURE_MAPS, NORMALIZERS, inputs_obstacle, transforms, uses_mass

_aside = False
Map = str | Formula  # a feature map or normalizer


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
    for given, names in zip(formulas, (FEATURE_MAPS, FEATURE_MAPS, NORMALIZERS), strict=True):
        if isinstance(given, str):
            numbers.append(names.index(given))
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
