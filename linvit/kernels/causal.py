"""Causal attention, uniform weights: one program per head reads the tokens chunk by chunk and carries their sums.

A chunk has whole blocks of BLOCK tokens, 1 where each token sees itself and those before it.

Inside a chunk the scores are a small matrix; what came before is carried as S (uncentred), z, u, r and the number of
tokens, in registers, and never written. The backward goes through the tokens twice, forwards for the queries,
then backwards for keys and values; between the two it keeps four numbers per token (`rows`: heads × 4 × tokens).

With g the gradient of the output, x = v - origin, a_ij = Rκ(q_i)·Rκ(k_j) and sums over the n_i visible tokens j up to
the end of the block of i,

    out_i = gain_i (Σ_j a_ij x_j / n_i - num_i u_i) + level_i (u_i + origin)
    dRκ(q_i) = Σ_j (γ_i g_i·x_j + dnum_i) Rκ(k_j)      γ_i = gain_i / n_i
    dRκ(k_j) = Σ_{i≥j} (γ_i g_i·x_j + dnum_i) Rκ(q_i)
    dv_j     = Σ_{i≥j} (γ_i a_ij + ω_i) g_i            ω_i = (level_i - gain_i num_i) / n_i

and likewise, unrotated, with dden_i (dnum and dden already divided by n_i).
"""

import triton
import triton.language as tl

from linvit.kernels.device_code import INTERPRETED
from linvit.kernels.tiles import (
    factor,
    features,
    head_of,
    inside_tile,
    load_table,
    load_tile,
    product,
    span,
    store_tile,
    tile_mean,
    turn,
    turn_back,
    visible_tokens,
)


@triton.jit
def load_mapped(x, given, rotary, visible, at, start, MAP: tl.constexpr, SHAPE):
    """κ(x) and Rκ(x) of a chunk, and x."""
    inside = inside_tile(visible, SHAPE)
    tile = load_tile(x, start, inside, SHAPE)
    mapped = features(tile, inside, MAP, given, SHAPE)
    c, s = None, None
    if rotary[0] is not None:
        c, s = load_table(rotary, at[2], start, visible, SHAPE)
    return mapped, turn(mapped, c, s, SHAPE), tile


@triton.jit
def origin_of(v, mask, at, PRECISION: tl.constexpr, VALUES):
    """Subtracted from values in float32; zero for half precision, where it would add rounding."""
    origin = tl.zeros((VALUES[1],), tl.float32)
    if PRECISION == "ieee":
        origin += tile_mean(v, mask, at, 0, VALUES)
    return origin


@triton.jit
def load_values(v, origin, visible, start, DOT: tl.constexpr, VALUES):
    x = load_tile(v, start, inside_tile(visible, VALUES), VALUES).to(tl.float32)
    return tl.where(visible[:, None], x - origin[None, :], 0.0).to(DOT)


