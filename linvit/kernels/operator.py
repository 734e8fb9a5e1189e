"""The kernels as custom torch operators with gradients, which torch.compile treats as opaque.

`attend` takes queries, keys and values; `attend_packed` one tensor (batch, tokens, 3, heads, width) with all of them,
whose gradient is written as one tensor too: gradients of three views would be copied into it once more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from linvit.kernels import launch
from linvit.kernels.causal_launch import causal_backward, causal_forward, is_long
from linvit.kernels.softmax_launch import softmax_backward, softmax_forward

QUERY_KEY_VALUE = "Tensor query, Tensor key, Tensor value"
PARAMETERS = "Tensor? of_query_map, Tensor? of_key_map, Tensor? of_normalizer"
SEEN = f"Tensor? cos, Tensor? sin, Tensor? visible, Tensor? weights, Tensor? cu_seqlens, {PARAMETERS}"
RULE = "str query_map, str key_map, bool query_mean, int block, str normalizer, float eps"
KEPT = "Tensor states, Tensor sums"
GIVEN = 8  # tensors of SEEN


def operator(name: str, arguments: str, results: int) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operator of these arguments that returns so many tensors."""
    schema = f"({arguments}) -> ({', '.join(['Tensor'] * results)})"
    return library.custom_op(f"linvit::{name}", mutates_args=(), schema=schema)


@operator("attend", f"{QUERY_KEY_VALUE}, {SEEN}, {RULE}, bool keep", 3)
def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the heads' states and their sums of κ(q), which gradients need; empty if there are none."""
    return _forward((query, key, value), *rest)


@operator("attend_packed", f"Tensor projections, {SEEN}, {RULE}, bool keep", 3)
def attend_packed(projections: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend`."""
    return _forward(parts_of(projections), *rest)


def _forward(parts: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *seen_and_rule, keep = rest
    inputs, options, block = _call(parts, *seen_and_rule)
    nothing = inputs.query.new_empty(0, dtype=torch.float32)
    with torch.cuda.device_of(inputs.query):
        if block:
            (out, states), sums = causal_forward(inputs, options, block), None
        else:
            out, states, sums = launch.forward(inputs, options, keep)
    if not keep or states is None:
        return out, nothing, nothing.clone()
    return out, states, nothing if sums is None else sums


def parts_of(projections: Tensor) -> Sequence[Tensor]:
    """Queries, keys and values as views, (batch, heads, tokens, width)."""
    return projections.permute(2, 0, 3, 1, 4).unbind(0)


def _call(
    parts: Sequence[Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    weights: Tensor | None,
    cu_seqlens: Tensor | None,
    of_query_map: Tensor | None,
    of_key_map: Tensor | None,
    of_normalizer: Tensor | None,
    query_map: str,
    key_map: str,
    query_mean: bool,
    block: int,
    normalizer: str,
    eps: float,
) -> tuple[launch.Inputs, launch.Options, int]:
    query, key, value = parts
    parameters = of_query_map, of_key_map, of_normalizer
    inputs = launch.Inputs(query, key, value, (cos, sin), visible, weights, cu_seqlens, parameters)
    return inputs, launch.Options(query_map, key_map, query_mean, normalizer, eps), block


def _shapes(parts: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `_forward`, empty."""
    *seen_and_rule, keep = rest
    inputs, options, block = _call(parts, *seen_and_rule)
    query, value, cu_seqlens = inputs.query, inputs.value, inputs.cu_seqlens
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if block:
        call = launch.Call(inputs, options._replace(query_mean=False), causal=True)
        keep = keep and is_long(call, block)
        sequences *= -(-query.shape[2] // block)
    heads, width = sequences * query.shape[1], query.shape[-1]
    size = launch.state_size(width, value.shape[-1])
    states = query.new_empty((heads, size) if keep else (0,), dtype=torch.float32)
    sums = states.new_empty((heads, width + 1) if keep and options.query_mean else (0,))
    return launch.room(query, value), states, sums


attend.register_fake(lambda query, key, value, *rest: _shapes((query, key, value), *rest))
attend_packed.register_fake(lambda projections, *rest: _shapes(parts_of(projections), *rest))


@operator("attend_backward", f"Tensor grad, {QUERY_KEY_VALUE}, {SEEN}, {KEPT}, {RULE}, bool tables", 8)
def attend_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; of given weights; of cosines and sines, side by side; and of the parameters.

    Those of what was not given are empty.
    """
    into = tuple(torch.empty_like(x) for x in (query, key, value))
    return *into, *_backward(grad, (query, key, value), into, *rest)


@operator("attend_packed_backward", f"Tensor grad, Tensor projections, {SEEN}, {KEPT}, {RULE}, bool tables", 6)
def attend_packed_backward(grad: Tensor, projections: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the projections, contiguous, and the others of `attend_backward`."""
    gradient = torch.empty_like(projections, memory_format=torch.contiguous_format)
    return gradient, *_backward(grad, parts_of(projections), parts_of(gradient), *rest)


def _backward(grad: Tensor, parts: Sequence[Tensor], into: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of weights, tables and parameters; those of query, key and value are written into tensors."""
    *seen, states, sums = rest[: GIVEN + 2]
    *rule, tables = rest[GIVEN + 2 :]
    inputs, options, block = _call(parts, *seen, *rule)
    with torch.cuda.device_of(grad):
        if block:
            of_parameters = causal_backward(grad, inputs, states, options, block, into)
            of_weights, of_tables = None, None
        else:
            given = sums if options.query_mean else None
            of_weights, of_tables, of_parameters = launch.backward(grad, inputs, states, given, options, into, tables)
    return tuple(states.new_empty(0) if x is None else x for x in (of_weights, of_tables, *of_parameters))


def _backward_shapes(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, states, tables = rest[3], rest[GIVEN], rest[-1]
    given = [states.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in (weights, *rest[5:GIVEN])]
    return given[0], states.new_empty((query.shape[2], query.shape[3]) if tables else 0), *given[1:]


@attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *(torch.empty_like(x) for x in (query, key, value)), *_backward_shapes(query, *rest)


@attend_packed_backward.register_fake
def _(grad: Tensor, projections: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gradient = torch.empty_like(projections, memory_format=torch.contiguous_format)
    return gradient, *_backward_shapes(parts_of(projections)[0], *rest)


def _differentiate(forward: Any, backward: Any, count: int) -> None:
    """Registers the gradient of an operator whose first `count` arguments are queries, keys and values."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: count + GIVEN], *output[1:])
        ctx.rule = inputs[count + GIVEN : -1]

    def gradients(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (count + GIVEN + 7)
        needs = ctx.needs_input_grad[count : count + GIVEN]
        tables = any(needs[:2])
        *given, of_weights, of_tables, a, b, c = backward(grad, *ctx.saved_tensors, *ctx.rule, tables)
        cos, sin = of_tables.tensor_split(2, dim=-1) if tables else (None, None)
        of_seen = cos, sin, None, of_weights, None, a, b, c
        return *given, *(x if need else None for x, need in zip(of_seen, needs, strict=True)), *(None,) * 7

    forward.register_autograd(gradients, setup_context=save)


_differentiate(attend, attend_backward, 3)
_differentiate(attend_packed, attend_packed_backward, 1)


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
