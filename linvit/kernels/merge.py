"""Merging of states, in a fixed order: `merge` those of a head's splits, `merge_blocks` those of causal blocks."""

import triton
import triton.language as tl

from linvit.kernels.state import load_mass, load_state, store_state


@triton.jit
def with_next(
    state,
    row,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    """A state, S, z, u, r, n and shift, merged with that in a row; states that are not centred have u = 0."""
    S, z, u, r, n, shift = state
    S_2, z_2, u_2, r_2 = load_state(row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    n_2, shift_2 = load_mass(row, WIDTH, VALUE_WIDTH)
    top = tl.maximum(shift, shift_2)
    n, n_2 = n * tl.exp2(shift - top), n_2 * tl.exp2(shift_2 - top)
    total = n + n_2
    # Not one share and what is left of 1: the rounding of it would weigh what has almost no share, but may be large.
    share = n / tl.where(total == 0, 1.0, total)
    share_2 = n_2 / tl.where(total == 0, 1.0, total)
    spread = (share * share_2) * (r_2 - r)[:, None] * (u_2 - u)[None, :]
    S = share * S + share_2 * S_2 + spread
    return S, share * z + share_2 * z_2, share * u + share_2 * u_2, share * r + share_2 * r_2, total, top


@triton.jit
def merged_state(
    row,
    splits,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    """The states of all splits of a head, merged in order."""
    S, z, u, r = load_state(row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    n, shift = load_mass(row, WIDTH, VALUE_WIDTH)
    for _ in range(1, splits):
        row += SIZE
        S, z, u, r, n, shift = with_next((S, z, u, r, n, shift), row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    return S, z, u, r, n, shift


@triton.jit
def merge_blocks(
    states,
    blocks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    """Merges into the state of each block those of the blocks before it: states (batch, blocks, heads, size)."""
    batch, head = tl.program_id(0).to(tl.int64) // HEADS, tl.program_id(0) % HEADS
    row = states + (batch * blocks * HEADS + head) * SIZE
    S, z, u, r = load_state(row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
    n, shift = load_mass(row, WIDTH, VALUE_WIDTH)
    for _ in range(1, blocks):
        row += HEADS * SIZE
        S, z, u, r, n, shift = with_next((S, z, u, r, n, shift), row, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
        store_state(row, S, z, u, r, n, shift, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)


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
    """A head's state, merged from those of its splits."""
    head = tl.program_id(0).to(tl.int64)
    row = states + head * splits * SIZE
    S, z, u, r, n, shift = merged_state(row, splits, WIDTH, VALUE_WIDTH, SIZE, COLUMNS, VALUE_COLUMNS)
    store_state(merged + head * SIZE, S, z, u, r, n, shift, WIDTH, VALUE_WIDTH, COLUMNS, VALUE_COLUMNS)
