"""Causal attention, uniform weights: one program per head reads the tokens chunk by chunk and carries their sums.

Inside a chunk the scores are a small matrix; what came before is carried as S (uncentred), z, u, r and the number of
tokens, in registers, and never written. The backward goes through the tokens twice, forwards for the queries,
then backwards for keys and values; between the two it keeps four numbers per token (`rows`: heads × 4 × tokens).

With g the gradient of the output, x = v - origin, a_ij = Rκ(q_i)·Rκ(k_j) and sums over j ≤ i of n_i visible tokens,

    out_i = gain_i (Σ_j a_ij x_j / n_i - num_i u_i) + level_i (u_i + origin)
    dRκ(q_i) = Σ_j (γ_i g_i·x_j + dnum_i) Rκ(k_j)      γ_i = gain_i / n_i
    dRκ(k_j) = Σ_{i≥j} (γ_i g_i·x_j + dnum_i) Rκ(q_i)
    dv_j     = Σ_{i≥j} (γ_i a_ij + ω_i) g_i            ω_i = (level_i - gain_i num_i) / n_i

and likewise, unrotated, with dden_i (dnum and dden already divided by n_i).
"""

import triton
import triton.language as tl

from linvit.kernels.tiles import (
    factor,
    feature,
    feature_slope,
    gain_and_level,
    gain_and_level_backward,
    head_of,
    inside_tile,
    load_tile,
    load_visible,
    rotate,
    span,
    store_tile,
    tile_mean,
)


@triton.jit
def load_mapped(
    x,
    cos,
    sin,
    inside,
    begin,
    start,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAP: tl.constexpr,
):
    """x, κ(x) and Rκ(x) of a chunk."""
    raw = load_tile(x, start, inside, ROWS, COLUMNS)
    mapped = feature(raw, inside, MAP)
    return raw, mapped, rotate(mapped, cos, sin, begin, start, length, False, ROWS, COLUMNS, WIDTH)


@triton.jit
def load_values(
    v,
    origin,
    visible,
    start,
    length,
    ROWS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    DOT: tl.constexpr,
):
    inside = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH) & visible[:, None]
    return tl.where(inside, load_tile(v, start, inside, ROWS, VALUE_COLUMNS) - origin[None, :], 0.0).to(DOT)


