"""Shared by all kernels: which tokens a program reads, tiles of them, and the axes of the formula on a tile.

A tensor comes in as the tuple (pointer, batch stride, head stride, token stride, channel stride); `head_of` leaves
(pointer to the first token, token stride, channel stride). Tiles are float32, ROWS tokens × COLUMNS channels, zero
outside the existing tokens and channels.
"""

import triton
import triton.language as tl


@triton.jit
def span(cu_seqlens, tokens, HEADS: tl.constexpr):
    """Batch entry, head, first token and number of tokens of a program; a packed sequence is a batch entry."""
    index = tl.program_id(0) // HEADS
    head = tl.cast(tl.program_id(0) % HEADS, tl.int64)
    if cu_seqlens is None:
        batch = tl.cast(index, tl.int64)
        begin = batch * 0
        length = tokens
    else:
        begin = tl.cast(tl.load(cu_seqlens + index), tl.int64)
        length = tl.cast(tl.load(cu_seqlens + index + 1) - begin, tl.int32)
        batch = begin * 0
    return batch, head, begin, length


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors too."""
    return not isinstance(span, triton.JITFunction)


@triton.jit
def head_of(x, batch, head, begin):
    return x[0] + batch * x[1] + head * x[2] + begin * x[3], x[3], x[4]


@triton.jit
def tile_pointers(x, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first = x[0] + tl.cast(start, tl.int64) * x[1]
    return first + tl.arange(0, ROWS)[:, None] * x[1] + tl.arange(0, COLUMNS)[None, :] * x[2]


@triton.jit
def inside_tile(start, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    return (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]


@triton.jit
def load_tile(x, start, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(tile_pointers(x, start, ROWS, COLUMNS), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, start, inside, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tl.store(tile_pointers(x, start, ROWS, COLUMNS), tile.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def load_visible(mask, batch, head, begin, start, length, ROWS: tl.constexpr):
    """True where a token exists and counts; mask is (pointer, batch, head and token stride) or None."""
    row = start + tl.arange(0, ROWS)
    visible = row < length
    if mask is not None:
        first = mask[0] + batch * mask[1] + head * mask[2] + (begin + start) * mask[3]
        visible = visible & (tl.load(first + tl.arange(0, ROWS) * mask[3], mask=visible, other=0) != 0)
    return visible


@triton.jit
def factor(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x as a factor of a product, rounded to the nearest: tensor cores cut off what TF32 has no bits for."""
    y = x.to(DOT)
    if PRECISION == "tf32" and tl.float32 == DOT:
        y = ((y.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return y


@triton.jit
def tile_mean(
    v,
    mask,
    batch,
    head,
    begin,
    start,
    length,
    ROWS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mean value of one tile, subtracted from values in float32; zero for half precision, where it would add rounding.

    Relative to it values are small, so that subtracting their mean later loses no precision.
    """
    origin = tl.zeros((VALUE_COLUMNS,), tl.float32)
    if PRECISION == "ieee":
        visible = load_visible(mask, batch, head, begin, start, length, ROWS)
        inside = inside_tile(start, length, ROWS, VALUE_COLUMNS, VALUE_WIDTH) & visible[:, None]
        count = tl.maximum(tl.sum(visible.to(tl.float32), 0), 1.0)
        origin += tl.sum(load_tile(v, start, inside, ROWS, VALUE_COLUMNS), 0) / count
    return origin


@triton.jit
def feature(x, inside, MAP: tl.constexpr):
    """κ(x) where inside, otherwise zero."""
    if MAP == "elu1":
        y = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == "relu":
        y = tl.maximum(x, 0.0)
    elif MAP == "exp":
        y = tl.exp(x)
    else:
        y = x
    return tl.where(inside, y, 0.0)


@triton.jit
def feature_slope(x, MAP: tl.constexpr):
    """κ'(x)."""
    if MAP == "elu1":
        slope = tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == "relu":
        slope = tl.where(x > 0, 1.0, 0.0)
    elif MAP == "exp":
        slope = tl.exp(x)
    else:
        slope = tl.full(x.shape, 1.0, tl.float32)
    return slope


@triton.jit
def rotate(
    x,
    cos,
    sin,
    begin,
    start,
    length,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate adjacent channels by the angles of their token, or back; x itself without a table."""
    if cos is None:
        y = x
    else:
        inside = inside_tile(start, length, ROWS, COLUMNS // 2, WIDTH // 2)
        offset = (begin + start) * (WIDTH // 2)
        offset += tl.arange(0, ROWS)[:, None] * (WIDTH // 2) + tl.arange(0, COLUMNS // 2)[None, :]
        c = tl.load(cos + offset, mask=inside, other=1.0)
        s = tl.load(sin + offset, mask=inside, other=0.0)
        if INVERSE:
            s = -s
        even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
        y = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (ROWS, COLUMNS))
    return y


@triton.jit
def gain_and_level(num, den, mass, scale, eps, NORMALIZER: tl.constexpr):
    """The two numbers per query that make out = gain · covariance + level · u, as in `linvit.ops.normalizer`."""
    if NORMALIZER == "divide":
        gain = 1 / (den + eps)
        level = num * gain
    elif NORMALIZER == "magnitude":
        share = scale / (scale * den + eps)
        gain = scale + share
        level = scale * (num - den) + share * num
    elif NORMALIZER == "subtract":
        gain = tl.zeros_like(den) + scale
        level = scale * (num - den) + 1
    elif NORMALIZER == "sum":
        gain = tl.zeros_like(den) + mass
        level = mass * num
    else:
        gain = tl.zeros_like(den) + 1
        level = num
    return gain, level


@triton.jit
def gain_and_level_backward(dgain, dlevel, num, den, mass, scale, eps, cos, NORMALIZER: tl.constexpr):
    """Gradients of num and den from those of gain and level."""
    # scale · (num - den) adds to one what it subtracts from the other; without rotation num = den.
    shifted = tl.zeros_like(den) if cos is None else dlevel * scale
    if NORMALIZER == "divide":
        gain = 1 / (den + eps)
        dnum = dlevel * gain
        dden = -(dgain + dlevel * num) * gain * gain
    elif NORMALIZER == "magnitude":
        share = scale / (scale * den + eps)
        dnum = dlevel * share + shifted
        dden = -(dgain + dlevel * num) * share * share - shifted
    elif NORMALIZER == "subtract":
        dnum = shifted
        dden = -shifted
    elif NORMALIZER == "sum":
        dnum = dlevel * mass
        dden = tl.zeros_like(den)
    else:
        dnum = dlevel
        dden = tl.zeros_like(den)
    return dnum, dden
