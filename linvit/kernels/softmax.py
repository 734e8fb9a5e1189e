"""Softmax attention of short sequences in one launch: a program has all keys of a head at once, rotated once."""

import triton
import triton.language as tl

from linvit.kernels.formulas import LOG2E, power_of_two
from linvit.kernels.tiles import (
    factor,
    head_of,
    inside_tile,
    load_row,
    load_table,
    load_tile,
    product,
    span,
    store_row,
    store_tile,
    turn,
    turn_back,
    visible_tokens,
)


@triton.jit
def load_turned(x, table, start, visible, DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE):
    """A tile of queries or keys as a factor, rotated by what `load_table` returns."""
    tile = load_tile(x, start, inside_tile(visible, SHAPE), SHAPE)
    c, s = table
    if c is not None:
        tile = turn(tile.to(tl.float32), c, s, SHAPE)
    return factor(tile, DOT, PRECISION)


@triton.jit
def attend_softmax(
    query,
    key,
    value,
    out,
    masses,
    rotary,
    mask,
    queries,
    keys,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The outputs of a share of a head's queries.

    masses: the logarithm to base 2 of each query's sum of exponentials, (heads, queries), ∞ if it sees no key; None
    without gradients.
    """
    at, keys_at = span(None, queries, HEADS), span(None, keys, HEADS)
    q, o = head_of(query, at[0], at[1], at[2]), head_of(out, at[0], at[1], at[2])
    k, v = head_of(key, at[0], at[1], at[2]), head_of(value, at[0], at[1], at[2])
    visible = visible_tokens(mask, keys_at, 0, True, KEYS)
    KEY_SHAPE: tl.constexpr = (KEYS, COLUMNS, WIDTH)
    rk = load_turned(k, load_table(rotary, 0, 0, visible, KEY_SHAPE), 0, visible, DOT, PRECISION, KEY_SHAPE)
    VALUES: tl.constexpr = (KEYS, VALUE_COLUMNS, VALUE_WIDTH)
    values = factor(load_tile(v, 0, inside_tile(visible, VALUES), VALUES), DOT, PRECISION)
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    OUT: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    factor_of_scores = scale * LOG2E
    for start in range(tl.program_id(1) * ROWS, queries[0], tl.num_programs(1) * ROWS):
        exists = visible_tokens(None, at, start, True, ROWS)
        rq = load_turned(q, load_table(rotary, 0, start, exists, SHAPE), start, exists, DOT, PRECISION, SHAPE)
        scores = tl.where(visible[None, :], product(rq, tl.trans(rk), PRECISION), -float("inf"))
        peak = tl.max(scores, 1) * factor_of_scores
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        weights = power_of_two(scores * factor_of_scores - peak[:, None])
        mass = tl.sum(weights, 1)
        sees = mass > 0
        result = product(factor(weights, DOT, PRECISION), values, PRECISION) / tl.where(mass == 0, 1.0, mass)[:, None]
        store_tile(o, start, inside_tile(exists, OUT), result, OUT)
        if masses is not None:
            store_row(masses, at, start, exists, peak + tl.log2(mass), ROWS)
