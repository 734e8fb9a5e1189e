"""Bidirectional attention forward: `query_mean` and `summarize`, as in `linvit.ops`.

A state is one float32 row: S (width × value width), z, u, r, n, shift, as in `linvit.ops.State`, with exponents of two.
Where inputs are bfloat16 and rotated, and the normalizer is proportional (RAW), S is not centred, and u and r are zero.
Each head's tokens are distributed over `splits` programs; each writes its own state and `merge` joins them in a fixed
order, so results are the same in every run.
"""

import triton
import triton.language as tl

from linvit.kernels.device_code import LOG2E, power_of_two
from linvit.kernels.tiles import (
    factor,
    features,
    folded,
    head_of,
    inside_tile,
    load_row,
    load_table,
    load_tile,
    product,
    share_of,
    span,
    tile_mean,
    turn,
    two_columns,
    visible_tokens,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)
# Weights are relative to 2^shift. Where the largest exponent is further away than this, they are summed again with a
# better shift; nothing has to be compared and multiplied in the loop then. float32 has room for 2^127.
ROOM = tl.constexpr(80.0)


@triton.jit
def load_vector(pointer, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0)


@triton.jit
def store_vector(pointer, x, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(pointer + column, x, mask=column < WIDTH)


@triton.jit
def state_pointers(
    state, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr
):
    """Pointers to S, and which of them are inside."""
    row, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, VALUE_COLUMNS)[None, :]
    return state + row * VALUE_WIDTH + column, (row < WIDTH) & (column < VALUE_WIDTH)


