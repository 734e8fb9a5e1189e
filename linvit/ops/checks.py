"""Checks of the operator's arguments; each error is one sentence: what, got, expected, what to do.

The forms of its tensors and a few options decide whether a call is valid. They make a key without tensors, so that a
valid call is checked once and looked up afterwards.
"""

import math
from itertools import pairwise
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.arguments import Form, attributes, broadcasts, check_device, check_floating, form, is_traced, kind
from linvit.ops.causal import at_hand
from linvit.ops.position import Rotary
from linvit.ops.state import FIELDS, WEIGHTINGS, Shard, State, accumulator_dtype, field_sizes

COUNTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOST_KEPT = 4096
_valid: set[tuple[object, ...]] = set()


class Call(NamedTuple):
    """The arguments of `linear_attention`, with a form in place of each tensor."""

    query: Form
    key: Form
    value: Form
    weighting: str | Form
    rotary: tuple[Form, Form] | None
    key_mask: Form | None
    state: tuple[Form, ...] | None
    causal: bool | str
    eps: float
    block_size: int | None
    cu_seqlens: Form | None


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weighting: str | Tensor,
    rotary: Rotary | None,
    key_mask: Tensor | None,
    causal: bool | str,
    eps: float,
    state: State | None = None,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Check every argument except those that `query_and_key_map`, `resolve_normalizer` and `kernel_for` check.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for tensors and options that do not fit together.
    """
    signature = None
    if not is_traced():
        try:
            signature = (
                attributes(query),
                attributes(key),
                attributes(value),
                weighting if isinstance(weighting, str) else attributes(weighting),
                None if rotary is None else (type(rotary), *map(attributes, rotary)),
                None if key_mask is None else attributes(key_mask),
                None if state is None else (type(state), *map(attributes, state)),
                (type(causal), causal, type(eps), eps, type(block_size), block_size),
                None if cu_seqlens is None else attributes(cu_seqlens),
            )
            if signature in _valid:
                _check_lengths(cu_seqlens, query)
                return
        except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one with symbolic sizes
            signature = None
    _check_causal(causal, block_size)
    if not isinstance(eps, Real | torch.SymFloat) or isinstance(eps, bool):
        raise TypeError(f"`eps` is {kind(eps)}, expected a number")
    _check(
        Call(
            form("query", query),
            form("key", key),
            form("value", value),
            weighting if isinstance(weighting, str) else _weights_form(weighting),
            None if rotary is None else _rotary_forms(rotary),
            None if key_mask is None else form("key_mask", key_mask),
            None if state is None else _state_forms(state),
            causal,
            eps,
            block_size,
            None if cu_seqlens is None else form("cu_seqlens", cu_seqlens),
        )
    )
    _check_lengths(cu_seqlens, query)
    if signature is not None:
        if len(_valid) >= MOST_KEPT:
            _valid.clear()
        _valid.add(signature)


def _check_causal(causal: object, block_size: object) -> None:
    if not isinstance(causal, bool | str):
        raise TypeError(f"`causal` is {kind(causal)}, expected True, False or 'block'")
    if isinstance(causal, str) and causal != "block":
        raise ValueError(f"`causal` is {causal!r}, expected True, False or 'block'")
    if block_size is None and causal == "block":
        raise ValueError("`causal` is 'block' without a block size, expected `block_size`: say how many tokens it has")
    if block_size is None:
        return
    if not isinstance(block_size, int | torch.SymInt) or isinstance(block_size, bool):
        raise TypeError(f"`block_size` is {kind(block_size)}, expected a whole number")
    if causal != "block":
        raise ValueError(f"`block_size` is {block_size} with causal={causal}, expected None: pass causal='block'")
    if block_size < 1:
        raise ValueError(f"`block_size` is {block_size}, expected 1 or more")


def _check_lengths(cu_seqlens: Tensor | None, query: Tensor) -> None:
    """Check the values of cu_seqlens, which are not part of a call's form, where that is quick."""
    if cu_seqlens is None or not at_hand(cu_seqlens):
        return
    first, *_, last = lengths = cu_seqlens.tolist()
    tokens = query.shape[-2]
    if first != 0 or last != tokens:
        raise ValueError(f"`cu_seqlens` goes from {first} to {last}, expected from 0 to {tokens}, the number of tokens")
    for i, (begin, end) in enumerate(pairwise(lengths)):
        if end < begin:
            raise ValueError(
                f"`cu_seqlens` decreases from {begin} to {end} after entry {i}, expected the first token of each "
                "sequence in order: sum the lengths up"
            )


