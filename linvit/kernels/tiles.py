"""Shared by all kernels: which tokens a program reads, tiles of them, and their features.

A tensor comes in as the tuple (pointer, batch stride, head stride, token stride, channel stride); `head_of` leaves
(pointer to the first token, token stride, channel stride). A tile has ROWS tokens × COLUMNS channels, of which WIDTH
exist: SHAPE = (ROWS, COLUMNS, WIDTH). Tokens are `visible` if they exist and count; None means that all of a tile do,
so that the inner loops of the kernels contain no masks.
"""

import triton
import triton.language as tl

from linvit.kernels.device_code import INTERPRETED


@triton.jit
def span(cu_seqlens, tokens, HEADS: tl.constexpr):
    """Batch entry, head, first token and number of tokens of a program, which has a sequence or a block of one.

    tokens: those of a sequence, and those of a block, as many if there are none. A packed sequence is a batch entry.
    """
    index = tl.program_id(0) // HEADS
    head = tl.cast(tl.program_id(0) % HEADS, tl.int64)
    if cu_seqlens is None:
        blocks = tl.cdiv(tokens[0], tokens[1])
        batch = tl.cast(index // blocks, tl.int64)
        first = index % blocks * tokens[1]
        length = tl.minimum(tokens[1], tokens[0] - first)
        begin = tl.cast(first, tl.int64)
    else:
        begin = tl.cast(tl.load(cu_seqlens + index), tl.int64)
        length = tl.cast(tl.load(cu_seqlens + index + 1) - begin, tl.int32)
        batch = begin * 0
    return batch, head, begin, length


@triton.jit
def share_of(length, ROWS: tl.constexpr):
    """The tokens of this split: the first, the end of its whole tiles, and the end."""
    tiles = tl.cdiv(tl.cdiv(length, ROWS), tl.num_programs(1))
    first = tl.program_id(1) * tiles * ROWS
    end = tl.minimum(first + tiles * ROWS, length)
    return first, first + tl.maximum(end - first, 0) // ROWS * ROWS, end


@triton.jit
def head_of(x, batch, head, begin):
    return x[0] + batch * x[1] + head * x[2] + begin * x[3], x[3], x[4]


@triton.jit
def visible_tokens(mask, at, start, MASKED: tl.constexpr, ROWS: tl.constexpr):
    """True where a token exists and counts, None if all of a tile do.

    mask: (pointer, batch, head and token stride) or None. at: what `span` returns.
    """
    batch, head, begin, length = at
    if not MASKED:
        visible = None
    else:
        row = start + tl.arange(0, ROWS)
        visible = row < length
        if mask is not None:
            first = mask[0] + batch * mask[1] + head * mask[2] + (begin + start) * mask[3]
            visible = visible & (tl.load(first + tl.arange(0, ROWS) * mask[3], mask=visible, other=0) != 0)
    return visible


@triton.jit
def inside_tile(visible, SHAPE):
    """Which entries of a tile exist and count; None if all do."""
    if visible is None and SHAPE[1] == SHAPE[2]:
        inside = None
    elif visible is None:
        inside = tl.broadcast_to((tl.arange(0, SHAPE[1]) < SHAPE[2])[None, :], (SHAPE[0], SHAPE[1]))
    elif SHAPE[1] == SHAPE[2]:
        inside = tl.broadcast_to(visible[:, None], (SHAPE[0], SHAPE[1]))
    else:
        inside = visible[:, None] & (tl.arange(0, SHAPE[1]) < SHAPE[2])[None, :]
    return inside


@triton.jit
def tile_pointers(x, start, SHAPE):
    return x[0] + ((start + tl.arange(0, SHAPE[0]))[:, None] * x[1] + tl.arange(0, SHAPE[1])[None, :] * x[2])


@triton.jit
def load_tile(x, start, inside, SHAPE):
    """A tile in the tensor's dtype, zero outside."""
    if inside is None:
        tile = tl.load(tile_pointers(x, start, SHAPE))
    else:
        tile = tl.load(tile_pointers(x, start, SHAPE), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(x, start, inside, tile, SHAPE):
    if inside is None:
        tl.store(tile_pointers(x, start, SHAPE), as_dtype(tile, x[0].dtype.element_ty))
    else:
        tl.store(tile_pointers(x, start, SHAPE), as_dtype(tile, x[0].dtype.element_ty), mask=inside)


@triton.jit
def load_row(x, at, start, visible, ROWS: tl.constexpr):
    """One number for each token of a tile, float32; x is (pointer, batch, head and token stride)."""
    batch, head, begin, _ = at
    pointers = x[0] + batch * x[1] + head * x[2] + (begin + start) * x[3] + tl.arange(0, ROWS) * x[3]
    row = tl.load(pointers) if visible is None else tl.load(pointers, mask=visible, other=0.0)
    return row.to(tl.float32)


@triton.jit
def store_row(x, at, start, exists, row, ROWS: tl.constexpr):
    batch, head, begin, _ = at
    pointers = x[0] + batch * x[1] + head * x[2] + (begin + start) * x[3] + tl.arange(0, ROWS) * x[3]
    if exists is None:
        tl.store(pointers, row)
    else:
        tl.store(pointers, row, mask=exists)


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr):
    """x in another dtype, to the nearest: the interpreter cuts off what bfloat16 has no bits for."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def factor(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x as a factor of a product, rounded to the nearest: tensor cores cut off what TF32 has no bits for.

    In the interpreter, which multiplies float32 alone, bfloat16 is a float32 with the same rounding.
    """
    if PRECISION == "bf16":
        x = as_dtype(x, tl.bfloat16)
    y = x.to(DOT)
    if PRECISION == "tf32" and tl.float32 == DOT:
        y = ((y.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return y


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b of two factors, in float32."""
    return tl.dot(a, b, input_precision="ieee" if PRECISION == "bf16" else PRECISION)


@triton.jit
def features(x, inside, MAP: tl.constexpr, given, SHAPE):
    """κ(x), zero outside, in float32. MAP: its device code and that of its gradient. given: its parameters."""
    y = MAP[0](x.to(tl.float32), given, SHAPE)
    if inside is not None:
        y = tl.where(inside, y, 0.0)
    return y


@triton.jit
def pack_table(cos, sin, pairs, count, NUMBERS: tl.constexpr):
    """Pairs of cosine and sine, float16 in int32, as `load_table` reads them."""
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    exists = at < count
    c = tl.load(cos + at, mask=exists, other=0.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    s = tl.load(sin + at, mask=exists, other=0.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(pairs + at, (c & 0xFFFF) | (s << 16), mask=exists)


@triton.jit
def load_table(rotary, begin, start, visible, SHAPE):
    """Cosines and sines of a tile's angles, float32. Only with a rotation: Triton 3.6 returns no tuples of None.

    rotary: pointers to cosines and sines (float32), or to pairs of them (float16 in int32) and None.
    """
    table, sin = rotary
    PAIRS: tl.constexpr = (SHAPE[0], SHAPE[1] // 2, SHAPE[2] // 2)
    inside = inside_tile(visible, PAIRS)
    c = load_tile((table + begin * PAIRS[2], PAIRS[2], 1), start, inside, PAIRS)
    if sin is None:
        pairs = c
        c = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        s = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        s = load_tile((sin + begin * PAIRS[2], PAIRS[2], 1), start, inside, PAIRS)
    return c, s


@triton.jit
def turn(x, c, s, SHAPE):
    """Rotates adjacent channels; x itself without a table."""
    if c is None:
        y = x
    else:
        even, odd = tl.split(tl.reshape(x, (SHAPE[0], SHAPE[1] // 2, 2)))
        y = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (SHAPE[0], SHAPE[1]))
    return y


@triton.jit
def turn_back(x, c, s, SHAPE):
    if c is None:
        y = x
    else:
        even, odd = tl.split(tl.reshape(x, (SHAPE[0], SHAPE[1] // 2, 2)))
        y = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (SHAPE[0], SHAPE[1]))
    return y


@triton.jit
def store_table_grad(grads, x, grad, start, exists, SHAPE):
    """Gradients of cosines and sines, side by side, from x and the gradient of what it was turned into."""
    PAIRS: tl.constexpr = (SHAPE[0], SHAPE[1] // 2, SHAPE[2] // 2)
    even, odd = tl.split(tl.reshape(x, (SHAPE[0], SHAPE[1] // 2, 2)))
    even_grad, odd_grad = tl.split(tl.reshape(grad, (SHAPE[0], SHAPE[1] // 2, 2)))
    inside = inside_tile(exists, PAIRS)
    store_tile(grads, start, inside, even * even_grad + odd * odd_grad, PAIRS)
    sines = (grads[0] + PAIRS[2] * grads[2], grads[1], grads[2])
    store_tile(sines, start, inside, even * odd_grad - odd * even_grad, PAIRS)


@triton.jit
def folded(x, FOLD: tl.constexpr, SHAPE):
    """Sums of every FOLD-th row: those that one thread holds, so that no thread waits for another."""
    return tl.sum(tl.reshape(x, (SHAPE[0] // FOLD, FOLD, SHAPE[1])), 0)


@triton.jit
def two_columns(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 vector as a factor of 16 columns whose sum it is, to 16 bits of it in bfloat16."""
    high = factor(x, DOT, PRECISION)
    low = factor(x - high.to(tl.float32), DOT, PRECISION)
    column = tl.arange(0, 16)[None, :]
    zeros = tl.zeros((x.shape[0], 16), DOT)
    return tl.where(column == 0, high[:, None], tl.where(column == 1, low[:, None], zeros))


@triton.jit
def tile_mean(v, mask, at, start, VALUES):
    """Mean value of one tile. Relative to it values are small, so that centring later loses no precision."""
    visible = visible_tokens(mask, at, start, True, VALUES[0])
    tile = load_tile(v, start, inside_tile(visible, VALUES), VALUES).to(tl.float32)
    return tl.sum(tile, 0) / tl.maximum(tl.sum(visible.to(tl.float32), 0), 1.0)
