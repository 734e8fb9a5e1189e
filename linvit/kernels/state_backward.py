"""Bidirectional attention backward: everything is recomputed from q, k, v and the heads' states.

`read_backward` goes over the queries, `summarize_backward` over the keys. With g the gradient of the output,
w_j = Rᵀ(dS (v_j - u) + dr) + dz and e = du - dSᵀ r,

    dS = Σ gain · Rκ(q) ⊗ g     dr = Σ dnum · Rκ(q)     dz = Σ dden · κ(q)     du = Σ level · g
    dκ(k_j) = α_j w_j           dv_j = α_j (dSᵀ Rκ(k_j) + e)

For weights a closed form needs no further pass, because Σ_j α_j dα_j is known:

    dα_j - Σ_i α_i dα_i = κ(k_j) · w_j + v_j · e - (<S, dS> + z · dz + r · dr + u · e)

A state that is not centred has u = r = du = dr = 0. A gradient of a state has the memory layout of a state; its n and
shift are unused.
"""

import triton
import triton.language as tl

from linvit.kernels.device_code import LOG2E, power_of_two
from linvit.kernels.state import (
    load_mass,
    load_query_mean,
    load_state,
    load_vector,
    store_state,
    store_vector,
)
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
    store_row,
    store_table_grad,
    store_tile,
    turn,
    turn_back,
    two_columns,
    visible_tokens,
)


