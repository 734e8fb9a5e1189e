"""Starts the kernels of depthwise convolutions, with their programs and tiles, as a torch operator with gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor, library

from linvit.kernels.depthwise import depthwise_rows, depthwise_taps
from linvit.kernels.launch import processors

# Columns next to each other that a thread has, by the largest height of a kernel. Chosen by what the compiler says for
# compute capability 9.0: no registers spilled and fewest instructions (tests/kernels/budgets.yaml).
NEAR = {3: 8, 11: 4}
NEAR_BACK = {5: 4, 11: 2}
CHANNELS = 64  # most that a program has; a thread has two of them
THREADS = 128
# Programs for each multiprocessor, where there are rows enough: each slab of rows reads those around it once more.
WAVES = 4
LEAST_ROWS = 7


class Around(NamedTuple):
    """What surrounds the convolutions: (y + h + their results) · gate with h = GELU(x), the exact one, or x itself."""

    y: Tensor | None = None
    gate: Tensor | None = None
    gelu: bool = False
    residual: bool = False


class Layout(NamedTuple):
    """The constants of a kernel, and its programs: one for each block of channels of each slab of rows and columns."""

    constants: dict[str, Any]
    blocks: int
    slabs: int


def layout(x: Tensor, members: Sequence[Sequence[Tensor]], near: dict[int, int]) -> Layout:
    """members: the weights of each group of channels."""
    batch, _, height, width = x.shape
    tallest = max(weight.shape[2] for group in members for weight in group)
    columns_near = next(count for most, count in near.items() if tallest <= most)
    widest = max(len(group[0]) for group in members)
    channels = min(CHANNELS, max(16, triton.next_power_of_2(widest)))
    columns = min(2 * THREADS // channels, triton.next_power_of_2(-(-width // columns_near)))
    numbers, blocks, first, number = list[int](), 0, 0, 0
    for group in members:
        count, shapes = -(-len(group[0]) // channels), [side for weight in group for side in weight.shape[2:]]
        numbers += [blocks, count, first, len(group[0]), number, *(*shapes, 0, 0)[:4]]
        blocks, first, number = blocks + count, first + len(group[0]), number + len(group)
    across = -(-width // (columns_near * columns)) * batch
    wanted = -(-WAVES * processors(x.device) // (across * blocks))
    rows = min(height, max(LEAST_ROWS, -(-height // wanted)))
    constants = {"GROUPS": tuple(numbers), "BLOCKS": blocks, "NEAR": columns_near, "ROWS": rows, "num_stages": 1}
    constants |= {"COLUMNS": columns, "CHANNELS": channels, "num_warps": max(1, columns * channels // 64)}
    return Layout(constants, blocks, across * -(-height // rows))


def depthwise_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    groups: Sequence[int],
    around: Around,
    grad: Tensor | None = None,
    before: Tensor | None = None,
    flip: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the operator `depthwise` returns; with the gradient of that, the gradient before the gate, and the gate's.

    before: a map whose GELU's slope multiplies the result. flip: weights from last to first.
    """
    plan, out = layout(x, by_group(weights, groups), NEAR), empty_map(x)
    of_gate = None if grad is None else empty_map(x)
    maps = x, around.y, around.gate, grad, before
    constants = {"GELU": around.gelu, "RESIDUAL": around.residual, "FLIP": flip, **plan.constants}
    depthwise_rows[(plan.blocks * plan.slabs,)](
        *map(pointer, maps),
        tuple(weights),
        tuple(biases) or (None,) * len(weights),
        pointer(out),
        pointer(of_gate),
        *x.shape[2:],
        STRIDES=tuple(0 if each is None else each.stride(3) for each in (*maps, out, of_gate)),
        **constants,
    )
    return out, of_gate


