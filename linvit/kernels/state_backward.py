"""Bidirectional attention backward: everything is recomputed from q, k, v and the heads' states.

`read_backward` goes over the queries, `summarize_backward` over the keys. With c the covariance that a query reads and
g its output's gradient,

    dS = Σ gain · Rκ(q) ⊗ g     dr = Σ dnum · Rκ(q)     dz = Σ dden · κ(q)     du = Σ level · g
    dRκ(k_j) = α_j (dS (v_j - u) + dr)        dκ(k_j) = Rᵀ dRκ(k_j) + α_j dz
    dv_j = α_j (dSᵀ (Rκ(k_j) - r) + du)

and for the exponents of the weights a closed form, which needs no further pass because Σ_j α_j dα_j is known:

    dexponent_j = α_j ((Rκ(k_j) - r) · (dS (v_j - u) + dr) + (v_j - u) · du + (κ(k_j) - z) · dz - <S, dS>)

A gradient of a state has the memory layout of a state; its n and shift are unused.
"""

import triton
import triton.language as tl

from linvit.kernels.state import load_mass, load_query_mean, load_state, load_vector, store_state, store_vector
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
)


@triton.jit
def read_backward(
    query,
    grad,
    query_grad,
    cos,
    sin,
    mask,
    sums,
    mean_grads,
    states,
    state_grads,
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
    """Gradient of a split's queries (unless query_grad is None) and of the state (unless state_grads is None).

    `mean_grads` (heads, width) is the gradient of the queries' mean; it reaches the visible queries.
    """
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    q, g = head_of(query, batch, head, begin), head_of(grad, batch, head, begin)
    state = states + tl.program_id(0).to(tl.int64) * SIZE
    S, z, u, r = load_state(state, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    mass, _ = load_mass(state, WIDTH, VALUE_WIDTH)
    S = factor(S, DOT, PRECISION)
    if state_grads is not None:
        dS = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32)
        dz, dr = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
        du = tl.zeros((VALUE_COLUMNS,), tl.float32)
    if mean_grads is not None:
        _, count = load_query_mean(sums, COLUMNS, WIDTH)
        dmean = load_vector(mean_grads + tl.program_id(0) * WIDTH, COLUMNS, WIDTH) / count
    for start in range(split * ROWS, length, splits * ROWS):
        inside = inside_tile(start, length, ROWS, COLUMNS, WIDTH)
        x = load_tile(q, start, inside, ROWS, COLUMNS)
        qp = feature(x, inside, MAP)
        rq = rotate(qp, cos, sin, begin, start, length, False, ROWS, COLUMNS, WIDTH)
        dout = load_tile(
            g, start, inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH), ROWS, VALUE_COLUMNS
        ).to(DOT)
        exists = start + tl.arange(0, ROWS) < length
        num, den = tl.sum(rq * r[None, :], 1), tl.where(exists, tl.sum(qp * z[None, :], 1), 1.0)
        gain, level = gain_and_level(num, den, mass, scale, eps, NORMALIZER)
        # g · c = Rκ(q) · S g: one product serves the gain's gradient and the query's.
        turned = tl.dot(dout, tl.trans(S), input_precision=PRECISION)
        dgain, dlevel = tl.sum(rq * turned, 1), tl.sum(dout.to(tl.float32) * u[None, :], 1)
        dnum, dden = gain_and_level_backward(dgain, dlevel, num, den, mass, scale, eps, cos, NORMALIZER)
        if state_grads is not None:
            dS += tl.dot(tl.trans(factor(rq * gain[:, None], DOT, PRECISION)), dout, input_precision=PRECISION)
            dr += tl.sum(rq * dnum[:, None], 0)
            dz += tl.sum(qp * dden[:, None], 0)
            du += tl.sum(dout.to(tl.float32) * level[:, None], 0)
        if query_grad is not None:
            drq = gain[:, None] * turned + dnum[:, None] * r[None, :]
            dqp = rotate(drq, cos, sin, begin, start, length, True, ROWS, COLUMNS, WIDTH) + dden[:, None] * z[None, :]
            if mean_grads is not None:
                visible = load_visible(mask, batch, head, begin, start, length, ROWS)
                dqp += tl.where(visible[:, None], dmean[None, :], 0.0)
            dq = head_of(query_grad, batch, head, begin)
            store_tile(dq, start, inside, dqp * feature_slope(x, MAP), ROWS, COLUMNS)
    if state_grads is not None:
        row = state_grads + (tl.program_id(0) * splits + split).to(tl.int64) * SIZE
        store_state(row, dS, dz, du, dr, 0.0, 0.0, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)


