"""Short sequences in one launch: a program, or several that wait for each other, computes a whole head."""

import triton
import triton.language as tl

from linvit.kernels.device_code import LOG2E
from linvit.kernels.merge import merged_state
from linvit.kernels.read import write_outputs
from linvit.kernels.state import (
    ROOM,
    load_vector,
    store_state,
    store_vector,
    sum_of_queries,
    summary,
)
from linvit.kernels.tiles import head_of, span


@triton.jit
def wait_for_all(counter):
    """Returns when all programs of a head have come here, and what they have stored before can be loaded."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="release") + 1
    while arrived < tl.num_programs(1):
        arrived = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def attend_head(
    query,
    key,
    value,
    out,
    parameters,
    rotary,
    mask,
    weights,
    sums,
    states,
    counters,
    cu_seqlens,
    queries,
    keys,
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
    KEY_MAP: tl.constexpr,
    POSITIVE: tl.constexpr,
    NORMALIZER: tl.constexpr,
    RAW: tl.constexpr,
    FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The output of a head, or of its share of the queries if there are several programs for each head.

    sums: with query-mean weights (heads, splits, width + 1), otherwise None; states: (heads, splits, size), None if
    there is one program for each head and no gradient. These are as `query_mean` and `summarize` store them.
    counters: (heads, 3) of zeros if there are several programs for each head, and afterwards zeros again.
    """
    program, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at, keys_at = span(cu_seqlens, queries, HEADS), span(cu_seqlens, keys, HEADS)
    q, o = head_of(query, at[0], at[1], at[2]), head_of(out, at[0], at[1], at[2])
    k, v = head_of(key, at[0], at[1], at[2]), head_of(value, at[0], at[1], at[2])
    SHAPE: tl.constexpr = (ROWS, COLUMNS, WIDTH)
    VALUES: tl.constexpr = (ROWS, VALUE_COLUMNS, VALUE_WIDTH)
    mean = None
    if sums is not None:
        total, count = sum_of_queries(q, mask, (parameters[0], at[1]), at, STAGES, QUERY_MAP, FOLD, SHAPE)
        row = sums + (program * splits + split) * (WIDTH + 1)
        store_vector(row, total, COLUMNS, WIDTH)
        tl.store(row + WIDTH, count)
        if counters is not None:
            wait_for_all(counters + program * 3)
            row = sums + program * splits * (WIDTH + 1)
            total, count = load_vector(row, COLUMNS, WIDTH), tl.load(row + WIDTH)
            for _ in range(1, splits):
                row += WIDTH + 1
                total += load_vector(row, COLUMNS, WIDTH)
                count += tl.load(row + WIDTH)
        # As `load_query_mean` divides: another rounding would make the backward pass's weights others.
        mean = total / tl.maximum(count, 1.0) * (scale * LOG2E)
    shift = 0.0
    S, z, u, r, n, peak = summary(
        k, v, (parameters[1], at[1]), rotary, mask, weights, mean, shift, keys_at,
        True, STAGES, KEY_MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
    )  # fmt: skip
    if mean is not None:  # noqa: SIM102
        if tl.abs(peak) > ROOM:
            shift = peak
            S, z, u, r, n, peak = summary(
                k, v, (parameters[1], at[1]), rotary, mask, weights, mean, shift, keys_at,
                False, 1, KEY_MAP, RAW, FOLD, VALUE_FOLD, DOT, PRECISION, SHAPE, VALUES,
            )  # fmt: skip
    if states is not None:
        row = states + (program * splits + split) * SIZE
        store_state(row, S, z, u, r, n, shift, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    if counters is not None:
        wait_for_all(counters + program * 3 + 1)
        row = states + program * splits * SIZE
        S, z, u, r, n, shift = merged_state(row, splits, WIDTH, VALUE_WIDTH, SIZE, COLUMNS, VALUE_COLUMNS)
        if tl.atomic_add(counters + program * 3 + 2, 1, sem="acq_rel") == splits - 1:  # the last one
            tl.store(counters + program * 3 + tl.arange(0, 4), 0, mask=tl.arange(0, 4) < 3)
    write_outputs(
        q, o, S, z, u, r, n, ((parameters[0], at[1]), (parameters[2], at[1])), rotary, at, scale, eps,
        STAGES, QUERY_MAP, POSITIVE, NORMALIZER, RAW, DOT, PRECISION, SHAPE, VALUES,
    )  # fmt: skip
