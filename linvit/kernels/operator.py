"""The kernels as custom torch operators with gradients, which torch.compile treats as opaque.

`attend` takes queries, keys and values; `attend_packed` one tensor (batch, tokens, 3, heads, width) with all of them,
whose gradient is written as one tensor too: gradients of three views would be copied into it once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from linvit.kernels import launch
from linvit.kernels.softmax_launch import softmax_backward, softmax_forward

Rule = tuple[str, str, bool, int, str, float]  # the operators' last arguments: query_map … eps


@library.custom_op("linvit::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    weights: Tensor | None,
    cu_seqlens: Tensor | None,
    query_map: str,
    key_map: str,
    query_mean: bool,
    block: int,
    normalizer: str,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the heads' states and their sums of κ(q), which gradients need; empty if there are none."""
    inputs = launch.Inputs(query, key, value, (cos, sin), visible, weights, cu_seqlens)
    return _forward(inputs, (query_map, key_map, query_mean, block, normalizer, eps), keep)


@library.custom_op("linvit::attend_packed", mutates_args=())
def attend_packed(
    projections: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    cu_seqlens: Tensor | None,
    query_map: str,
    key_map: str,
    query_mean: bool,
    block: int,
    normalizer: str,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend`."""
    inputs = launch.Inputs(*parts_of(projections), (cos, sin), visible, None, cu_seqlens)
    return _forward(inputs, (query_map, key_map, query_mean, block, normalizer, eps), keep)


def _forward(inputs: launch.Inputs, rule: Rule, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    options, block = _options(rule)
    nothing = inputs.query.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(inputs.query):
        if block:
            (out, states), sums = launch.causal_forward(inputs, options, block), None
        else:
            out, states, sums = launch.forward(inputs, options, keep)
    if not keep or states is None:
        return out, nothing, nothing.clone()
    return out, states, nothing if sums is None else sums


def parts_of(projections: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views, (batch, heads, tokens, width)."""
    query, key, value = projections.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _options(rule: Rule) -> tuple[launch.Options, int]:
    query_map, key_map, query_mean, block, normalizer, eps = rule
    return launch.Options(query_map, key_map, query_mean, normalizer, eps), block


@attend.register_fake
def _shapes(query, key, value, cos, sin, visible, weights, cu_seqlens, *rest):  # type: ignore[no-untyped-def]
    query_mean, keep = rest[2], rest[-1]
    options, block = _options(rest[:-1])
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if block:
        inputs = launch.Inputs(query, key, value, (cos, sin), visible, weights, cu_seqlens)
        call = launch.Call(inputs, options._replace(query_mean=False), causal=True)
        keep = keep and launch.is_long(call, block)
        sequences *= -(-query.shape[2] // block)
    heads, width = sequences * query.shape[1], query.shape[-1]
    size = launch.state_size(width, value.shape[-1])
    states = query.new_empty((heads, size) if keep else (0,), dtype=torch.float32)
    sums = states.new_empty((heads, width + 1) if keep and query_mean else (0,))
    return launch.room(query, value), states, sums


@attend_packed.register_fake
def _(projections, cos, sin, visible, cu_seqlens, *rest):  # type: ignore[no-untyped-def]
    return _shapes(*parts_of(projections), cos, sin, visible, None, cu_seqlens, *rest)


@library.custom_op("linvit::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    weights: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    sums: Tensor,
    query_map: str,
    key_map: str,
    query_mean: bool,
    block: int,
    normalizer: str,
    eps: float,
    tables: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; of given weights; and of cosines and sines, side by side. Or empty tensors."""
    inputs = launch.Inputs(query, key, value, (cos, sin), visible, weights, cu_seqlens)
    rule = query_map, key_map, query_mean, block, normalizer, eps
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    return dq, dk, dv, *_backward(grad, inputs, states, sums, rule, (dq, dk, dv), tables)


@library.custom_op("linvit::attend_packed_backward", mutates_args=())
def attend_packed_backward(
    grad: Tensor,
    projections: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    sums: Tensor,
    query_map: str,
    key_map: str,
    query_mean: bool,
    block: int,
    normalizer: str,
    eps: float,
    tables: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the projections, contiguous, and of cosines and sines as in `attend_backward`."""
    inputs = launch.Inputs(*parts_of(projections), (cos, sin), visible, None, cu_seqlens)
    rule = query_map, key_map, query_mean, block, normalizer, eps
    gradient = torch.empty_like(projections, memory_format=torch.contiguous_format)
    return gradient, _backward(grad, inputs, states, sums, rule, parts_of(gradient), tables)[1]


def _backward(
    grad: Tensor,
    inputs: launch.Inputs,
    states: Tensor,
    sums: Tensor,
    rule: Rule,
    into: Sequence[Tensor],
    tables: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of weights and tables; those of query, key and value are written into tensors."""
    options, block = _options(rule)
    with torch.cuda.device_of(grad):
        if block:
            launch.causal_backward(grad, inputs, states, options, block, into)
            gradients: Sequence[Tensor | None] = None, None
        else:
            given = sums if options.query_mean else None
            gradients = launch.backward(grad, inputs, states, given, options, into, tables)
    of_weights, of_tables = (states.new_empty(0) if x is None else x for x in gradients)
    return of_weights, of_tables


@attend_backward.register_fake
def _(grad, query, key, value, cos, sin, visible, weights, cu_seqlens, states, *rest):  # type: ignore[no-untyped-def]
    of_weights = states.new_empty(0 if weights is None else weights.shape, dtype=torch.float32)
    of_tables = states.new_empty((query.shape[2], query.shape[3]) if rest[-1] else 0)
    return *(torch.empty_like(x) for x in (query, key, value)), of_weights, of_tables


@attend_packed_backward.register_fake
def _(grad, projections, cos, sin, visible, cu_seqlens, states, *rest):  # type: ignore[no-untyped-def]
    of_tables = states.new_empty((projections.shape[1], projections.shape[4]) if rest[-1] else 0)
    return torch.empty_like(projections, memory_format=torch.contiguous_format), of_tables


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, rule = inputs[:-7], inputs[-7:-1]
    _, states, sums = output
    ctx.mark_non_differentiable(states, sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, states, sums)
    ctx.rule = rule


def _gradients(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 15
    tables = any(ctx.needs_input_grad[3:5])
    *gradients, of_weights, of_tables = attend_backward(grad, *ctx.saved_tensors, *ctx.rule, tables)
    cos, sin = of_tables.tensor_split(2, dim=-1) if tables else (None, None)
    return *gradients, cos, sin, None, of_weights if ctx.needs_input_grad[6] else None, *(None,) * 8


def _packed_gradients(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    tables = any(ctx.needs_input_grad[1:3])
    gradient, of_tables = attend_packed_backward(grad, *ctx.saved_tensors, *ctx.rule, tables)
    return gradient, *(of_tables.tensor_split(2, dim=-1) if tables else (None, None)), *(None,) * 9


attend.register_autograd(_gradients, setup_context=_save)
attend_packed.register_autograd(_packed_gradients, setup_context=_save)


@library.custom_op("linvit::attend_softmax", mutates_args=())
def attend_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Output of softmax attention, and each query's mass, which gradients need; empty if they are not kept."""
    with torch.cuda.device_of(query):
        out, masses = softmax_forward(launch.Inputs(query, key, value, (cos, sin), visible, None, None), keep)
    return out, query.new_empty(0, dtype=torch.float32) if masses is None else masses


@attend_softmax.register_fake
def _(query, key, value, cos, sin, visible, keep):  # type: ignore[no-untyped-def]
    return launch.room(query, value), query.new_empty(query.shape[:3] if keep else 0, dtype=torch.float32)


@library.custom_op("linvit::attend_softmax_backward", mutates_args=())
def attend_softmax_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    out: Tensor,
    masses: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    with torch.cuda.device_of(query):
        return softmax_backward(grad, launch.Inputs(query, key, value, (cos, sin), visible, None, None), out, masses)


@attend_softmax_backward.register_fake
def _(grad, query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-1], *output)


def _softmax_gradients(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    none = (None,) * 4  # of tables, mask and the option
    return (*(None,) * 3, *none) if grad is None else (*attend_softmax_backward(grad, *ctx.saved_tensors), *none)


attend_softmax.register_autograd(_softmax_gradients, setup_context=_save_softmax)
