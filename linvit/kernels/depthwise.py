"""Depthwise convolutions of channels-last maps, with what surrounds them, and their gradients.

A program has NEAR × COLUMNS neighbouring columns of a slab of ROWS rows, and CHANNELS channels of a group. It goes
down the rows of its input and reads each once: a row adds to all rows of the output that see it, whose sums are in
registers. These are tuples of tiles (COLUMNS, CHANNELS), one for each of the NEAR columns of a thread, so that a column
that is read serves several.

A map comes in as the tuple (pointer, image stride, row stride), and its column stride as a constant, in STRIDES: the
columns of a row are at fixed distances from one address. GROUPS has FIELDS numbers for each group of channels: its
first block and how many it has, the same of its channels, the number of its first weight, and height and width of one
or two weights, whose results are added; 0 for none.
"""

import triton
import triton.language as tl

from linvit.kernels.device_code import LOG2E, PTX, power_of_two

FIELDS = tl.constexpr(9)


@triton.jit
def inverse(x):
    """1 / x of numbers from 1 on, without the steps that a division takes for others."""
    if PTX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def tail_of(x):
    """1 - Φ(|x|), exact to 1e-7 (Abramowitz and Stegun, 7.1.26), and exp(-x²/2)."""
    t = inverse(1.0 + 0.23164190 * tl.abs(x))
    e = power_of_two(x * x * (-0.5 * LOG2E))
    return t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e, e


@triton.jit
def gelu(x):
    tail, _ = tail_of(x)
    return tl.maximum(x, 0.0) - tl.minimum(tl.abs(x), 64.0) * tail  # infinity times the tail, zero, is no number


@triton.jit
def gelu_slope(x):
    tail, e = tail_of(x)
    return tl.where(x < 0, tail, 1.0 - tail) + x * (e * 0.3989422804)