def _state_forms(state: object) -> tuple[Form, ...]:
    if not isinstance(state, State):
        raise TypeError(f"`state` is {kind(state)}, expected a State: begin with State.empty(query, value)")
    return tuple([form(f"state.{field}", x) for field, x in zip(FIELDS, state, strict=True)])


def _weights_form(weighting: object) -> Form:
    if not isinstance(weighting, Tensor):
        raise TypeError(f"`weighting` is {kind(weighting)}, expected a tensor or one of {', '.join(WEIGHTINGS)}")
    return form("weighting", weighting)


def _rotary_forms(rotary: object) -> tuple[Form, Form]:
    if not isinstance(rotary, Rotary):
        raise TypeError(f"`rotary` is {kind(rotary)}, expected a Rotary: make it with rotary_1d or rotary_2d")
    return form("rotary.cos", rotary.cos), form("rotary.sin", rotary.sin)


def _check(call: Call) -> None:
    _check_tokens(call)
    if call.cu_seqlens is not None:
        _check_packed(call.cu_seqlens, call)
    if not 0 <= call.eps < math.inf:
        raise ValueError(f"`eps` is {call.eps}, expected a number of 0 or more")
    if call.rotary is not None:
        _check_rotary(call, *call.rotary)
    if call.key_mask is not None:
        _check_mask(call.key_mask, call)
    if isinstance(call.weighting, str):
        _check_rule(call.weighting, call)
    else:
        _check_weights(call.weighting, call)
    if call.state is not None:
        _check_state(call.state, call)


def _check_tokens(call: Call) -> None:
    query, key, value = call.query, call.key, call.value
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) != 4:
            raise ValueError(f"`{name}` has shape {tuple(x.shape)}, expected (batch, heads, tokens, width)")
        check_floating(name, x.dtype)
        if 0 in x.shape[1:]:
            what = ("heads", "tokens", "width")[x.shape[1:].index(0)]
            raise ValueError(f"`{name}` has shape {tuple(x.shape)}, expected one or more {what}")
    if query.shape[:2] != key.shape[:2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"`query` has shape {tuple(query.shape)} and `key` {tuple(key.shape)}, expected the same batch, heads and "
            "width"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"`value` has shape {tuple(value.shape)} and `key` {tuple(key.shape)}, expected the same batch, heads and "
            "tokens"
        )
    for name, x in (("key", key), ("value", value)):
        check_device(name, x, query)
        if x.dtype != query.dtype:
            raise ValueError(
                f"`query` is {query.dtype} and `{name}` {x.dtype}, expected the same dtype: cast one of them"
            )
    if call.causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"`causal` is {call.causal!r} with {query.shape[-2]} queries and {key.shape[-2]} keys, expected as many"
            " queries as keys in `query` and `key`"
        )


def _check_packed(cu_seqlens: Form, call: Call) -> None:
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"`cu_seqlens` is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, expected int32 or int64 of shape "
            "(sequences + 1,): the first token of each sequence, and the number of tokens"
        )
    check_device("cu_seqlens", cu_seqlens, call.query)
    if call.query.shape[0] != 1 or call.query.shape[-2] != call.key.shape[-2]:
        raise ValueError(
            f"`cu_seqlens` is given with queries of shape {tuple(call.query.shape)} and keys of shape "
            f"{tuple(call.key.shape)}, expected (1, heads, tokens, width) with equally many of both: put the sequences "
            "one after another"
        )
    if call.state is not None:
        raise ValueError(
            "`state` is given with `cu_seqlens`, expected one of them: decode the sequences as a batch, without packing"
        )


