"""Linear layers of tokens, and convolutions of maps, in one launch with what surrounds them.

A program has a tile of ROWS pixels of the output and COLUMNS of its channels. The numbers that it multiplies are runs
of RUN neighbours in memory: the channels of a pixel, or those of all pixels in a row of the convolution's kernel, which
has TALL rows. Two tensors side by side are read as one with the channels of both.

A tensor comes in as (pointer, numbers from one pixel to the next).
"""

import triton
import triton.language as tl

from linvit.kernels.depthwise import gelu, inverse
from linvit.kernels.device_code import LOG2E, power_of_two
from linvit.kernels.tiles import as_dtype, factor


@triton.jit
def load_beside(tensors, pixel, k, inside, SPLIT: tl.constexpr):
    """Numbers k of pixels, of one tensor or of two whose channels lie side by side; the first has SPLIT of them."""
    first, second = tensors
    pointers = first[0] + pixel[:, None] * first[1] + k[None, :]
    if second is None:
        x = tl.load(pointers, mask=inside, other=0.0)
    else:
        is_first = (k < SPLIT)[None, :]
        others = second[0] + pixel[:, None] * second[1] + (k - SPLIT)[None, :]
        x = tl.load(pointers, mask=inside & is_first, other=0.0)
        x = tl.where(is_first, x, tl.load(others, mask=inside & ~is_first, other=0.0))
    return x


@triton.jit
def statistics(x, pixel, exists, eps, RUN: tl.constexpr, DEPTH: tl.constexpr):
    """Mean and inverse deviation of each pixel's channels, from their distances to the first of them."""
    start = x[0] + pixel * x[1]
    origin = tl.load(start, mask=exists, other=0.0).to(tl.float32)
    total = tl.zeros((pixel.shape[0], DEPTH), tl.float32)
    squares = tl.zeros((pixel.shape[0], DEPTH), tl.float32)
    for at in range(0, RUN, DEPTH):
        k = at + tl.arange(0, DEPTH)
        inside = exists[:, None] & (k < RUN)[None, :]
        d = tl.load(start[:, None] + k[None, :], mask=inside, other=0.0).to(tl.float32) - origin[:, None]
        d = tl.where(inside, d, 0.0)
        total += d
        squares += d * d
    mean = tl.sum(total, 1) / RUN
    variance = tl.maximum(tl.sum(squares, 1) / RUN - mean * mean, 0.0)
    return origin + mean, tl.rsqrt(variance + eps)


@triton.jit
def place_of(row, height, width, out_height, out_width, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    """Image, and first row and column of what the kernel of a convolution sees for an output pixel."""
    image, y = row // (out_height * out_width), row // out_width % out_height
    return image * height, y * STRIDE - PADDING, row % out_width * STRIDE - PADDING


@triton.jit
def multiply(
    x, weight, row, n, rows, sizes, eps,
    N: tl.constexpr, RUN: tl.constexpr, CHANNELS: tl.constexpr, SPLIT: tl.constexpr, TALL: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, NORM: tl.constexpr, DEPTH: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of the product, in float32."""
    height, width, out_height, out_width = sizes
    exists = row < rows
    if NORM:
        mean, inverse_deviation = statistics(x[0], row, exists, eps, RUN, DEPTH)
    if TALL > 1 or RUN > CHANNELS:
        image, top, left = place_of(row, height, width, out_height, out_width, STRIDE, PADDING)
    STEPS: tl.constexpr = (RUN + DEPTH - 1) // DEPTH
    sums = tl.zeros((row.shape[0], n.shape[0]), tl.float32)
    for step in range(TALL * STEPS):
        dy, k = step // STEPS, step % STEPS * DEPTH + tl.arange(0, DEPTH)
        inside, of_weight = exists[:, None], (n < N)[None, :]
        if RUN % DEPTH > 0:
            inside, of_weight = inside & (k < RUN)[None, :], of_weight & (k < RUN)[:, None]
        if TALL > 1 or RUN > CHANNELS:
            column = left[:, None] + (k // CHANNELS)[None, :]
            y = (top + dy)[:, None]
            inside = inside & (y >= 0) & (y < height) & (column >= 0) & (column < width)
            pixel = (image + top + dy) * width + left
        else:
            pixel = row
        a = load_beside(x, pixel, k, inside, SPLIT)
        if NORM:
            a = (a.to(tl.float32) - mean[:, None]) * inverse_deviation[:, None]
            if RUN % DEPTH > 0:
                a = tl.where(inside, a, 0.0)
            a = as_dtype(a, x[0][0].dtype.element_ty)
        b = tl.load(weight + n[None, :] * (TALL * RUN) + (dy * RUN + k)[:, None], mask=of_weight, other=0.0)
        precision: tl.constexpr = "ieee"
        sums = tl.dot(factor(a, DOT, PRECISION), factor(b, DOT, PRECISION), sums, input_precision=precision)
    return sums


@triton.jit
def product_tile(
    x, weight, bias, residual, scale, added, out, rows, sizes, eps,
    N: tl.constexpr, RUN: tl.constexpr, CHANNELS: tl.constexpr, SPLIT: tl.constexpr, OUT_SPLIT: tl.constexpr,
    TALL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """activation(norm(x) · weight + bias) + residual · scale + added.

    x, residual: one tensor, or two side by side. sizes: height and width of the map, and of the output.
    """
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    row = tl.cast(tl.program_id(0) // ACROSS, tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    result = multiply(
        x, weight, row, n, rows, sizes, eps,
        N, RUN, CHANNELS, SPLIT, TALL, STRIDE, PADDING, NORM, DEPTH, DOT, PRECISION,
    )  # fmt: skip
    inside = (row < rows)[:, None] & (n < N)[None, :]
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":
        result = gelu(result)
    if ACTIVATION == "silu":
        result *= inverse(1.0 + power_of_two(result * (-1.0 * LOG2E)))
    if residual[0] is not None:
        more = load_beside(residual, row, n, inside, OUT_SPLIT).to(tl.float32)
        if scale is not None:
            more *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        result += more
    if added is not None:
        result += tl.load(added[0] + row[:, None] * added[1] + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * N + n[None, :], as_dtype(result, out.dtype.element_ty), mask=inside)