def depthwise_backward(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], groups: Sequence[int], gelu: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of weights and biases, from the gradient before the gate, summed in a fixed order."""
    members = by_group(weights, groups)
    plan = layout(x, members, NEAR_BACK)
    splits = max(1, min(plan.slabs, WAVES * processors(x.device) // plan.blocks))
    taps = max(sum(weight[0].numel() for weight in group) for group in members) + 1
    partials = x.new_empty(splits, taps, x.shape[1], dtype=torch.float32)
    depthwise_taps[(plan.blocks * splits,)](
        pointer(x),
        pointer(grad),
        partials,
        *x.shape[2:],
        len(x),
        splits,
        STRIDES=(x.stride(3), grad.stride(3)),
        TAPS=taps,
        TOTAL=x.shape[1],
        GELU=gelu,
        **plan.constants,
    )
    of_weights, of_biases = [], []
    for group, sums in zip(members, partials.sum(0).split([len(group[0]) for group in members], 1), strict=True):
        counts = [weight[0].numel() for weight in group]
        for weight, rows in zip(group, sums[: sum(counts)].split(counts), strict=True):
            of_weights.append(torch.empty_like(weight).copy_(rows.mT.reshape(weight.shape)))
            of_biases.append(sums[-1].to(weight.dtype, copy=True))
    return of_weights, of_biases


def by_group(weights: Sequence[Tensor], groups: Sequence[int]) -> list[Sequence[Tensor]]:
    """The weights of each group of channels, which has so many."""
    ends = [sum(groups[: number + 1]) for number in range(len(groups))]
    return [weights[end - count : end] for end, count in zip(ends, groups, strict=True)]


def empty_map(x: Tensor) -> Tensor:
    """An empty map of the same shape, channels innermost."""
    batch, channels, height, width = x.shape
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


def innermost(x: Tensor) -> Tensor:
    """The map with its channels innermost."""
    return x if x.stride(1) == 1 else x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def pointer(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x, x.stride(0), x.stride(2))


INPUTS = "Tensor x, Tensor[] weights, Tensor[] biases, Tensor? y, Tensor? gate, int[] groups, bool gelu, bool residual"


@library.custom_op("linvit::depthwise", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def depthwise(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    y: Tensor | None,
    gate: Tensor | None,
    groups: Sequence[int],
    gelu: bool,
    residual: bool,
) -> Tensor:
    """(y + h + the depthwise convolutions of h) · gate with h = GELU(x) or x, for maps with channels innermost.

    weights: of each group of channels one or two, (channels, 1, height, width), whose results are added. biases: of
    each weight, or none at all. groups: how many weights each group has. residual: whether h itself is added.
    """
    with torch.cuda.device_of(x):
        weights = [weight.contiguous() for weight in weights]
        return depthwise_forward(x, weights, biases, groups, Around(y, gate, gelu, residual))[0]


@depthwise.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return empty_map(x)


def all_gradients(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    y: Tensor | None,
    gate: Tensor | None,
    groups: Sequence[int],
    gelu: bool,
    residual: bool,
    of_input: bool,
    of_weights: bool,
) -> list[Tensor]:
    """Gradients of y (if there is a gate) and gate, of x, of weights and of biases; empty where not asked for."""
    results = [x.new_empty(0) for _ in range(3 + 2 * len(weights))]
    with torch.cuda.device_of(x):
        weights, grad = [weight.contiguous() for weight in weights], innermost(grad)
        if gate is not None:
            around = Around(y, gate, gelu, residual)
            grad, of_gate = depthwise_forward(x, weights, biases, groups, around, grad=grad)
            results[:2] = [grad, cast(Tensor, of_gate)]
        if of_input:
            around, before = Around(residual=residual), x if gelu else None
            results[2] = depthwise_forward(grad, weights, (), groups, around, before=before, flip=True)[0]
        if of_weights:
            by_weight, by_bias = depthwise_backward(grad, x, weights, groups, gelu)
            results[3:] = by_weight + by_bias
    return results


depthwise_gradients = library.custom_op(
    "linvit::depthwise_backward",
    all_gradients,
    mutates_args=(),
    schema=f"(Tensor grad, {INPUTS}, bool of_input, bool of_weights) -> Tensor[]",
)


@depthwise_gradients.register_fake
def _(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], y: Tensor, gate: Tensor, *rest: Any
) -> list[Tensor]:
    *_, of_input, of_weights = rest

    def room(wanted: bool) -> Tensor:
        return empty_map(x) if wanted else x.new_empty(0)

    shapes = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
    of_each = [w.new_empty(shape if of_weights else 0) for w, shape in zip((*weights, *weights), shapes, strict=True)]
    return [room(gate is not None), room(gate is not None), room(of_input), *of_each]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, y, gate, *ctx.rule = inputs
    ctx.counts = len(weights), len(biases)
    ctx.save_for_backward(x, *weights, *biases, None if gate is None else y, gate)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *tensors, y, gate = ctx.saved_tensors
    count, bias_count = ctx.counts
    weights, biases = tensors[:count], tensors[count:]
    of_x, of_weights, of_biases, of_y, of_gate, *_ = ctx.needs_input_grad
    wanted = any(of_weights) or any(of_biases)
    by_y, by_gate, by_x, *rest = depthwise_gradients(grad, x, weights, biases, y, gate, *ctx.rule, bool(of_x), wanted)
    by_y = grad if gate is None else by_y
    return (
        by_x if of_x else None,
        rest[:count] if any(of_weights) else [None] * count,
        rest[count:] if any(of_biases) else [None] * bias_count,
        by_y if of_y else None,
        by_gate if of_gate else None,
        None,
        None,
        None,
    )


depthwise.register_autograd(_gradients, setup_context=_save)