@triton.jit
def load_state(
    state, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr
):
    """S, z, u and r of a state."""
    pointers, inside = state_pointers(state, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    S = tl.load(pointers, inside, 0.0)
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
    pointers, inside = state_pointers(state, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    tl.store(pointers, S, inside)
    store_vector(state + WIDTH * VALUE_WIDTH, z, COLUMNS, WIDTH)
    store_vector(state + WIDTH * VALUE_WIDTH + WIDTH, u, VALUE_COLUMNS, VALUE_WIDTH)
    store_vector(state + WIDTH * VALUE_WIDTH + WIDTH + VALUE_WIDTH, r, COLUMNS, WIDTH)
    pointer = state + WIDTH * VALUE_WIDTH + 2 * WIDTH + VALUE_WIDTH
    tl.store(pointer, n)
    tl.store(pointer + 1, shift)


@triton.jit
def add_queries(
    total, count, q, mask, given, at, start, MASKED: tl.constexpr, MAP: tl.constexpr, FOLD: tl.constexpr, SHAPE
):
    visible = visible_tokens(mask, at, start, MASKED, SHAPE[0])
    inside = inside_tile(visible, SHAPE)
    total += folded(features(load_tile(q, start, inside, SHAPE), inside, MAP, given, SHAPE), FOLD, SHAPE)
    if visible is None:
        count += SHAPE[0]
    else:
        count += tl.sum(visible.to(tl.float32), 0)
    return total, count


@triton.jit
def sum_of_queries(q, mask, given, at, STAGES: tl.constexpr, MAP: tl.constexpr, FOLD: tl.constexpr, SHAPE):
    """Sum of κ(q) over the visible tokens of a split, and their number."""
    first, whole, end = share_of(at[3], SHAPE[0])
    total = tl.zeros((FOLD, SHAPE[1]), tl.float32)
    count = 0.0
    if mask is None:
        for start in tl.range(first, whole, SHAPE[0], num_stages=STAGES):
            total, count = add_queries(total, count, q, mask, given, at, start, False, MAP, FOLD, SHAPE)
        first = whole
    for start in tl.range(first, end, SHAPE[0], num_stages=1 if mask is None else STAGES):
        total, count = add_queries(total, count, q, mask, given, at, start, True, MAP, FOLD, SHAPE)
    return tl.sum(total, 0), count


@triton.jit
def query_mean(
    query,
    mask,
    parameters,
    sums,
    cu_seqlens,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERY_MAP: tl.constexpr,
    FOLD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum of κ(q) over the visible tokens of a split, and their number: sums (heads, splits, width + 1)."""
    at = span(cu_seqlens, tokens, HEADS)
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    q, given = head_of(query, at[0], at[1], at[2]), (parameters[0], at[1])
    total, count = sum_of_queries(q, mask, given, at, STAGES, QUERY_MAP, FOLD, SHAPE)
    row = sums + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (WIDTH + 1)
    store_vector(row, total, COLUMNS, WIDTH)
    tl.store(row + WIDTH, count)


@triton.jit
def load_query_mean(sums, parts, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Mean of κ(q) of a head and the number of queries in it, from its rows of sums (heads, parts, width + 1)."""
    row = sums + tl.program_id(0) * parts * (WIDTH + 1)
    total, count = load_vector(row, COLUMNS, WIDTH), tl.load(row + WIDTH)
    for _ in range(1, parts):
        row += WIDTH + 1
        total += load_vector(row, COLUMNS, WIDTH)
        count += tl.load(row + WIDTH)
    count = tl.maximum(count, 1.0)
    return total / count, count


@triton.jit
def add_tokens(
    sums, k, v, given, rotary, mask, weights, mean, shift, origin, at, start,
    MASKED: tl.constexpr, MAP: tl.constexpr, RAW: tl.constexpr, FOLD: tl.constexpr, VALUE_FOLD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    """The sums S, z, r and u, the mass of each row and its largest exponent, with those of one more tile."""
    S, z, r, u, n, peak = sums
    visible = visible_tokens(mask, at, start, MASKED, SHAPE[0])
    inside = inside_tile(visible, SHAPE)
    x = load_tile(v, start, inside_tile(visible, VALUES), VALUES)
    kp = features(load_tile(k, start, inside, SHAPE), inside, MAP, given, SHAPE)
    mass = None
    if mean is not None:
        exponent = tl.sum(kp * mean[None, :], 1)
        if visible is not None:
            exponent = tl.where(visible, exponent, LOWEST)
        peak = tl.maximum(peak, exponent)
        mass = power_of_two(exponent - shift)
    elif weights is not None:
        mass = load_row(weights, at, start, visible, SHAPE[0])
    if mass is not None:
        if visible is not None:
            mass = tl.where(visible, mass, 0.0)
        kp *= mass[:, None]
        n += mass
    elif visible is not None:
        n += visible.to(tl.float32)
    c, s = None, None
    if rotary[0] is not None:
        c, s = load_table(rotary, at[2], start, visible, SHAPE)
    if c is not None:
        z += folded(kp, FOLD, SHAPE)
    # r sums the same rounded keys as the product, so that centring S leaves no rounding error.
    rk = tl.trans(factor(turn(kp, c, s, SHAPE), DOT, PRECISION))
    if PRECISION == "bf16":
        x = x.to(DOT)
        if not RAW:
            ones = tl.full((SHAPE[0], 16), 1.0, DOT)
            r = tl.dot(rk, ones, r)
            u = tl.dot(tl.trans(x), ones if mass is None else two_columns(mass, DOT, PRECISION), u)
    else:
        x = x.to(tl.float32) - origin[None, :]
        if visible is not None:
            x = tl.where(visible[:, None], x, 0.0)
        r += folded(tl.trans(rk), FOLD, SHAPE)
        u += folded(x if mass is None else x * mass[:, None], VALUE_FOLD, VALUES)
        x = factor(x, DOT, PRECISION)
    S += product(rk, x, PRECISION)
    return S, z, r, u, n, peak


@triton.jit
def sums_of(
    k, v, given, rotary, mask, weights, mean, shift, origin, at,
    FAST: tl.constexpr, STAGES: tl.constexpr, MAP: tl.constexpr, RAW: tl.constexpr, FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    """What `add_tokens` returns for all tokens of a split."""
    first, whole, end = share_of(at[3], SHAPE[0])
    S, z = tl.zeros((SHAPE[1], VALUES[1]), tl.float32), tl.zeros((FOLD, SHAPE[1]), tl.float32)
    if PRECISION == "bf16":
        r, u = tl.zeros((SHAPE[1], 16), tl.float32), tl.zeros((VALUES[1], 16), tl.float32)
    else:
        r, u = tl.zeros((FOLD, SHAPE[1]), tl.float32), tl.zeros((VALUE_FOLD, VALUES[1]), tl.float32)
    n, peak = tl.zeros((SHAPE[0],), tl.float32), tl.full((SHAPE[0],), LOWEST, tl.float32)
    if mask is None and FAST:
        for start in tl.range(first, whole, SHAPE[0], num_stages=STAGES):
            S, z, r, u, n, peak = add_tokens(
                (S, z, r, u, n, peak), k, v, given, rotary, mask, weights, mean, shift, origin, at, start,
                False, MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
            )  # fmt: skip
        if mean is None and weights is None:
            n += (whole - first) // SHAPE[0]
        first = whole
    for start in tl.range(first, end, SHAPE[0], num_stages=1 if mask is None else STAGES):
        S, z, r, u, n, peak = add_tokens(
            (S, z, r, u, n, peak), k, v, given, rotary, mask, weights, mean, shift, origin, at, start,
            True, MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
        )  # fmt: skip
    return S, z, r, u, tl.sum(n, 0), tl.max(peak, 0)


@triton.jit
def summary(
    k, v, given, rotary, mask, weights, mean, shift, at,
    FAST: tl.constexpr, STAGES: tl.constexpr, MAP: tl.constexpr, RAW: tl.constexpr, FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    """S, z, u, r and n of a split's tokens, and their largest exponent; mean is that of κ(q), in exponents of two."""
    origin = tl.zeros((VALUES[1],), tl.float32)
    if PRECISION == "ieee":
        origin += tile_mean(v, mask, at, share_of(at[3], SHAPE[0])[0], VALUES)
    S, z, r, u, n, peak = sums_of(
        k, v, given, rotary, mask, weights, mean, shift, origin, at,
        FAST, STAGES, MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
    )  # fmt: skip
    share = 1 / tl.where(n == 0, 1.0, n)
    S, z = S * share, tl.sum(z, 0) * share
    if PRECISION == "bf16":
        r, u = tl.sum(r, 1) * share / 16, tl.sum(u, 1) * share
        if mean is None and weights is None:  # u has 16 equal columns too
            u = u / 16
    else:
        r, u = tl.sum(r, 0) * share, tl.sum(u, 0) * share
    if not RAW:
        S -= r[:, None] * u[None, :]
        if rotary[0] is None:
            z = r
        u += origin
    return S, z, u, r, n, peak


@triton.jit
def summarize(
    key,
    value,
    parameters,
    rotary,
    mask,
    weights,
    sums,
    parts,
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
    KEY_MAP: tl.constexpr,
    RAW: tl.constexpr,
    FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """State of a split's tokens; with `sums`, weights are exp(s · mean κ(q) · κ(k)) over the largest of them."""
    at = span(cu_seqlens, tokens, HEADS)
    k, v = head_of(key, at[0], at[1], at[2]), head_of(value, at[0], at[1], at[2])
    mean, given = None, (parameters[1], at[1])
    if sums is not None:
        mean = load_query_mean(sums, parts, COLUMNS, WIDTH)[0] * (scale * LOG2E)
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    row = states + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SIZE
    S, z, u, r, n, peak = summary(
        k, v, given, rotary, mask, weights, mean, 0.0, at,
        True, STAGES, KEY_MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
    )  # fmt: skip
    store_state(row, S, z, u, r, n, 0.0, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    if mean is not None:  # noqa: SIM102
        if tl.abs(peak) > ROOM:
            S, z, u, r, n, _ = summary(
                k, v, given, rotary, mask, weights, mean, peak, at,
                False, 1, KEY_MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
            )  # fmt: skip
            store_state(row, S, z, u, r, n, peak, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
