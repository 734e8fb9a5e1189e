"""Bidirectional attention forward: `query_mean`, `summarize`, `merge` and `read`, as in `linvit.ops`.

A state is one float32 row: S (width × value width), z, u, r, n, shift, as in `linvit.ops.State`. Each head's tokens are
distributed over `splits` programs, tile by tile; each writes its own state and `merge` joins them in a fixed order, so
results are the same in every run.
"""

import triton
import triton.language as tl

from linvit.kernels.tiles import (
    factor,
    feature,
    gain_and_level,
    head_of,
    inside_tile,
    load_tile,
    load_visible,
    rotate,
    span,
    store_tile,
    tile_mean,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_vector(pointer, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0)


@triton.jit
def store_vector(pointer, x, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(pointer + column, x, mask=column < WIDTH)


@triton.jit
def load_state(
    state, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr
):
    """S, z, u and r of a state."""
    inside = inside_tile(0, WIDTH, COLUMNS, VALUE_COLUMNS, VALUE_WIDTH)
    S = tl.load(
        state + tl.arange(0, COLUMNS)[:, None] * VALUE_WIDTH + tl.arange(0, VALUE_COLUMNS)[None, :], inside, 0.0
    )
    z = load_vector(state + WIDTH * VALUE_WIDTH, COLUMNS, WIDTH)
    u = load_vector(state + WIDTH * VALUE_WIDTH + WIDTH, VALUE_COLUMNS, VALUE_WIDTH)
    r = load_vector(state + WIDTH * VALUE_WIDTH + WIDTH + VALUE_WIDTH, COLUMNS, WIDTH)
    return S, z, u, r


@triton.jit
def load_mass(state, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """n and shift of a state."""
    pointer = state + WIDTH * VALUE_WIDTH + 2 * WIDTH + VALUE_WIDTH
    return tl.load(pointer), tl.load(pointer + 1)


@triton.jit
def store_state(
    state,
    S,
    z,
    u,
    r,
    n,
    shift,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    inside = inside_tile(0, WIDTH, COLUMNS, VALUE_COLUMNS, VALUE_WIDTH)
    tl.store(state + tl.arange(0, COLUMNS)[:, None] * VALUE_WIDTH + tl.arange(0, VALUE_COLUMNS)[None, :], S, inside)
    store_vector(state + WIDTH * VALUE_WIDTH, z, COLUMNS, WIDTH)
    store_vector(state + WIDTH * VALUE_WIDTH + WIDTH, u, VALUE_COLUMNS, VALUE_WIDTH)
    store_vector(state + WIDTH * VALUE_WIDTH + WIDTH + VALUE_WIDTH, r, COLUMNS, WIDTH)
    pointer = state + WIDTH * VALUE_WIDTH + 2 * WIDTH + VALUE_WIDTH
    tl.store(pointer, n)
    tl.store(pointer + 1, shift)


@triton.jit
def query_mean(
    query,
    mask,
    sums,
    cu_seqlens,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAP: tl.constexpr,
):
    """Sum of κ(q) over the visible tokens of a split, and their number: sums (heads, splits, width + 1)."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    q = head_of(query, batch, head, begin)
    total = tl.zeros((COLUMNS,), tl.float32)
    count = tl.zeros((1,), tl.float32)
    for start in range(split * ROWS, length, splits * ROWS):
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH) & visible[:, None]
        total += tl.sum(feature(load_tile(q, start, inside, ROWS, COLUMNS), inside, MAP), 0)
        count += tl.sum(visible.to(tl.float32), 0)
    row = sums + (tl.program_id(0) * splits + split) * (WIDTH + 1)
    store_vector(row, total, COLUMNS, WIDTH)
    tl.store(row + WIDTH + tl.arange(0, 1), count)


@triton.jit
def load_query_mean(sums, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Mean of κ(q) of a head and the number of queries in it, from its row of sums (heads, width + 1)."""
    row = sums + tl.program_id(0) * (WIDTH + 1)
    count = tl.maximum(tl.load(row + WIDTH), 1.0)
    return load_vector(row, COLUMNS, WIDTH) / count, count


@triton.jit
def summarize(
    key,
    value,
    cos,
    sin,
    mask,
    sums,
    states,
    cu_seqlens,
    tokens,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    MAP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State of a split's tokens; with `sums`, weights are exp(s · mean κ(q) · κ(k)) over their largest so far."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    k, v = head_of(key, batch, head, begin), head_of(value, batch, head, begin)
    S = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    z, r = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    u = tl.zeros((VALUE_COLUMNS,), tl.float32)
    n, shift = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    first = split * ROWS
    origin = tile_mean(v, mask, batch, head, begin, first, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, PRECISION)
    if sums is not None:
        mean, _ = load_query_mean(sums, COLUMNS, WIDTH)
        shift += LOWEST
    for start in range(split * ROWS, length, splits * ROWS):
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH) & visible[:, None]
        kp = feature(load_tile(k, start, inside, ROWS, COLUMNS), inside, MAP)
        inside = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH) & visible[:, None]
        x = load_tile(v, start, inside, ROWS, VALUE_COLUMNS) - origin[None, :]
        mass = visible.to(tl.float32)
        if sums is not None:
            exponent = tl.where(visible, tl.sum(kp * mean[None, :], 1) * scale, LOWEST)
            top = tl.maximum(shift, tl.max(exponent, 0))
            older = tl.exp(shift - top)
            mass = tl.where(visible, tl.exp(exponent - top), 0.0)
            S, z, r, u = S * older[:, None], z * older, r * older, u * older
            n, shift = n * older, top
        rk = rotate(kp, cos, sin, begin, start, length, False, ROWS, COLUMNS, WIDTH) * mass[:, None]
        # r sums the same rounded keys as the product, so that centring S leaves no rounding error.
        rk = factor(rk, DOT, PRECISION)
        S += tl.dot(tl.trans(rk), factor(x, DOT, PRECISION), input_precision=PRECISION)
        r += tl.sum(rk.to(tl.float32), 0)
        z += tl.sum(kp * mass[:, None], 0)
        u += tl.sum(x * mass[:, None], 0)
        n += tl.sum(mass, 0)
    divisor = tl.where(n == 0, 1.0, n)
    z, r, u = z / divisor, r / divisor, u / divisor
    if cos is None:
        z = r
    S = S / divisor[:, None] - r[:, None] * u[None, :]
    row = states + (tl.program_id(0) * splits + split).to(tl.int64) * SIZE
    store_state(row, S, z, u + origin, r, tl.sum(n, 0), tl.sum(shift, 0), WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)


@triton.jit
def merge(
    states,
    merged,
    splits,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    """A head's state, merged from those of its splits in order."""
    head = tl.program_id(0).to(tl.int64)
    row = states + head * splits * SIZE
    S, z, u, r = load_state(row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    n, shift = load_mass(row, WIDTH, VALUE_WIDTH)
    for _ in range(1, splits):
        row += SIZE
        S_2, z_2, u_2, r_2 = load_state(row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
        n_2, shift_2 = load_mass(row, WIDTH, VALUE_WIDTH)
        top = tl.maximum(shift, shift_2)
        n_2 = n_2 * tl.exp(shift_2 - top)
        n = n * tl.exp(shift - top) + n_2
        shift = top
        share = n_2 / tl.where(n == 0, 1.0, n)
        S += share * (S_2 - S + (1 - share) * (r_2 - r)[:, None] * (u_2 - u)[None, :])
        z += share * (z_2 - z)
        u += share * (u_2 - u)
        r += share * (r_2 - r)
    store_state(merged + head * SIZE, S, z, u, r, n, shift, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)


@triton.jit
def read(
    query,
    out,
    cos,
    sin,
    states,
    cu_seqlens,
    tokens,
    scale,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    MAP: tl.constexpr,
    NORMALIZER: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output of the queries of a split, read from their head's state."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    q, o = head_of(query, batch, head, begin), head_of(out, batch, head, begin)
    state = states + tl.program_id(0).to(tl.int64) * SIZE
    S, z, u, r = load_state(state, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    mass, _ = load_mass(state, WIDTH, VALUE_WIDTH)
    S = factor(S, DOT, PRECISION)
    for start in range(split * ROWS, length, splits * ROWS):
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH)
        qp = feature(load_tile(q, start, inside, ROWS, COLUMNS), inside, MAP)
        rq = rotate(qp, cos, sin, begin, start, length, False, ROWS, COLUMNS, WIDTH)
        num, den = tl.sum(rq * r[None, :], 1), tl.sum(qp * z[None, :], 1)
        gain, level = gain_and_level(num, den, mass, scale, eps, NORMALIZER)
        covariance = tl.dot(factor(rq, DOT, PRECISION), S, input_precision=PRECISION)
        result = gain[:, None] * covariance + level[:, None] * u[None, :]
        inside = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH)
        store_tile(o, start, inside, result, ROWS, VALUE_COLUMNS)
