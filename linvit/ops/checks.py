"""Checks of what a user passes to the operator, once, at the public call: each error is one sentence.

They cover what torch would not report, or only by a wrong result, such as shapes that broadcast.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from linvit.arguments import FLOATS, check_dense, check_tensors, kind
from linvit.errors import refuse
from linvit.formulas.feature_map import FeatureMap, query_and_key_map
from linvit.ops.causal import at_hand
from linvit.ops.position import Rotary
from linvit.ops.state import FIELDS, WEIGHTINGS, Shard, State, Weighting, accumulator_dtype, field_sizes, visible_tokens

COUNTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PACKED = "int32 or int64 of shape (sequences + 1,): the first token of each sequence, and the number of tokens"


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weighting: str | Tensor | Weighting,
    rotary: Rotary | None,
    key_mask: Tensor | None,
    causal: bool | str,
    eps: float,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    has_mixing: bool = False,
) -> None:
    """Checks every argument except those that `query_and_key_map`, `resolve_normalizer` and `kernel_for` check."""
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    if isinstance(weighting, Tensor):
        tensors["weighting"] = weighting
    elif (
        weighting not in WEIGHTINGS
        if isinstance(weighting, str)
        else isinstance(weighting, type) or not callable(weighting)
    ):
        got = repr(weighting) if isinstance(weighting, str) else kind(weighting)
        raise ValueError(f"`weighting` is {got}, expected a tensor, a function or one of {', '.join(WEIGHTINGS)}")
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            raise TypeError(
                f"`rotary` is {kind(rotary)}, expected a Rotary: make it with rotary_1d, rotary_2d or rotary_3d"
            )
        tensors["rotary.cos"], tensors["rotary.sin"] = rotary
    if key_mask is not None:
        tensors["key_mask"] = key_mask
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens
    check_tensors(tensors)
    _check_tokens(query, key, value)
    queries, tokens = query.shape[2], key.shape[2]
    if causal is not False or block_size is not None:
        _check_blocks(causal, block_size, has_mixing)
        if queries != tokens:
            raise ValueError(
                f"`causal` is {causal!r} with {queries} queries and {tokens} keys, expected as many queries as keys"
            )
    if type(eps) is not float or not 0 <= eps < math.inf:
        is_number = isinstance(eps, Real | torch.SymFloat) and not isinstance(eps, bool)
        if not is_number or not 0 <= eps < math.inf:
            raise ValueError(f"`eps` is {eps if is_number else kind(eps)}, expected a number of 0 or more")
    if isinstance(weighting, str):
        refuse(
            causal
            and weighting == "query_mean"
            and "`weighting` is 'query_mean', which has no causal form because its weights need all the queries: use "
            "weighting='prefix_query_mean'",
            not causal
            and weighting == "prefix_query_mean"
            and "`weighting` is 'prefix_query_mean', which is causal: pass causal=True, or use weighting='query_mean'",
            weighting == "query_mean"
            and key_mask is not None
            and queries != tokens
            and f"`weighting` is 'query_mean' with a `key_mask`, {queries} queries and {tokens} keys, expected as many "
            "queries as keys, because the queries of masked tokens must not enter the mean",
        )
    elif isinstance(weighting, Tensor):
        _check_weights(weighting, key)
    elif causal or cu_seqlens is not None:
        raise ValueError(
            "`weighting` is a function, which sees all tokens of a batch entry, so it has no causal form and accepts "
            "no `cu_seqlens`: pass a tensor of weights"
        )
    if rotary is not None:
        _check_rotary(rotary, query, key)
    if key_mask is not None:
        sizes = key.shape[:3:2] if key_mask.ndim == 2 else key.shape[:3]
        fits = key_mask.ndim in (2, 3) and _expands(key_mask.shape, sizes)
        if not fits or key_mask.dtype not in (torch.bool, torch.uint8, torch.int8):
            raise ValueError(
                f"`key_mask` is {key_mask.dtype} of shape {tuple(key_mask.shape)}, expected bool of shape (batch, "
                f"tokens) or (batch, heads, tokens) for keys of shape {tuple(key.shape)}"
            )
    if cu_seqlens is not None:
        _check_packed(cu_seqlens, query, key)


def check_mixing(
    mixing: Tensor | None,
    blocks: tuple[int, int] | Tensor | None,
    grid: tuple[int, int] | None,
    query: Tensor,
    key: Tensor,
    *,
    causal: bool | str,
    block_size: int | None,
    cu_seqlens: Tensor | None,
    shard: Shard | None = None,
) -> None:
    """Checks the blocks of a call that `check_call` has checked."""
    given = {"blocks": blocks, "grid": grid}
    if mixing is None:
        refuse(
            *(value is not None and f"`{name}` is given without `mixing`: pass both" for name, value in given.items())
        )
        return
    check_tensors({"query": query, "mixing": mixing, **({"blocks": blocks} if isinstance(blocks, Tensor) else {})})
    (heads, tokens), number = key.shape[1:3], mixing.shape[-1] if mixing.ndim else 0
    square = mixing.shape in ((number, number), (heads, number, number)) and number > 0
    around = {"shard": shard} if not causal else {**given, "cu_seqlens": cu_seqlens, "shard": shard}
    refuse(
        (not square or mixing.dtype not in FLOATS)
        and f"`mixing` is {mixing.dtype} of shape {tuple(mixing.shape)}, expected floating point of shape (blocks, "
        f"blocks) or (heads, blocks, blocks) with {heads} heads",
        query.shape[2] != tokens
        and f"`mixing` is given with {query.shape[2]} queries and {tokens} keys, expected as many queries as keys",
        *(
            value is not None and f"`{name}` is given with `mixing` and causal={causal}: leave one out"
            for name, value in around.items()
        ),
    )
    if causal:
        assert block_size is not None
        fits = tokens <= block_size * number
        refuse(not fits and f"`mixing` has {number} blocks of {block_size} tokens, expected enough for {tokens} tokens")
        return
    if isinstance(blocks, Tensor):
        refuse(
            (blocks.dtype not in (torch.int32, torch.int64) or blocks.shape != (tokens,))
            and f"`blocks` is {blocks.dtype} of shape {tuple(blocks.shape)}, expected int32 or int64 of shape "
            f"({tokens},), the block of each token, or two numbers",
            grid is not None and "`grid` is given with `blocks` as a tensor: leave it out",
        )
        lowest, highest = (int(blocks.min()), int(blocks.max())) if at_hand(blocks) else (0, 0)
        wrong = lowest < 0 or highest >= number
        refuse(wrong and f"`blocks` has numbers from {lowest} to {highest}, expected 0 to {number - 1} as in `mixing`")
        return
    for name, value in given.items():
        fits = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_count, value))
        refuse(not fits and f"`{name}` is {value}, expected rows and columns, two whole numbers of 1 or more")
    refuse(
        cu_seqlens is not None and "`grid` is given with `cu_seqlens`: pass `blocks` as a tensor, each token's block"
    )
    (rows, columns), (height, width) = cast(tuple[int, int], blocks), cast(tuple[int, int], grid)
    prefix, needed = tokens - height * width, rows * columns
    more = " and one for the tokens before the grid" if prefix > 0 else ""
    refuse(
        prefix < 0 and f"`grid` is {height} × {width}, expected at most {tokens} tokens, as `key` has",
        number != needed + (prefix > 0) and f"`mixing` has {number} blocks, expected {rows} × {columns}{more}",
    )


def _is_count(size: object) -> bool:
    return isinstance(size, int | torch.SymInt) and not isinstance(size, bool) and bool(size >= 1)


def weights_of(
    weighting: Weighting,
    query: Tensor,
    key: Tensor,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap],
    key_mask: Tensor | None,
) -> Tensor:
    """What a function of κ(q), κ(k) and the mask gives, in the dtype of intermediate results; masked keys are zeros.

    Raises:
        TypeError, ValueError: for a result that cannot be weights.
    """
    query_map, key_map = query_and_key_map(feature_map, every_token_counts=key_mask is None)
    visible = None if key_mask is None else visible_tokens(key_mask, key)
    query, key = (x.to(accumulator_dtype(x.dtype)) for x in (query, key))
    if visible is not None:
        key = key.masked_fill(~visible.unsqueeze(-1), 0)
    weights = weighting(query_map(query), key_map(key), visible)
    check_dense("weighting(…)", weights)
    _check_weights(weights, key)
    return weights


def check_state(state: State | None, query: Tensor, value: Tensor) -> None:
    """Checks that a state continues with these tokens, which `check_call` has checked."""
    if state is None:
        return
    if not isinstance(state, State):
        raise TypeError(f"`state` is {kind(state)}, expected a State: begin with None or State.empty(query, value)")
    dtype, sizes = accumulator_dtype(query.dtype), field_sizes(query.shape[-1], value.shape[-1])
    for name, x, size in zip(FIELDS, state, sizes, strict=True):
        check_dense(f"state.{name}", x)
        if x.shape != (*query.shape[:2], *size) or x.dtype != dtype or x.device != query.device:
            raise ValueError(
                f"`state.{name}` is {x.dtype} of shape {tuple(x.shape)} on {x.device}, expected {dtype} of shape "
                f"{(*query.shape[:2], *size)} on {query.device}: begin with None or State.empty(query, value)"
            )


def check_shard(
    shard: Shard | None, weighting: str | Tensor | Weighting, cu_seqlens: Tensor | None, block_size: int | None
) -> None:
    """Raises ValueError for arguments of `linear_attention` that a shard excludes."""
    if shard is None:
        return
    weights = None if isinstance(weighting, str) else weighting
    for name, value in {"weighting": weights, "cu_seqlens": cu_seqlens, "block_size": block_size}.items():
        if value is not None:
            raise ValueError(f"`{name}` is a {type(value).__name__}, but there is a `shard`: leave one out")


def _check_tokens(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtype = query.dtype
    for name, x in (("query", query), ("key", key), ("value", value)):
        shape = x.shape
        if len(shape) != 4 or (0 in shape and 0 in shape[1:]):
            raise ValueError(
                f"`{name}` has shape {tuple(shape)}, expected (batch, heads, tokens, width) with one or more heads, "
                "tokens and channels"
            )
        if x.dtype != dtype or dtype not in FLOATS:
            raise ValueError(
                f"`{name}` is {x.dtype} and `query` {dtype}, expected the same of float16, bfloat16, float32 and "
                "float64: convert one"
            )
    batch, heads, tokens, width = key.shape
    of_queries, of_values = query.shape, value.shape
    refuse(
        (of_queries[0] != batch or of_queries[1] != heads or of_queries[3] != width)
        and f"`key` has shape {tuple(key.shape)} and `query` {tuple(of_queries)}, expected the same batch, heads and "
        "width",
        (of_values[0] != batch or of_values[1] != heads or of_values[2] != tokens)
        and f"`value` has shape {tuple(of_values)} and `key` {tuple(key.shape)}, expected the same batch, heads and "
        "tokens",
    )


def _check_blocks(causal: object, block_size: object, has_mixing: bool) -> None:
    is_size = isinstance(block_size, int | torch.SymInt) and not isinstance(block_size, bool)
    is_block = isinstance(causal, str) and causal == "block"
    has_blocks = is_block or (causal is True and has_mixing)
    refuse(
        not isinstance(causal, bool)
        and not is_block
        and f"`causal` is {repr(causal) if isinstance(causal, str) else kind(causal)}, expected True, False or 'block'",
        has_blocks
        and not (is_size and block_size >= 1)  # type: ignore[operator]
        and f"`block_size` is {block_size if is_size else kind(block_size)} with causal={causal!r}, expected a "
        "whole number of 1 or more",
        not has_blocks
        and block_size is not None
        and f"`block_size` is {block_size} with causal={causal}, expected None: pass causal='block'",
    )


def _check_weights(weighting: Tensor, key: Tensor) -> None:
    refuse(
        weighting.dtype not in (*COUNTS, *FLOATS)
        and f"`weighting` is {weighting.dtype}, expected whole or floating-point numbers: convert it",
        (weighting.ndim > 3 or not _expands(weighting.shape, key.shape[:3]))
        and f"`weighting` has shape {tuple(weighting.shape)}, expected weights that broadcast to "
        f"(batch, heads, tokens) = {tuple(key.shape[:3])} of `key`",
    )


def _check_rotary(rotary: Rotary, query: Tensor, key: Tensor) -> None:
    cos, sin = rotary
    shape = cos.shape
    fits = shape == sin.shape and cos.dtype == sin.dtype and cos.dtype in FLOATS and 2 <= len(shape) <= 4
    fits = fits and (len(shape) == 2 or _expands(shape[:-2], query.shape[:2]))
    for x in (query, key) if query.shape[2] != key.shape[2] else (query,):
        _, _, tokens, width = x.shape
        if not fits or width % 2 or shape[-2:] != (tokens, width // 2):
            raise ValueError(
                f"`rotary` has tables of shape {tuple(shape)} and {tuple(sin.shape)}, {cos.dtype} and {sin.dtype}, for "
                f"tokens of shape {tuple(x.shape)}, expected two of (tokens, width / 2), floating point: make it "
                "with rotary_1d, rotary_2d or rotary_3d"
            )


def _check_packed(cu_seqlens: Tensor, query: Tensor, key: Tensor) -> None:
    shape, dtype = cu_seqlens.shape, cu_seqlens.dtype
    refuse(
        (len(shape) != 1 or shape[0] < 2 or dtype not in (torch.int32, torch.int64))
        and f"`cu_seqlens` is {dtype} of shape {tuple(shape)}, expected {PACKED}",
        (query.shape[0] != 1 or query.shape[2] != key.shape[2])
        and f"`cu_seqlens` is given with queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}, "
        "expected (1, heads, tokens, width) with equally many of both: put the sequences one after another",
    )
    if not at_hand(cu_seqlens):
        return
    first, *_, last = lengths = cu_seqlens.tolist()
    refuse(
        (first != 0 or last != query.shape[2])
        and f"`cu_seqlens` goes from {first} to {last}, expected from 0 to {query.shape[2]}, the number of tokens",
        *(
            end < begin
            and f"`cu_seqlens` decreases from {begin} to {end} after entry {i}, expected the first token of each "
            "sequence in order: sum the lengths up"
            for i, (begin, end) in enumerate(pairwise(lengths))
        ),
    )


def _expands(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a tensor of this shape expands to these sizes."""
    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    return len(shape) <= len(sizes) and all(size in (1, whole) for size, whole in pairs)