@triton.jit
def products(rows, columns, seen, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Dot product of each row with each column that it sees; zero elsewhere."""
    return tl.where(
        seen,
        product(factor(rows, DOT, PRECISION), tl.trans(factor(columns, DOT, PRECISION)), PRECISION),
        0.0,
    )


@triton.jit
def row_sums(qp, rq, kp, rk, z, r, rotary, seen, divisor, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Scores inside a chunk, and num and den over all that each query sees."""
    scores = products(rq, rk, seen, DOT, PRECISION)
    num = (tl.sum(scores, 1) + tl.sum(rq * r[None, :], 1)) / divisor
    if rotary[0] is None:
        den = num
    else:
        den = (tl.sum(products(qp, kp, seen, DOT, PRECISION), 1) + tl.sum(qp * z[None, :], 1)) / divisor
    return scores, num, den


@triton.jit
def chunked(
    query,
    key,
    value,
    out,
    parameters,
    rotary,
    mask,
    cu_seqlens,
    tokens,
    scale,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    QUERY_MAP: tl.constexpr,
    KEY_MAP: tl.constexpr,
    NORMALIZER: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The output of one head: each query reads its own block and those before it."""
    at = span(cu_seqlens, tokens, HEADS)
    batch, head, begin, length = at
    of_queries, of_keys, of_normalizer = (parameters[0], head), (parameters[1], head), (parameters[2], head)
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    q, k = head_of(query, batch, head, begin), head_of(key, batch, head, begin)
    v, o = head_of(value, batch, head, begin), head_of(out, batch, head, begin)
    # In bfloat16 the rounding of the scores would be the largest error of all.
    WIDE: tl.constexpr = PRECISION if PRECISION != "bf16" else "ieee" if INTERPRETED else "tf32"
    origin = origin_of(v, mask, at, PRECISION, VALUES)
    S = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    z, r = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    u, n = tl.zeros((VALUE_COLUMNS,), tl.float32), tl.zeros((1,), tl.float32)
    STEP: tl.constexpr = ROWS // BLOCK * BLOCK
    seen = tl.arange(0, ROWS)[:, None] // BLOCK >= tl.arange(0, ROWS)[None, :] // BLOCK
    for start in range(0, length, STEP):
        here = (batch, head, begin, tl.minimum(length, start + STEP))
        visible = visible_tokens(mask, here, start, True, ROWS)
        exists = visible_tokens(None, here, start, True, ROWS)
        qp, rq, _ = load_mapped(q, of_queries, rotary, exists, at, start, QUERY_MAP, SHAPE)
        kp, rk, _ = load_mapped(k, of_keys, rotary, visible, at, start, KEY_MAP, SHAPE)
        x = load_values(v, origin, visible, start, DOT, VALUES)
        mass = visible.to(tl.float32)
        count = n + tl.sum(tl.where(seen, mass[None, :], 0.0), 1)
        divisor = tl.maximum(count, 1.0)
        scores, num, den = row_sums(qp, rq, kp, rk, z, r, rotary, seen, divisor, DOT, PRECISION)
        mean = (product(seen.to(DOT), x, PRECISION) + u[None, :]) / divisor[:, None]
        read = product(factor(scores, tl.float32, WIDE), x.to(tl.float32), WIDE)
        read += product(factor(rq, DOT, PRECISION), factor(S, DOT, PRECISION), PRECISION)
        gain, level = NORMALIZER[0](num, den, count, scale, eps, of_normalizer)
        result = gain[:, None] * (read / divisor[:, None] - num[:, None] * mean)
        result += tl.where(count > 0, level, 0.0)[:, None] * (mean + origin[None, :])
        store_tile(o, start, inside_tile(exists, VALUES), result, VALUES)
        S += product(tl.trans(factor(rk, DOT, PRECISION)), x, PRECISION)
        r += tl.sum(rk, 0)
        z += tl.sum(kp, 0)
        u += tl.sum(x.to(tl.float32), 0)
        n += tl.sum(mass, 0)


@triton.jit
def chunked_query_backward(
    query,
    key,
    value,
    grad,
    query_grad,
    rows,
    parameters,
    rotary,
    mask,
    cu_seqlens,
    tokens,
    scale,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    QUERY_MAP: tl.constexpr,
    KEY_MAP: tl.constexpr,
    NORMALIZER: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the queries, and γ, ω, dnum and dden of each token for the keys' and values'."""
    at = span(cu_seqlens, tokens, HEADS)
    batch, head, begin, length = at
    of_keys = parameters[1], head
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    q, k = head_of(query, batch, head, begin), head_of(key, batch, head, begin)
    v, g = head_of(value, batch, head, begin), head_of(grad, batch, head, begin)
    dq = head_of(query_grad, batch, head, begin)
    row = rows + (batch * HEADS + head) * 4 * tokens[0] + begin
    origin = origin_of(v, mask, at, PRECISION, VALUES)
    S = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    z, r = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    u, n = tl.zeros((VALUE_COLUMNS,), tl.float32), tl.zeros((1,), tl.float32)
    STEP: tl.constexpr = ROWS // BLOCK * BLOCK
    seen = tl.arange(0, ROWS)[:, None] // BLOCK >= tl.arange(0, ROWS)[None, :] // BLOCK
    for start in range(0, length, STEP):
        here = (batch, head, begin, tl.minimum(length, start + STEP))
        visible = visible_tokens(mask, here, start, True, ROWS)
        exists = visible_tokens(None, here, start, True, ROWS)
        of_queries = parameters[0], head, parameters[3], start // STEP, None, here, start
        of_normalizer = parameters[2], head, parameters[5], start // STEP, None, here, start
        qp, rq, tile = load_mapped(q, of_queries, rotary, exists, at, start, QUERY_MAP, SHAPE)
        kp, rk, _ = load_mapped(k, of_keys, rotary, visible, at, start, KEY_MAP, SHAPE)
        x = load_values(v, origin, visible, start, DOT, VALUES)
        inside = inside_tile(exists, VALUES)
        dout = load_tile(g, start, inside, VALUES).to(DOT)
        mass = visible.to(tl.float32)
        count = n + tl.sum(tl.where(seen, mass[None, :], 0.0), 1)
        divisor = tl.maximum(count, 1.0)
        scores, num, den = row_sums(qp, rq, kp, rk, z, r, rotary, seen, divisor, DOT, PRECISION)
        den = tl.where(exists, den, 1.0)
        gain, level = NORMALIZER[0](num, den, count, scale, eps, of_normalizer)
        along = products(dout, x, seen, DOT, PRECISION)
        before = product(dout, tl.trans(factor(S, DOT, PRECISION)), PRECISION)
        dmean = (tl.sum(along, 1) + tl.sum(dout.to(tl.float32) * u[None, :], 1)) / divisor
        dgain = (tl.sum(along * scores, 1) + tl.sum(rq * before, 1)) / divisor - num * dmean
        dlevel = dmean + tl.where(count > 0, tl.sum(dout.to(tl.float32) * origin[None, :], 1), 0.0)
        dnum, dden = NORMALIZER[1](dgain, dlevel, num, den, count, scale, eps, of_normalizer)
        gamma, omega = gain / divisor, (level - gain * num) / divisor
        dnum, dden = (dnum - gain * dmean) / divisor, dden / divisor
        if rotary[0] is None:
            dnum, dden = dnum + dden, tl.zeros_like(dden)
        pull = tl.where(seen, gamma[:, None] * along + dnum[:, None], 0.0)
        drq = product(factor(pull, DOT, PRECISION), factor(rk, DOT, PRECISION), PRECISION)
        drq += gamma[:, None] * before + dnum[:, None] * r[None, :]
        c, s = None, None
        if rotary[0] is not None:
            c, s = load_table(rotary, begin, start, exists, SHAPE)
        dqp = turn_back(drq, c, s, SHAPE)
        if rotary[0] is not None:
            sums = product(seen.to(DOT), factor(kp, DOT, PRECISION), PRECISION) + z[None, :]
            dqp += dden[:, None] * sums
        dquery = QUERY_MAP[1](tile.to(tl.float32), dqp, of_queries, SHAPE)
        store_tile(dq, start, inside_tile(exists, SHAPE), dquery, SHAPE)
        place = row + start + tl.arange(0, ROWS)
        tl.store(place, gamma, mask=exists)
        tl.store(place + tokens[0], omega, mask=exists)
        tl.store(place + 2 * tokens[0], dnum, mask=exists)
        tl.store(place + 3 * tokens[0], dden, mask=exists)
        S += product(tl.trans(factor(rk, DOT, PRECISION)), x, PRECISION)
        r += tl.sum(rk, 0)
        z += tl.sum(kp, 0)
        u += tl.sum(x.to(tl.float32), 0)
        n += tl.sum(mass, 0)


@triton.jit
def chunked_key_backward(
    query,
    key,
    value,
    grad,
    key_grad,
    value_grad,
    rows,
    parameters,
    rotary,
    mask,
    cu_seqlens,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    QUERY_MAP: tl.constexpr,
    KEY_MAP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of keys and values, from the last chunk to the first."""
    at = span(cu_seqlens, tokens, HEADS)
    batch, head, begin, length = at
    of_queries = parameters[0], head
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    q, k = head_of(query, batch, head, begin), head_of(key, batch, head, begin)
    v, g = head_of(value, batch, head, begin), head_of(grad, batch, head, begin)
    dk, dv = head_of(key_grad, batch, head, begin), head_of(value_grad, batch, head, begin)
    row = rows + (batch * HEADS + head) * 4 * tokens[0] + begin
    origin = origin_of(v, mask, at, PRECISION, VALUES)
    dS = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    dz, dr = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    du = tl.zeros((VALUE_COLUMNS,), tl.float32)
    STEP: tl.constexpr = ROWS // BLOCK * BLOCK
    seen = tl.arange(0, ROWS)[:, None] // BLOCK >= tl.arange(0, ROWS)[None, :] // BLOCK
    chunks = tl.cdiv(length, STEP)
    for chunk in range(0, chunks):
        start = (chunks - 1 - chunk) * STEP
        here = (batch, head, begin, tl.minimum(length, start + STEP))
        visible = visible_tokens(mask, here, start, True, ROWS)
        exists = visible_tokens(None, here, start, True, ROWS)
        of_keys = parameters[1], head, parameters[4], start // STEP, mask, here, start
        qp, rq, _ = load_mapped(q, of_queries, rotary, exists, at, start, QUERY_MAP, SHAPE)
        _, rk, tile = load_mapped(k, of_keys, rotary, visible, at, start, KEY_MAP, SHAPE)
        x = load_values(v, origin, visible, start, DOT, VALUES)
        inside = inside_tile(exists, VALUES)
        dout = load_tile(g, start, inside, VALUES).to(DOT)
        place = row + start + tl.arange(0, ROWS)
        gamma = tl.load(place, mask=exists, other=0.0)
        omega = tl.load(place + tokens[0], mask=exists, other=0.0)
        dnum = tl.load(place + 2 * tokens[0], mask=exists, other=0.0)
        dden = tl.load(place + 3 * tokens[0], mask=exists, other=0.0)
        scores = products(rq, rk, seen, DOT, PRECISION)
        weight = factor(tl.where(seen, gamma[:, None] * scores + omega[:, None], 0.0), DOT, PRECISION)
        dvalue = product(tl.trans(weight), dout, PRECISION) + du[None, :]
        dvalue += product(factor(rk, DOT, PRECISION), factor(dS, DOT, PRECISION), PRECISION)
        store_tile(dv, start, inside, tl.where(visible[:, None], dvalue, 0.0), VALUES)
        along = products(dout, x, seen, DOT, PRECISION)
        pull = factor(tl.where(seen, gamma[:, None] * along + dnum[:, None], 0.0), DOT, PRECISION)
        drk = product(tl.trans(pull), factor(rq, DOT, PRECISION), PRECISION) + dr[None, :]
        drk += product(x, tl.trans(factor(dS, DOT, PRECISION)), PRECISION)
        c, s = None, None
        if rotary[0] is not None:
            c, s = load_table(rotary, begin, start, exists, SHAPE)
        dkp = turn_back(drk, c, s, SHAPE)
        if rotary[0] is not None:
            weighted = qp * dden[:, None]
            dkp += product(tl.trans(seen.to(DOT)), factor(weighted, DOT, PRECISION), PRECISION) + dz[None, :]
            dz += tl.sum(weighted, 0)
        dkp = tl.where(visible[:, None], KEY_MAP[1](tile.to(tl.float32), dkp, of_keys, SHAPE), 0.0)
        store_tile(dk, start, inside_tile(exists, SHAPE), dkp, SHAPE)
        dS += product(tl.trans(factor(rq * gamma[:, None], DOT, PRECISION)), dout, PRECISION)
        dr += tl.sum(rq * dnum[:, None], 0)
        du += tl.sum(dout.to(tl.float32) * omega[:, None], 0)
