"""Bidirectional attention forward: `read`, which gives the outputs of queries from their head's state."""

import triton
import triton.language as tl

from linvit.kernels.state import load_mass, load_state
from linvit.kernels.tiles import (
    factor,
    features,
    head_of,
    inside_tile,
    load_table,
    load_tile,
    product,
    share_of,
    span,
    store_tile,
    turn,
    two_columns,
    visible_tokens,
)


@triton.jit
def write_tile(
    q, o, S, z, r, u, mass, given, rotary, at, start, scale, eps,
    MASKED: tl.constexpr, MAP: tl.constexpr, POSITIVE: tl.constexpr, NORMALIZER: tl.constexpr, RAW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    """The output of a tile of queries; z and r are factors of two columns where their products are exact enough.

    given: parameters of the feature map, and of the normalizer.
    """
    visible = visible_tokens(None, at, start, MASKED, SHAPE[0])
    inside = inside_tile(visible, SHAPE)
    qp = features(load_tile(q, start, inside, SHAPE), inside, MAP, given[0], SHAPE)
    c, s = None, None
    if rotary[0] is not None:
        c, s = load_table(rotary, at[2], start, visible, SHAPE)
    turned = turn(qp, c, s, SHAPE)
    rq = factor(turned, DOT, PRECISION)
    if PRECISION == "bf16" and POSITIVE:
        den = tl.sum(tl.dot(factor(qp, DOT, PRECISION), z), 1)
    else:
        den = tl.sum(qp * z[None, :], 1)
    covariance = product(rq, S, PRECISION)
    if RAW:
        gain, _ = NORMALIZER[0](den, den, mass, scale, eps, given[1])
        result = gain[:, None] * covariance
    else:
        if c is None:
            num = den
        elif PRECISION == "bf16":
            num = tl.sum(tl.dot(rq, r), 1)
        else:
            num = tl.sum(turned * r[None, :], 1)
        gain, level = NORMALIZER[0](num, den, mass, scale, eps, given[1])
        result = gain[:, None] * covariance + level[:, None] * u[None, :]
    store_tile(o, start, inside_tile(visible, VALUES), result, VALUES)


@triton.jit
def write_outputs(
    q, o, S, z, u, r, mass, given, rotary, at, scale, eps,
    STAGES: tl.constexpr, MAP: tl.constexpr, POSITIVE: tl.constexpr, NORMALIZER: tl.constexpr, RAW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SHAPE, VALUES,
):  # fmt: skip
    S = factor(S, DOT, PRECISION)
    if PRECISION == "bf16":
        r = two_columns(r, DOT, PRECISION)
        if POSITIVE:
            z = two_columns(z, DOT, PRECISION)
    first, whole, end = share_of(at[3], SHAPE[0])
    for start in tl.range(first, whole, SHAPE[0], num_stages=STAGES):
        write_tile(
            q, o, S, z, r, u, mass, given, rotary, at, start, scale, eps,
            False, MAP, POSITIVE, NORMALIZER, RAW, DOT, PRECISION, SHAPE, VALUES,
        )  # fmt: skip
    for start in tl.range(whole, end, SHAPE[0], num_stages=1):
        write_tile(
            q, o, S, z, r, u, mass, given, rotary, at, start, scale, eps,
            True, MAP, POSITIVE, NORMALIZER, RAW, DOT, PRECISION, SHAPE, VALUES,
        )  # fmt: skip


@triton.jit
def read(
    query,
    out,
    parameters,
    rotary,
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
    QUERY_MAP: tl.constexpr,
    POSITIVE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    RAW: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The output of the queries of a split, read from their head's state."""
    at = span(cu_seqlens, tokens, HEADS)
    q, o = head_of(query, at[0], at[1], at[2]), head_of(out, at[0], at[1], at[2])
    state = states + tl.program_id(0).to(tl.int64) * SIZE
    S, z, u, r = load_state(state, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    mass, _ = load_mass(state, WIDTH, VALUE_WIDTH)
    given = (parameters[0], at[1]), (parameters[2], at[1])
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    write_outputs(
        q, o, S, z, u, r, mass, given, rotary, at, scale, eps,
        STAGES, QUERY_MAP, POSITIVE, NORMALIZER, RAW, DOT, PRECISION, SHAPE, VALUES,
    )  # fmt: skip