@triton.jit
def queries_backward(
    grads, q, g, query_grad, table_grad, S, z, r, u, mass, dmean, parameters, rotary, mask, at, start, scale, eps,
    MASKED: tl.constexpr, MAP: tl.constexpr, NORMALIZER: tl.constexpr, RAW: tl.constexpr, STATE: tl.constexpr,
    FOLD: tl.constexpr, VALUE_FOLD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    """The gradients of S, z, r and u with those of one more tile of queries, whose own gradient is stored."""
    dS, dz, dr, du = grads
    exists = visible_tokens(None, at, start, MASKED, SHAPE[0])
    of_queries = parameters[0], at[1], parameters[3], start // SHAPE[0], None, at, start
    of_normalizer = parameters[2], at[1], parameters[5], start // SHAPE[0], None, at, start
    inside = inside_tile(exists, SHAPE)
    dout = load_tile(g, start, inside_tile(exists, VALUES), VALUES).to(DOT)
    x = load_tile(q, start, inside, SHAPE)
    qp = features(x, inside, MAP, of_queries, SHAPE)
    c, s = None, None
    if rotary[0] is not None:
        c, s = load_table(rotary, at[2], start, exists, SHAPE)
    rq = turn(qp, c, s, SHAPE)
    den = tl.sum(qp * z[None, :], 1)
    if exists is not None:
        den = tl.where(exists, den, 1.0)
    # g · c = Rκ(q) · S g: one product serves the gain's gradient and the query's.
    turned = product(dout, tl.trans(S), PRECISION)
    dgain = tl.sum(rq * turned, 1)
    if RAW:
        gain, level = NORMALIZER[0](den, den, mass, scale, eps, of_normalizer)
        dnum, dden = NORMALIZER[1](dgain, tl.zeros_like(den), den, den, mass, scale, eps, of_normalizer)
    else:
        dlevel = tl.sum(dout.to(tl.float32) * u[None, :], 1)
        num = den if c is None else tl.sum(rq * r[None, :], 1)
        gain, level = NORMALIZER[0](num, den, mass, scale, eps, of_normalizer)
        dnum, dden = NORMALIZER[1](dgain, dlevel, num, den, mass, scale, eps, of_normalizer)
        if c is None:  # z is r
            dnum += dden
    if STATE:
        dS += product(tl.trans(factor(rq * gain[:, None], DOT, PRECISION)), dout, PRECISION)
        if c is not None:
            dz += folded(qp * dden[:, None], FOLD, SHAPE)
        if not RAW:
            dr += folded(rq * dnum[:, None], FOLD, SHAPE)
            du += folded(dout.to(tl.float32) * level[:, None], VALUE_FOLD, VALUES)
    if query_grad is not None:
        drq = gain[:, None] * turned
        if not RAW:
            drq += dnum[:, None] * r[None, :]
        if table_grad is not None:
            store_table_grad(table_grad, qp, drq, start, exists, SHAPE)
        dqp = turn_back(drq, c, s, SHAPE)
        if c is not None:
            dqp += dden[:, None] * z[None, :]
        if dmean is not None:
            visible = visible_tokens(mask, at, start, MASKED, SHAPE[0])
            if visible is None:
                dqp += dmean[None, :]
            else:
                dqp += tl.where(visible[:, None], dmean[None, :], 0.0)
        store_tile(query_grad, start, inside, MAP[1](x.to(tl.float32), dqp, of_queries, SHAPE), SHAPE)
    return dS, dz, dr, du


@triton.jit
def read_backward(
    query,
    grad,
    query_grad,
    table_grads,
    parameters,
    rotary,
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
    QUERY_MAP: tl.constexpr,
    NORMALIZER: tl.constexpr,
    RAW: tl.constexpr,
    FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of a split's queries (unless query_grad is None) and of the state (unless state_grads is None).

    `mean_grads` (heads, width) is the gradient of the queries' mean; it reaches the visible queries.
    """
    at = span(cu_seqlens, tokens, HEADS)
    q, g = head_of(query, at[0], at[1], at[2]), head_of(grad, at[0], at[1], at[2])
    dq, table_grad = None, None
    if query_grad is not None:
        dq = head_of(query_grad, at[0], at[1], at[2])
    if table_grads is not None:
        table_grad = head_of(table_grads, at[0], at[1], at[2])
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    state = states + tl.program_id(0).to(tl.int64) * SIZE
    S, z, u, r = load_state(state, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    mass, _ = load_mass(state, WIDTH, VALUE_WIDTH)
    S = factor(S, DOT, PRECISION)
    dS, dz = tl.zeros((COLUMNS, VALUE_COLUMNS), tl.float32), tl.zeros((FOLD, COLUMNS), tl.float32)
    dr, du = tl.zeros((FOLD, COLUMNS), tl.float32), tl.zeros((VALUE_FOLD, VALUE_COLUMNS), tl.float32)
    dmean = None
    if mean_grads is not None:
        _, count = load_query_mean(sums, 1, COLUMNS, WIDTH)
        dmean = load_vector(mean_grads + tl.program_id(0) * WIDTH, COLUMNS, WIDTH) / count
    first, whole, end = share_of(at[3], ROWS)
    PLAIN: tl.constexpr = mask is None or mean_grads is None
    if PLAIN:
        for start in tl.range(first, whole, ROWS, num_stages=STAGES):
            dS, dz, dr, du = queries_backward(
                (dS, dz, dr, du), q, g, dq, table_grad, S, z, r, u, mass, dmean, parameters, rotary, mask, at, start,
                scale, eps, False, QUERY_MAP, NORMALIZER, RAW, state_grads is not None, FOLD, VALUE_FOLD,
                DOT, PRECISION, SHAPE, VALUES,
            )  # fmt: skip
        first = whole
    for start in tl.range(first, end, ROWS, num_stages=1 if PLAIN else STAGES):
        dS, dz, dr, du = queries_backward(
            (dS, dz, dr, du), q, g, dq, table_grad, S, z, r, u, mass, dmean, parameters, rotary, mask, at, start,
            scale, eps, True, QUERY_MAP, NORMALIZER, RAW, state_grads is not None, FOLD, VALUE_FOLD,
            DOT, PRECISION, SHAPE, VALUES,
        )  # fmt: skip
    if state_grads is not None:
        row = state_grads + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * SIZE
        dz, dr, du = tl.sum(dz, 0), tl.sum(dr, 0), tl.sum(du, 0)
        store_state(row, dS, dz, du, dr, 0.0, 0.0, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)


@triton.jit
def keys_backward(
    dmean, k, v, dk, dv, table_grad, dS, u, r, dz, du, c_0, e, mean, shift, share, overlap, parameters, rotary,
    mask, weights, weight_grads, at, start,
    MASKED: tl.constexpr, MAP: tl.constexpr, RAW: tl.constexpr, FOLD: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    """Stores the gradients of a tile of keys and values; that of the mean of κ(q) with one more tile's."""
    exists = visible_tokens(None, at, start, MASKED, SHAPE[0])
    visible = visible_tokens(mask, at, start, MASKED, SHAPE[0])
    given = parameters[1], at[1], parameters[4], start // SHAPE[0], mask, at, start
    inside = inside_tile(visible, SHAPE)
    x = load_tile(v, start, inside_tile(visible, VALUES), VALUES)
    y = load_tile(k, start, inside, SHAPE)
    kp = features(y, inside, MAP, given, SHAPE)
    c, s = None, None
    if rotary[0] is not None:
        c, s = load_table(rotary, at[2], start, visible, SHAPE)
    rk = turn(kp, c, s, SHAPE)
    if PRECISION == "bf16":
        x, centred = x.to(DOT), rk
    else:
        x, centred = x.to(tl.float32) - u[None, :], rk - r[None, :]
    turned = product(factor(x, DOT, PRECISION), tl.trans(dS), PRECISION)
    dvalue = product(factor(centred, DOT, PRECISION), dS, PRECISION)
    if not RAW:
        turned += c_0[None, :]
        dvalue += (e if PRECISION == "bf16" else du)[None, :]
    dkp = turn_back(turned, c, s, SHAPE) + dz[None, :]
    if mean is not None or weights is not None:
        if mean is not None:
            exponent = tl.sum(kp * mean[None, :], 1) - shift
            if visible is not None:
                exponent = tl.where(visible, exponent, 0.0)
            alpha = power_of_two(exponent) * share
        else:
            alpha = load_row(weights, at, start, visible, SHAPE[0]) * share
        if visible is not None:
            alpha = tl.where(visible, alpha, 0.0)
        dalpha = tl.sum(kp * dkp, 1) - overlap
        if not RAW:
            if PRECISION == "bf16":
                dalpha += tl.sum(tl.dot(x, two_columns(e, DOT, PRECISION)), 1)
            else:
                dalpha += tl.sum(x * e[None, :], 1)
        dvalue *= alpha[:, None]
        dkp *= alpha[:, None]
        if mean is not None:
            dexponent = dalpha * alpha * 0.6931471805599453
            dkp += dexponent[:, None] * mean[None, :]
            dmean += folded(kp * dexponent[:, None], FOLD, SHAPE)
        elif weight_grads is not None:
            if visible is not None:
                dalpha = tl.where(visible, dalpha, 0.0)
            store_row(weight_grads, at, start, exists, dalpha * share, SHAPE[0])
    elif visible is not None:  # share is in dS already
        dvalue, dkp = tl.where(visible[:, None], dvalue, 0.0), tl.where(visible[:, None], dkp, 0.0)
    if table_grad is not None:
        if mean is not None or weights is not None:
            turned *= alpha[:, None]
        store_table_grad(table_grad, kp, turned, start, exists, SHAPE)
    store_tile(dv, start, inside_tile(exists, VALUES), dvalue, VALUES)
    store_tile(dk, start, inside_tile(exists, SHAPE), MAP[1](y.to(tl.float32), dkp, given, SHAPE), SHAPE)
    return dmean


@triton.jit
def summarize_backward(
    key,
    value,
    key_grad,
    value_grad,
    table_grads,
    parameters,
    rotary,
    mask,
    weights,
    weight_grads,
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
    KEY_MAP: tl.constexpr,
    RAW: tl.constexpr,
    FOLD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of a split's keys and values, and its part of the query mean's: mean_grads (heads, splits, width)."""
    at = span(cu_seqlens, tokens, HEADS)
    k, v = head_of(key, at[0], at[1], at[2]), head_of(value, at[0], at[1], at[2])
    dk, dv = head_of(key_grad, at[0], at[1], at[2]), head_of(value_grad, at[0], at[1], at[2])
    table_grad = None
    if table_grads is not None:
        table_grad = head_of(table_grads, at[0], at[1], at[2])
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    offset = tl.program_id(0).to(tl.int64) * SIZE
    S, z, u, r = load_state(states + offset, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    n, shift = load_mass(states + offset, WIDTH, VALUE_WIDTH)
    dS, dz, du, dr = load_state(state_grads + offset, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    mean, overlap = None, 0.0
    if sums is not None:
        mean = load_query_mean(sums, 1, COLUMNS, WIDTH)[0] * (scale * LOG2E)
    if sums is not None or weights is not None:
        overlap = tl.sum(tl.sum(S * dS, 1), 0) + tl.sum(z * dz, 0)
    share = 1 / tl.where(n == 0, 1.0, n)
    if sums is None and weights is None:
        dS, dz, dr, du = dS * share, dz * share, dr * share, du * share
    dS = factor(dS, DOT, PRECISION)
    c, e = dr, du
    if not RAW:
        e = du - tl.sum(dS.to(tl.float32) * r[:, None], 0)
        overlap += tl.sum(r * dr, 0)
        if PRECISION == "bf16":
            c = dr - tl.sum(dS.to(tl.float32) * u[None, :], 1)
            overlap += tl.sum(u * e, 0)
    dmean = tl.zeros((FOLD, COLUMNS), tl.float32)
    first, whole, end = share_of(at[3], ROWS)
    if mask is None:
        for start in tl.range(first, whole, ROWS, num_stages=STAGES):
            dmean = keys_backward(
                dmean, k, v, dk, dv, table_grad, dS, u, r, dz, du, c, e, mean, shift, share, overlap, parameters,
                rotary, mask, weights, weight_grads, at, start,
                False, KEY_MAP, RAW, FOLD, DOT, PRECISION, SHAPE, VALUES,
            )  # fmt: skip
        first = whole
    for start in tl.range(first, end, ROWS, num_stages=1 if mask is None else STAGES):
        dmean = keys_backward(
            dmean, k, v, dk, dv, table_grad, dS, u, r, dz, du, c, e, mean, shift, share, overlap, parameters, rotary,
            mask, weights, weight_grads, at, start, True, KEY_MAP, RAW, FOLD, DOT, PRECISION, SHAPE, VALUES,
        )  # fmt: skip
    if sums is not None:
        row = mean_grads + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * WIDTH
        store_vector(row, tl.sum(dmean, 0) * (scale * LOG2E), COLUMNS, WIDTH)
