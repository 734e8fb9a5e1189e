"""The kernels as a custom torch operator with a gradient, which torch.compile treats as opaque."""

from typing import Any

import torch
from torch import Tensor, library

from linvit.kernels import launch
from linvit.kernels.softmax_launch import softmax_backward, softmax_forward


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
    options = launch.Options(query_map, key_map, query_mean, normalizer, eps)
    nothing = query.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(query):
        if block:
            (out, states), sums = launch.causal_forward(inputs, options, block), None
        else:
            out, states, sums = launch.forward(inputs, options, keep)
    if not keep or states is None:
        return out, nothing, nothing.clone()
    return out, states, nothing if sums is None else sums


@attend.register_fake
def _(query, key, value, cos, sin, visible, weights, cu_seqlens, *options):  # type: ignore[no-untyped-def]
    query_map, key_map, query_mean, block, normalizer, eps, keep = options
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if block:
        inputs = launch.Inputs(query, key, value, (cos, sin), visible, weights, cu_seqlens)
        call = launch.Call(inputs, launch.Options(query_map, key_map, False, normalizer, eps), causal=True)
        keep = keep and launch.is_long(call, block)
        sequences *= -(-query.shape[2] // block)
    heads, width = sequences * query.shape[1], query.shape[-1]
    size = launch.state_size(width, value.shape[-1])
    states = query.new_empty((heads, size) if keep else (0,), dtype=torch.float32)
    sums = states.new_empty((heads, width + 1) if keep and query_mean else (0,))
    return launch.room(query, value), states, sums


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
    options = launch.Options(query_map, key_map, query_mean, normalizer, eps)
    given = sums if query_mean else None
    with torch.cuda.device_of(query):
        if block:
            gradients = launch.causal_backward(grad, inputs, states, options, block)
        else:
            gradients = launch.backward(grad, inputs, states, given, options, tables)
    of_weights, of_tables = (states.new_empty(0) if x is None else x for x in gradients[3:])
    return *gradients[:3], of_weights, of_tables


@attend_backward.register_fake
def _(grad, query, key, value, cos, sin, visible, weights, cu_seqlens, states, *rest):  # type: ignore[no-untyped-def]
    of_weights = states.new_empty(0 if weights is None else weights.shape, dtype=torch.float32)
    of_tables = states.new_empty((query.shape[2], query.shape[3]) if rest[-1] else 0)
    return *(torch.empty_like(x) for x in (query, key, value)), of_weights, of_tables


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, options = inputs[:8], inputs[8:]
    _, states, sums = output
    ctx.mark_non_differentiable(states, sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, states, sums)
    ctx.options = options[:-1]


def _gradients(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    none = (None,) * 8  # of cu_seqlens and the options
    if grad is None:
        return (*(None,) * 7, *none)
    tables = any(ctx.needs_input_grad[3:5])
    *gradients, of_weights, of_tables = attend_backward(grad, *ctx.saved_tensors, *ctx.options, tables)
    cos, sin = of_tables.tensor_split(2, dim=-1) if tables else (None, None)
    return *gradients, cos, sin, None, of_weights if ctx.needs_input_grad[6] else None, *none


attend.register_autograd(_gradients, setup_context=_save)


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