def _check_rotary(call: Call, cos: Form, sin: Form) -> None:
    for name, x in (("rotary.cos", cos), ("rotary.sin", sin)):
        check_floating(name, x.dtype)
        check_device(name, x, call.query)
    if cos != sin:
        raise ValueError(
            f"`rotary` has cosines of shape {tuple(cos.shape)} and {cos.dtype}, sines of shape {tuple(sin.shape)} and "
            f"{sin.dtype}, expected the same: make it with rotary_1d or rotary_2d"
        )
    for name, tokens in (("query", call.query), ("key", call.key)):
        *heads, length, width = tokens.shape
        if width % 2:
            raise ValueError(f"`rotary` is given with a `{name}` of width {width}, expected an even width")
        fits = 2 <= len(cos.shape) <= 4 and cos.shape[-2:] == (length, width // 2)
        if not (fits and broadcasts(cos.shape[:-2], heads)):
            raise ValueError(
                f"`rotary` has tables of shape {tuple(cos.shape)}, expected (tokens, width / 2) = "
                f"{(length, width // 2)} for `{name}`: make it with rotary_1d or rotary_2d"
            )


def _check_mask(mask: Form, call: Call) -> None:
    check_device("key_mask", mask, call.query)
    batch, heads, tokens, _ = call.key.shape
    sizes = (batch, tokens) if len(mask.shape) == 2 else (batch, heads, tokens)
    fits = len(mask.shape) in (2, 3) and broadcasts(mask.shape, sizes)
    if not fits or mask.dtype not in (torch.bool, torch.uint8, torch.int8):
        raise ValueError(
            f"`key_mask` is {mask.dtype} of shape {tuple(mask.shape)}, expected bool of shape (batch, tokens) or "
            f"(batch, heads, tokens) for keys of shape {tuple(call.key.shape)}"
        )


def _check_weights(weights: Form, call: Call) -> None:
    if weights.dtype not in COUNTS:
        check_floating("weighting", weights.dtype)
    check_device("weighting", weights, call.query)
    if len(weights.shape) > 3 or not broadcasts(weights.shape, call.key.shape[:3]):
        raise ValueError(
            f"`weighting` has shape {tuple(weights.shape)}, expected weights that broadcast to "
            f"(batch, heads, tokens) = {tuple(call.key.shape[:3])} of `key`"
        )


def _check_rule(weighting: str, call: Call) -> None:
    if weighting not in WEIGHTINGS:
        raise ValueError(f"`weighting` is {weighting!r}, expected a tensor or one of {', '.join(WEIGHTINGS)}")
    if call.causal and weighting == "query_mean":
        raise ValueError(
            "`weighting` is 'query_mean', which has no causal form because its weights need all the queries: use "
            "weighting='prefix_query_mean'"
        )
    if not call.causal and weighting == "prefix_query_mean":
        raise ValueError(
            "`weighting` is 'prefix_query_mean', which is causal: pass causal=True, or use weighting='query_mean'"
        )
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if call.key_mask is not None and weighting == "query_mean" and queries != keys:
        raise ValueError(
            f"`weighting` is 'query_mean' with a `key_mask`, {queries} queries and {keys} keys, expected as many "
            "queries as keys, because the queries of masked tokens must not enter the mean"
        )


def _check_state(state: tuple[Form, ...], call: Call) -> None:
    if not call.causal:
        raise ValueError(
            "`state` is given with causal=False: pass causal=True to continue from it, or join states with merge"
        )
    heads, dtype = call.query.shape[:2], accumulator_dtype(call.query.dtype)
    sizes = field_sizes(call.query.shape[-1], call.value.shape[-1])
    for name, x, size in zip(FIELDS, state, sizes, strict=True):
        check_device(f"state.{name}", x, call.query)
        if x.shape != (*heads, *size) or x.dtype != dtype:
            raise ValueError(
                f"`state.{name}` is {x.dtype} of shape {tuple(x.shape)}, expected {dtype} of shape "
                f"{(*heads, *size)}: begin with State.empty(query, value)"
            )


def check_shard(
    shard: Shard | None,
    weighting: str | Tensor,
    state: State | None,
    cu_seqlens: Tensor | None,
    block_size: int | None,
) -> None:
    """Raises ValueError for arguments of `linear_attention` that a shard excludes."""
    weights = weighting if isinstance(weighting, Tensor) else None
    excluded = {"state": state, "weighting": weights, "cu_seqlens": cu_seqlens, "block_size": block_size}
    for name, value in excluded.items():
        if shard is not None and value is not None:
            raise ValueError(f"`{name}` is a {type(value).__name__}, but there is a `shard`: leave one out")