@triton.jit
def products(rows, columns, seen, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Dot product of each row with each column that it sees; zero elsewhere."""
    return tl.where(
        seen,
        tl.dot(factor(rows, DOT, PRECISION), tl.trans(factor(columns, DOT, PRECISION)), input_precision=PRECISION),
        0.0,
    )


@triton.jit
def row_sums(qp, rq, kp, rk, z, r, cos, seen, divisor, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Scores inside a chunk, and num and den over all that each query sees."""
    scores = products(rq, rk, seen, DOT, PRECISION)
    num = (tl.sum(scores, 1) + tl.sum(rq * r[None, :], 1)) / divisor
    if cos is None:
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
    cos,
    sin,
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
):
    """The output of one head: each query reads its own token and those before it."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    q, k = head_of(query, batch, head, begin), head_of(key, batch, head, begin)
    v, o = head_of(value, batch, head, begin), head_of(out, batch, head, begin)
    origin = tile_mean(v, mask, batch, head, begin, 0, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, PRECISION)
    S = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    z, r = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    u, n = tl.zeros((VALUE_COLUMNS,), tl.float32), tl.zeros((1,), tl.float32)
    seen = tl.arange(0, ROWS)[:, None] >= tl.arange(0, ROWS)[None, :]
    for start in range(0, length, ROWS):
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH)
        _, qp, rq = load_mapped(q, cos, sin, inside, begin, start, length, ROWS, COLUMNS, WIDTH, QUERY_MAP)
        shown = inside & visible[:, None]
        _, kp, rk = load_mapped(k, cos, sin, shown, begin, start, length, ROWS, COLUMNS, WIDTH, KEY_MAP)
        x = load_values(v, origin, visible, start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, DOT)
        mass = visible.to(tl.float32)
        count = n + tl.sum(tl.where(seen, mass[None, :], 0.0), 1)
        divisor = tl.maximum(count, 1.0)
        scores, num, den = row_sums(qp, rq, kp, rk, z, r, cos, seen, divisor, DOT, PRECISION)
        mean = (tl.dot(seen.to(DOT), x, input_precision=PRECISION) + u[None, :]) / divisor[:, None]
        # In bfloat16 the rounding of the scores would be the largest error of all.
        read = tl.dot(factor(scores, tl.float32, PRECISION), x.to(tl.float32), input_precision=PRECISION)
        read += tl.dot(factor(rq, DOT, PRECISION), factor(S, DOT, PRECISION), input_precision=PRECISION)
        gain, level = gain_and_level(num, den, count, scale, eps, NORMALIZER)
        result = gain[:, None] * (read / divisor[:, None] - num[:, None] * mean)
        result += level[:, None] * (mean + origin[None, :])
        inside = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH)
        store_tile(o, start, inside, result, ROWS, VALUE_COLUMNS)
        S += tl.dot(tl.trans(factor(rk, DOT, PRECISION)), x, input_precision=PRECISION)
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
    cos,
    sin,
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
):
    """Gradient of the queries, and γ, ω, dnum and dden of each token for the keys' and values'."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    q, k = head_of(query, batch, head, begin), head_of(key, batch, head, begin)
    v, g = head_of(value, batch, head, begin), head_of(grad, batch, head, begin)
    dq = head_of(query_grad, batch, head, begin)
    row = rows + (batch * HEADS + head) * 4 * tokens + begin
    origin = tile_mean(v, mask, batch, head, begin, 0, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, PRECISION)
    S = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    z, r = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    u, n = tl.zeros((VALUE_COLUMNS,), tl.float32), tl.zeros((1,), tl.float32)
    seen = tl.arange(0, ROWS)[:, None] >= tl.arange(0, ROWS)[None, :]
    for start in range(0, length, ROWS):
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH)
        raw, qp, rq = load_mapped(q, cos, sin, inside, begin, start, length, ROWS, COLUMNS, WIDTH, QUERY_MAP)
        shown = inside & visible[:, None]
        _, kp, rk = load_mapped(k, cos, sin, shown, begin, start, length, ROWS, COLUMNS, WIDTH, KEY_MAP)
        x = load_values(v, origin, visible, start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, DOT)
        given = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH)
        dout = load_tile(g, start, given, ROWS, VALUE_COLUMNS).to(DOT)
        mass = visible.to(tl.float32)
        count = n + tl.sum(tl.where(seen, mass[None, :], 0.0), 1)
        divisor = tl.maximum(count, 1.0)
        scores, num, den = row_sums(qp, rq, kp, rk, z, r, cos, seen, divisor, DOT, PRECISION)
        exists = start + tl.arange(0, ROWS) < length
        den = tl.where(exists, den, 1.0)
        gain, level = gain_and_level(num, den, count, scale, eps, NORMALIZER)
        along = products(dout, x, seen, DOT, PRECISION)
        before = tl.dot(dout, tl.trans(factor(S, DOT, PRECISION)), input_precision=PRECISION)
        dmean = (tl.sum(along, 1) + tl.sum(dout.to(tl.float32) * u[None, :], 1)) / divisor
        dgain = (tl.sum(along * scores, 1) + tl.sum(rq * before, 1)) / divisor - num * dmean
        dlevel = dmean + tl.sum(dout.to(tl.float32) * origin[None, :], 1)
        dnum, dden = gain_and_level_backward(dgain, dlevel, num, den, count, scale, eps, cos, NORMALIZER)
        gamma, omega = gain / divisor, (level - gain * num) / divisor
        dnum, dden = (dnum - gain * dmean) / divisor, dden / divisor
        if cos is None:
            dnum, dden = dnum + dden, tl.zeros_like(dden)
        pull = tl.where(seen, gamma[:, None] * along + dnum[:, None], 0.0)
        drq = tl.dot(factor(pull, DOT, PRECISION), factor(rk, DOT, PRECISION), input_precision=PRECISION)
        drq += gamma[:, None] * before + dnum[:, None] * r[None, :]
        dqp = rotate(drq, cos, sin, begin, start, length, True, ROWS, COLUMNS, WIDTH)
        if cos is not None:
            sums = tl.dot(seen.to(DOT), factor(kp, DOT, PRECISION), input_precision=PRECISION) + z[None, :]
            dqp += dden[:, None] * sums
        store_tile(dq, start, inside, dqp * feature_slope(raw, QUERY_MAP), ROWS, COLUMNS)
        place = row + start + tl.arange(0, ROWS)
        tl.store(place, gamma, mask=exists)
        tl.store(place + tokens, omega, mask=exists)
        tl.store(place + 2 * tokens, dnum, mask=exists)
        tl.store(place + 3 * tokens, dden, mask=exists)
        S += tl.dot(tl.trans(factor(rk, DOT, PRECISION)), x, input_precision=PRECISION)
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
    cos,
    sin,
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
):
    """Gradients of keys and values, from the last chunk to the first."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    q, k = head_of(query, batch, head, begin), head_of(key, batch, head, begin)
    v, g = head_of(value, batch, head, begin), head_of(grad, batch, head, begin)
    dk, dv = head_of(key_grad, batch, head, begin), head_of(value_grad, batch, head, begin)
    row = rows + (batch * HEADS + head) * 4 * tokens + begin
    origin = tile_mean(v, mask, batch, head, begin, 0, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, PRECISION)
    dS = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
    dz, dr = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    du = tl.zeros((VALUE_COLUMNS,), tl.float32)
    seen = tl.arange(0, ROWS)[:, None] >= tl.arange(0, ROWS)[None, :]
    chunks = tl.cdiv(length, ROWS)
    for chunk in range(0, chunks):
        start = (chunks - 1 - chunk) * ROWS
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH)
        _, qp, rq = load_mapped(q, cos, sin, inside, begin, start, length, ROWS, COLUMNS, WIDTH, QUERY_MAP)
        shown = inside & visible[:, None]
        raw, _, rk = load_mapped(k, cos, sin, shown, begin, start, length, ROWS, COLUMNS, WIDTH, KEY_MAP)
        x = load_values(v, origin, visible, start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH, DOT)
        given = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH)
        dout = load_tile(g, start, given, ROWS, VALUE_COLUMNS).to(DOT)
        exists = start + tl.arange(0, ROWS) < length
        place = row + start + tl.arange(0, ROWS)
        gamma = tl.load(place, mask=exists, other=0.0)
        omega = tl.load(place + tokens, mask=exists, other=0.0)
        dnum = tl.load(place + 2 * tokens, mask=exists, other=0.0)
        dden = tl.load(place + 3 * tokens, mask=exists, other=0.0)
        scores = products(rq, rk, seen, DOT, PRECISION)
        weight = factor(tl.where(seen, gamma[:, None] * scores + omega[:, None], 0.0), DOT, PRECISION)
        dvalue = tl.dot(tl.trans(weight), dout, input_precision=PRECISION) + du[None, :]
        dvalue += tl.dot(factor(rk, DOT, PRECISION), factor(dS, DOT, PRECISION), input_precision=PRECISION)
        store_tile(dv, start, given, tl.where(visible[:, None], dvalue, 0.0), ROWS, VALUE_COLUMNS)
        along = products(dout, x, seen, DOT, PRECISION)
        pull = factor(tl.where(seen, gamma[:, None] * along + dnum[:, None], 0.0), DOT, PRECISION)
        drk = tl.dot(tl.trans(pull), factor(rq, DOT, PRECISION), input_precision=PRECISION) + dr[None, :]
        drk += tl.dot(x, tl.trans(factor(dS, DOT, PRECISION)), input_precision=PRECISION)
        dkp = rotate(drk, cos, sin, begin, start, length, True, ROWS, COLUMNS, WIDTH)
        if cos is not None:
            weighted = qp * dden[:, None]
            dkp += (
                tl.dot(tl.trans(seen.to(DOT)), factor(weighted, DOT, PRECISION), input_precision=PRECISION)
                + dz[None, :]
            )
            dz += tl.sum(weighted, 0)
        dkp = tl.where(visible[:, None], dkp * feature_slope(raw, KEY_MAP), 0.0)
        store_tile(dk, start, inside, dkp, ROWS, COLUMNS)
        dS += tl.dot(tl.trans(factor(rq * gamma[:, None], DOT, PRECISION)), dout, input_precision=PRECISION)
        dr += tl.sum(rq * dnum[:, None], 0)
        du += tl.sum(dout.to(tl.float32) * omega[:, None], 0)