@triton.jit
def summarize_backward(
    key,
    value,
    key_grad,
    value_grad,
    cos,
    sin,
    mask,
    sums,
    mean_grads,
    states,
    state_grads,
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
    """Gradients of a split's keys and values, and its part of the query mean's: mean_grads (heads, splits, width)."""
    batch, head, begin, length = span(cu_seqlens, tokens, HEADS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    k, v = head_of(key, batch, head, begin), head_of(value, batch, head, begin)
    dk, dv = head_of(key_grad, batch, head, begin), head_of(value_grad, batch, head, begin)
    offset = tl.program_id(0).to(tl.int64) * SIZE
    S, z, u, r = load_state(states + offset, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    n, shift = load_mass(states + offset, WIDTH, VALUE_WIDTH)
    dS, dz, du, dr = load_state(state_grads + offset, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    if sums is not None:
        overlap = tl.sum(tl.sum(S * dS, 1), 0)
        mean, _ = load_query_mean(sums, COLUMNS, WIDTH)
        dmean = tl.zeros((COLUMNS,), tl.float32)
    divisor = tl.where(n == 0, 1.0, n)
    dS = factor(dS, DOT, PRECISION)
    for start in range(split * ROWS, length, splits * ROWS):
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        seen = inside_tile(start, length, ROWS, COLUMNS, WIDTH) & visible[:, None]
        x = load_tile(k, start, seen, ROWS, COLUMNS)
        kp = feature(x, seen, MAP)
        rk = rotate(kp, cos, sin, begin, start, length, False, ROWS, COLUMNS, WIDTH) - r[None, :]
        inside = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH)
        centred = load_tile(v, start, inside & visible[:, None], ROWS, VALUE_COLUMNS) - u[None, :]
        if sums is None:
            alpha = tl.where(visible, 1 / divisor, 0.0)
        else:
            exponent = tl.sum(kp * mean[None, :], 1) * scale - shift
            alpha = tl.where(visible, tl.exp(tl.where(visible, exponent, 0.0)) / divisor, 0.0)
        turned = tl.dot(factor(centred, DOT, PRECISION), tl.trans(dS), input_precision=PRECISION) + dr[None, :]
        dvalue = tl.dot(factor(rk, DOT, PRECISION), dS, input_precision=PRECISION) + du[None, :]
        store_tile(dv, start, inside, dvalue * alpha[:, None], ROWS, VALUE_COLUMNS)
        dkp = rotate(turned, cos, sin, begin, start, length, True, ROWS, COLUMNS, WIDTH) + dz[None, :]
        dkp = dkp * alpha[:, None]
        if sums is not None:
            dalpha = tl.sum(rk * turned, 1) + tl.sum(centred * du[None, :], 1) - overlap
            dalpha += tl.sum((kp - z[None, :]) * dz[None, :], 1)
            dexponent = dalpha * alpha * scale
            dkp += dexponent[:, None] * mean[None, :]
            dmean += tl.sum(dexponent[:, None] * kp, 0)
        store_tile(
            dk, start, inside_tile(start, length, ROWS, COLUMNS, WIDTH), dkp * feature_slope(x, MAP), ROWS, COLUMNS
        )
    if sums is not None:
        store_vector(mean_grads + (tl.program_id(0) * splits + split) * WIDTH, dmean, COLUMNS, WIDTH)
