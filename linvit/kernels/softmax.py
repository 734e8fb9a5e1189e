"""Softmax attention of short sequences in one launch: a program has all keys of a head at once, rotated once."""

import triton
import triton.language as tl

from linvit.kernels.device_code import LOG2E, power_of_two
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
    visible_tokens,
)


@triton.jit
def load_turned(x, rotary, start, visible, DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE):
    """A tile of queries or keys as a factor, rotated."""
    tile = load_tile(x, start, inside_tile(visible, SHAPE), SHAPE)
    if rotary[0] is not None:
        c, s = load_table(rotary, 0, start, visible, SHAPE)
        tile = turn(tile.to(tl.float32), c, s, SHAPE)
    return factor(tile, DOT, PRECISION)


@triton.jit
def turned_back(x, rotary, start, visible, SHAPE):
    """The gradient of a tile, from that of the rotated one."""
    if rotary[0] is not None:
        c, s = load_table(rotary, 0, start, visible, SHAPE)
        x = turn(x, c, -s, SHAPE)
    return x


@triton.jit
def softmax_head(
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

    masses: the logarithm to base 2 of each query's sum of exponentials, (heads, queries); None without gradients.
    """
    at = span(None, queries, HEADS)
    batch, head, begin, length = at
    q, o = head_of(query, batch, head, begin), head_of(out, batch, head, begin)
    k, v = head_of(key, batch, head, begin), head_of(value, batch, head, begin)
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    OUT: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    KEY_SHAPE: tl.constexpr = (KEYS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (KEYS, VALUE_COLUMNS, VALUE_WIDTH)
    visible = visible_tokens(mask, (batch, head, begin, keys), 0, True, KEYS)
    rk = load_turned(k, rotary, 0, visible, DOT, PRECISION, KEY_SHAPE)
    values = factor(load_tile(v, 0, inside_tile(visible, VALUES), VALUES), DOT, PRECISION)
    for start in range(tl.program_id(1) * ROWS, length, tl.num_programs(1) * ROWS):
        exists = visible_tokens(None, at, start, True, ROWS)
        rq = load_turned(q, rotary, start, exists, DOT, PRECISION, SHAPE)
        scores = tl.where(visible[None, :], product(rq, tl.trans(rk), PRECISION), -float("inf"))
        peak = tl.max(scores, 1) * (scale * LOG2E)
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        weights = power_of_two(scores * (scale * LOG2E) - peak[:, None])
        mass = tl.sum(weights, 1)
        mass = tl.where(mass == 0, 1.0, mass)  # sees no key: zeros, and no gradient
        result = product(factor(weights, DOT, PRECISION), values, PRECISION) / mass[:, None]
        store_tile(o, start, inside_tile(exists, OUT), result, OUT)
        if masses is not None:
            store_row(masses, at, start, exists, peak + tl.log2(mass), ROWS)


@triton.jit
def softmax_head_backward(
    query,
    key,
    value,
    out,
    grad,
    dq,
    dk,
    dv,
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
    """The gradients of a share of a head's keys and values, and what this share adds to that of the queries.

    dq: (shares, batch, heads, queries, width), strides included. Scores are (keys, queries) here.
    """
    at = span(None, queries, HEADS)
    batch, head, begin, length = at
    share = dq[0] + tl.program_id(1) * dq[1], dq[2], dq[3], dq[4], dq[5]
    q, k, v = head_of(query, batch, head, begin), head_of(key, batch, head, begin), head_of(value, batch, head, begin)
    o, g, of_q = head_of(out, batch, head, begin), head_of(grad, batch, head, begin), head_of(share, batch, head, begin)
    of_k, of_v = head_of(dk, batch, head, begin), head_of(dv, batch, head, begin)
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    OUT: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    KEY_SHAPE: tl.constexpr = (KEYS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (KEYS, VALUE_COLUMNS, VALUE_WIDTH)
    first = tl.program_id(1) * KEYS
    visible = visible_tokens(mask, (batch, head, begin, keys), first, True, KEYS)
    rk = load_turned(k, rotary, first, visible, DOT, PRECISION, KEY_SHAPE)
    values = factor(load_tile(v, first, inside_tile(visible, VALUES), VALUES), DOT, PRECISION)
    key_grad = tl.zeros((KEYS, COLUMNS), tl.float32)
    value_grad = tl.zeros((KEYS, VALUE_COLUMNS), tl.float32)
    for start in range(0, length, ROWS):
        exists = visible_tokens(None, at, start, True, ROWS)
        rq = load_turned(q, rotary, start, exists, DOT, PRECISION, SHAPE)
        inside = inside_tile(exists, OUT)
        given = load_tile(g, start, inside, OUT)
        gf = factor(given, DOT, PRECISION)
        scores = tl.where(visible[:, None], product(rk, tl.trans(rq), PRECISION), -float("inf"))
        weights = power_of_two(scores * (scale * LOG2E) - load_row(masses, at, start, exists, ROWS)[None, :])
        value_grad += product(factor(weights, DOT, PRECISION), gf, PRECISION)
        level = tl.sum(given.to(tl.float32) * load_tile(o, start, inside, OUT).to(tl.float32), 1)
        change = factor(weights * (product(values, tl.trans(gf), PRECISION) - level[None, :]), DOT, PRECISION)
        key_grad += product(change, rq, PRECISION)
        rq_grad = tl.trans(product(tl.trans(rk), change, PRECISION)) * scale
        rq_grad = turned_back(rq_grad, rotary, start, exists, SHAPE)
        store_tile(of_q, start, inside_tile(exists, SHAPE), rq_grad, SHAPE)
    exists = visible_tokens(None, (batch, head, begin, keys), first, True, KEYS)
    key_grad = turned_back(key_grad * scale, rotary, first, exists, KEY_SHAPE)
    store_tile(of_k, first, inside_tile(exists, KEY_SHAPE), key_grad, KEY_SHAPE)
    store_tile(of_v, first, inside_tile(exists, VALUES), value_grad, VALUES)
