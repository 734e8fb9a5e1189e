"""Starts the kernels of causal attention."""

from collections.abc import Sequence

from torch import Tensor, float32

from linvit.kernels.causal import chunked, chunked_key_backward, chunked_query_backward
from linvit.kernels.launch import Call, Inputs, Options, backward, read_with, room, strided, strided_mask, summaries
from linvit.kernels.merge import merge_blocks


def causal_forward(inputs: Inputs, options: Options, block: int) -> tuple[Tensor, Tensor | None]:
    """Output of causal attention of blocks (of one token), and if they are long the states that they see."""
    query, key, value, _, visible, _, cu_seqlens, _ = inputs
    call = Call(inputs, options, causal=True)
    scale, mask, out = query.shape[-1] ** -0.5, strided_mask(visible), room(query, value)
    if is_long(call, block):
        call = Call(inputs, options, block=block)
        states = summaries(call, inputs, mask, None, scale)
        blocks = -(-query.shape[2] // block)
        call.start(merge_blocks, 1, states, blocks, programs=call.programs // blocks)
        read_with(call, query, out, states, None, scale, options.eps)
        return out, states
    call.constants["BLOCK"] = block
    tensors = [strided(x) for x in (query, key, value, out)]
    call.start(chunked, 1, *tensors, call.parameters, call.table, mask, cu_seqlens, call.tokens, scale, options.eps)
    return out, None


def causal_backward(
    grad: Tensor, inputs: Inputs, states: Tensor, options: Options, block: int, into: Sequence[Tensor]
) -> list[Tensor | None]:
    """Writes the gradients of query, key and value of causal attention into three tensors; returns the parameters'."""
    query, key, value, _, visible, _, cu_seqlens, _ = inputs
    call = Call(inputs, options, causal=True)
    if is_long(call, block):
        return backward(grad, inputs, states, None, options, into, block=block)[2]
    call.constants["BLOCK"] = block
    parameters = call.parameters_with_sums("chunked", "chunked", block)
    dq, dk, dv = into
    rows = query.new_empty(*query.shape[:2], 4, query.shape[2], dtype=float32)
    tensors = [strided(x) for x in (query, key, value, grad)]
    rest = rows, parameters, call.table, strided_mask(visible), cu_seqlens, call.tokens
    call.start(chunked_query_backward, 1, *tensors, strided(dq), *rest, query.shape[-1] ** -0.5, options.eps)
    call.start(chunked_key_backward, 1, *tensors, strided(dk), strided(dv), *rest)
    return call.parameter_gradients(parameters)


def is_long(call: Call, block: int) -> bool:
    """Whether blocks do not fit into a chunk of `chunked`, and get a state of their own each."""
    return block > call.setting("chunked").rows