@triton.jit
def place(number, height, width, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """Image, first row and first column of a slab, by its number."""
    across = tl.cdiv(width, SPAN)
    slabs = across * tl.cdiv(height, ROWS)
    row = tl.cast(number % slabs // across * ROWS, tl.int32)
    return tl.cast(number // slabs, tl.int64), row, number % across * SPAN


@triton.jit
def columns_of(x, image, row, at, end, COUNT: tl.constexpr, STRIDE: tl.constexpr, GELU: tl.constexpr):
    """COUNT neighbouring columns of a row, in float32.

    at: the tiles' first columns, channels, and which of these exist. end: the map's columns, 0 for a row outside it.
    """
    column, channel, exists = at
    start = x[0] + image * x[1] + row * x[2] + ((column * STRIDE)[:, None] + channel[None, :])
    values = ()
    for i in tl.static_range(COUNT):
        inside = ((column + i >= 0) & (column + i < end))[:, None] & exists[None, :]
        value = tl.load(start + i * STRIDE, mask=inside, other=0.0).to(tl.float32)
        if GELU:
            value = gelu(value)
        values = values + (value,)  # type: ignore[assignment]
    return values


@triton.jit
def taps_of(weight, channel, exists, COUNT: tl.constexpr, FLIP: tl.constexpr):
    """The numbers of a weight (channels, COUNT), or the same from last to first."""
    taps = ()
    for i in tl.static_range(COUNT):
        value = tl.load(weight + channel * COUNT + (COUNT - 1 - i if FLIP else i), mask=exists, other=0.0)
        taps = taps + (value.to(tl.float32)[None, :],)  # type: ignore[assignment]
    return taps


@triton.jit
def plus(sums, i: tl.constexpr, value):
    """The sums with a value added to one of them."""
    return sums[:i] + (sums[i] + value,) + sums[i + 1 :]


@triton.jit
def with_row(sums, values, taps, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ABOVE, BEFORE, NEAR: tl.constexpr):
    """The sums with a row of the input added to all rows that see it.

    ABOVE, BEFORE: rows of the sums and columns of the input that only a larger kernel of the group needs.
    """
    for dy in tl.static_range(HEIGHT):
        for dx in tl.static_range(WIDTH):
            for j in tl.static_range(NEAR):
                value = values[j + dx + BEFORE] * taps[dy * WIDTH + dx]
                sums = plus(sums, (ABOVE + HEIGHT - 1 - dy) * NEAR + j, value)
    return sums


@triton.jit
def store_columns(x, image, row, at, end, values, COUNT: tl.constexpr, STRIDE: tl.constexpr):
    """The opposite of `columns_of`."""
    column, channel, exists = at
    start = x[0] + image * x[1] + row * x[2] + ((column * STRIDE)[:, None] + channel[None, :])
    for i in tl.static_range(COUNT):
        inside = (column + i < end)[:, None] & exists[None, :]
        tl.store(start + i * STRIDE, values[i].to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def combined(values, others, COUNT: tl.constexpr, PRODUCT: tl.constexpr):
    """The sums, or the products, of two tuples."""
    results = values[:0]
    for i in tl.static_range(COUNT):
        results = results + (values[i] * others[i] if PRODUCT else values[i] + others[i],)
    return results


@triton.jit
def times_slope(values, inputs, COUNT: tl.constexpr):
    results = values[:0]
    for i in tl.static_range(COUNT):
        results = results + (values[i] * gelu_slope(inputs[i]),)
    return results


@triton.jit
def convolve(
    x, y, gate, grad, before, weights, biases, out, of_gate, height, width, block, number,
    GROUPS: tl.constexpr, G: tl.constexpr, STRIDES: tl.constexpr,
    NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """A slab of a block of channels of a group."""
    FIRST: tl.constexpr = GROUPS[G * FIELDS + 2]
    W: tl.constexpr = GROUPS[G * FIELDS + 4]
    HEIGHT: tl.constexpr = GROUPS[G * FIELDS + 5]
    WIDTH: tl.constexpr = GROUPS[G * FIELDS + 6]
    HEIGHT2: tl.constexpr = GROUPS[G * FIELDS + 7]
    WIDTH2: tl.constexpr = GROUPS[G * FIELDS + 8]
    TALL: tl.constexpr = HEIGHT if HEIGHT > HEIGHT2 else HEIGHT2
    WIDE: tl.constexpr = WIDTH if WIDTH > WIDTH2 else WIDTH2
    image, first, left = place(number, height, width, ROWS, NEAR * COLUMNS)
    channel = (block - GROUPS[G * FIELDS]) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < GROUPS[G * FIELDS + 3]
    column = left + tl.arange(0, COLUMNS) * NEAR
    taps = taps_of(weights[W], channel, exists, HEIGHT * WIDTH, FLIP)
    blank = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    if biases[W] is not None:
        blank += tl.load(biases[W] + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    if HEIGHT2 > 0:
        taps2 = taps_of(weights[W + 1], channel, exists, HEIGHT2 * WIDTH2, FLIP)
        if biases[W + 1] is not None:
            blank += tl.load(biases[W + 1] + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    at = column, channel + FIRST, exists
    seen = column - WIDE // 2, channel + FIRST, exists
    sums = (blank,) * (TALL * NEAR)
    last = tl.minimum(first + ROWS, height)
    for row in range(tl.maximum(first - TALL // 2, 0), last + TALL // 2):
        values = columns_of(x, image, row, seen, tl.where(row < height, width, 0), NEAR + WIDE - 1, STRIDES[0], GELU)
        sums = with_row(sums, values, taps, HEIGHT, WIDTH, (TALL - HEIGHT) // 2, (WIDE - WIDTH) // 2, NEAR)
        if HEIGHT2 > 0:
            sums = with_row(sums, values, taps2, HEIGHT2, WIDTH2, (TALL - HEIGHT2) // 2, (WIDE - WIDTH2) // 2, NEAR)
        if RESIDUAL:
            for j in tl.static_range(NEAR):
                sums = plus(sums, TALL // 2 * NEAR + j, values[WIDE // 2 + j])
        done = row - TALL // 2
        end = tl.where(done >= first, width, 0)
        result = sums[:NEAR]
        if y is not None:
            result = combined(result, columns_of(y, image, done, at, end, NEAR, STRIDES[1], False), NEAR, False)
        if grad is not None:
            given = columns_of(grad, image, done, at, end, NEAR, STRIDES[3], False)
            store_columns(of_gate, image, done, at, end, combined(result, given, NEAR, True), NEAR, STRIDES[6])
            result = given
        if gate is not None:
            result = combined(result, columns_of(gate, image, done, at, end, NEAR, STRIDES[2], False), NEAR, True)
        if before is not None:
            inputs = columns_of(before, image, done, at, end, NEAR, STRIDES[4], False)
            result = times_slope(result, inputs, NEAR)
        store_columns(out, image, done, at, end, result, NEAR, STRIDES[5])
        sums = sums[NEAR:] + (blank,) * NEAR


@triton.jit
def depthwise_rows(
    x, y, gate, grad, before, weights, biases, out, of_gate, height, width, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, STRIDES: tl.constexpr,
    NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    block, number = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    for g in tl.static_range(len(GROUPS) // FIELDS):
        if (block >= GROUPS[g * FIELDS]) & (block < GROUPS[g * FIELDS] + GROUPS[g * FIELDS + 1]):
            convolve(
                x, y, gate, grad, before, weights, biases, out, of_gate, height, width, block, number,
                GROUPS, g, STRIDES, NEAR, ROWS, COLUMNS, CHANNELS, GELU, RESIDUAL, FLIP,
            )  # fmt: skip


@triton.jit
def with_products(sums, window, values, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ABOVE, BEFORE, NEAR: tl.constexpr):
    """The sums for each number of a weight, with what a row of the input adds to them.

    window: rows of the output's gradient, of the rows that see it. ABOVE, BEFORE: as in `with_row`.
    """
    for dy in tl.static_range(HEIGHT):
        for dx in tl.static_range(WIDTH):
            for j in tl.static_range(NEAR):
                product = window[(ABOVE + HEIGHT - 1 - dy) * NEAR + j] * values[j + dx + BEFORE]
                sums = plus(sums, dy * WIDTH + dx, product)
    return sums


@triton.jit
def store_sums(row, sums, channel, exists, COUNT: tl.constexpr, STRIDE: tl.constexpr):
    for i in tl.static_range(COUNT):
        tl.store(row + i * STRIDE + channel, tl.sum(sums[i], 0), mask=exists)


@triton.jit
def correlate(
    x, grad, partials, height, width, images, block, split, splits,
    GROUPS: tl.constexpr, G: tl.constexpr, STRIDES: tl.constexpr, TAPS: tl.constexpr, TOTAL: tl.constexpr,
    NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Every splits-th slab of a block of channels of a group, in order."""
    FIRST: tl.constexpr = GROUPS[G * FIELDS + 2]
    HEIGHT: tl.constexpr = GROUPS[G * FIELDS + 5]
    WIDTH: tl.constexpr = GROUPS[G * FIELDS + 6]
    HEIGHT2: tl.constexpr = GROUPS[G * FIELDS + 7]
    WIDTH2: tl.constexpr = GROUPS[G * FIELDS + 8]
    TALL: tl.constexpr = HEIGHT if HEIGHT > HEIGHT2 else HEIGHT2
    WIDE: tl.constexpr = WIDTH if WIDTH > WIDTH2 else WIDTH2
    channel = (block - GROUPS[G * FIELDS]) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < GROUPS[G * FIELDS + 3]
    channel += FIRST
    blank = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    sums, sums2, of_bias = (blank,) * (HEIGHT * WIDTH), (blank,) * (HEIGHT2 * WIDTH2), (blank,)
    slabs = images * tl.cdiv(height, ROWS) * tl.cdiv(width, NEAR * COLUMNS)
    for number in range(split, slabs, splits):
        image, first, left = place(number, height, width, ROWS, NEAR * COLUMNS)
        column = left + tl.arange(0, COLUMNS) * NEAR
        last = tl.minimum(first + ROWS, height)
        window = (blank,) * (TALL * NEAR)
        for row in range(first - TALL // 2, last + TALL // 2):
            newest = row + TALL // 2
            given = columns_of(
                grad,
                image,
                newest,
                (column, channel, exists),
                tl.where(newest < last, width, 0),
                NEAR,
                STRIDES[1],
                False,
            )
            window = window[NEAR:] + given
            values = columns_of(
                x, image, row, (column - WIDE // 2, channel, exists), tl.where((row >= 0) & (row < height), width, 0),
                NEAR + WIDE - 1, STRIDES[0], GELU,
            )  # fmt: skip
            sums = with_products(sums, window, values, HEIGHT, WIDTH, (TALL - HEIGHT) // 2, (WIDE - WIDTH) // 2, NEAR)
            sums2 = with_products(
                sums2, window, values, HEIGHT2, WIDTH2, (TALL - HEIGHT2) // 2, (WIDE - WIDTH2) // 2, NEAR
            )
            for j in tl.static_range(NEAR):
                of_bias = plus(of_bias, 0, given[j])
    row = partials + split * (TAPS * TOTAL)
    store_sums(row, sums, channel, exists, HEIGHT * WIDTH, TOTAL)
    store_sums(row + HEIGHT * WIDTH * TOTAL, sums2, channel, exists, HEIGHT2 * WIDTH2, TOTAL)
    store_sums(row + (TAPS - 1) * TOTAL, of_bias, channel, exists, 1, TOTAL)


@triton.jit
def depthwise_taps(
    x, grad, partials, height, width, images, splits, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, STRIDES: tl.constexpr, TAPS: tl.constexpr, TOTAL: tl.constexpr,
    NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Each program's part of the gradients of weights and biases: (splits, TAPS, TOTAL channels), biases last."""
    block, split = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    for g in tl.static_range(len(GROUPS) // FIELDS):
        if (block >= GROUPS[g * FIELDS]) & (block < GROUPS[g * FIELDS] + GROUPS[g * FIELDS + 1]):
            correlate(
                x, grad, partials, height, width, images, block, split, splits,
                GROUPS, g, STRIDES, TAPS, TOTAL, NEAR, ROWS, COLUMNS, CHANNELS, GELU,
            )  # fmt: skip
