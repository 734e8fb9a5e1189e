"""Starts the kernels, with their numbers of programs and block sizes."""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from linvit.kernels.causal import chunked, chunked_key_backward, chunked_query_backward
from linvit.kernels.state import merge, query_mean, read, summarize
from linvit.kernels.state_backward import read_backward, summarize_backward
from linvit.kernels.support import padded
from linvit.kernels.tiles import interpreted

# Tokens per tile and warps per program, by the wider of the two head widths padded to a power of two. A program keeps S
# (width × value width, float32) and a few tiles at once. At width 64 in bfloat16, compiled for an H200, `summarize`
# takes 242 registers per thread and `read` 144, none spilled: two and three programs share a multiprocessor. Measured,
# they reach a third of the GPU's bandwidth (docs/contribute/log.md). Narrow heads need longer tiles, otherwise
# loads would be too short; width 128 uses twice the threads and half the tokens.
BLOCKS = {16: (128, 4), 32: (128, 4), 64: (64, 4), 128: (32, 8)}
# The same for the backward pass, which keeps S and its gradient at once: with four warps it spilled registers, with
# eight `read_backward` takes 219 and spills none.
BACKWARD_BLOCKS = {16: (128, 4), 32: (128, 4), 64: (64, 8), 128: (32, 8)}
# Tokens per chunk and warps of causal attention, which keeps the scores of a chunk besides the state and the tiles, and
# the same for products of four bytes (float32, and float16 as TF32), which need twice the shared memory.
CHUNKS = {16: (64, 4), 32: (64, 4), 64: (64, 8), 128: (32, 8)}
WIDE_CHUNKS = {16: (64, 4), 32: (64, 4), 64: (32, 4), 128: (16, 8)}
# Tiles on the way from memory at once. A GPU with less shared memory gets fewer, down to one: `support.SHARED`.
MOST_STAGES = 3
_stages: dict[tuple[Any, ...], int] = {}  # that fitted, by kernel, GPU and shape
# Tiles that one program reads with the same state, which is as large as one or two tiles and comes from L2.
READ_TILES = 4
MOST_SPLITS = 65535  # the limit of a grid's second axis
# With this many programs per multiprocessor a head's tokens are not split further.
PROGRAMS_PER_PROCESSOR = 2


class Options(NamedTuple):
    """The axes of the formula that a kernel is compiled for, and eps."""

    query_map: str
    key_map: str
    query_mean: bool
    normalizer: str
    eps: float


class Inputs(NamedTuple):
    """The tensors of a call: as in `linear_attention`, (cos, sin), and the offsets of packed sequences."""

    query: Tensor
    key: Tensor
    value: Tensor
    rotary: tuple[Tensor | None, Tensor | None]
    visible: Tensor | None
    cu_seqlens: Tensor | None


class Grid(NamedTuple):
    """Programs for all heads of all batch entries or packed sequences; tokens are those of an average sequence."""

    programs: int
    heads: int
    tokens: int
    splits: int
    read_splits: int


def state_size(width: int, value_width: int) -> int:
    """Floats per state: S, z, u, r, n and shift, rounded up to 64 bytes so that all rows are aligned."""
    size = width * value_width + 2 * width + value_width + 2
    return -(-size // 16) * 16


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, the heads' states, and with query-mean weights each head's sum of κ(q) and its number of queries."""
    query, key, value, rotary, visible, cu_seqlens = inputs
    grid, sizes, dot, warps = _plan(query, value, key.shape[2], cu_seqlens, BLOCKS)
    size, scale = sizes["SIZE"], query.shape[-1] ** -0.5
    shape = {"HEADS": grid.heads, **sizes, **dot, "num_warps": warps}
    mask = _strided_mask(visible)
    sums = None
    if options.query_mean:
        sums = query.new_empty(grid.programs, grid.splits, query.shape[-1] + 1, dtype=torch.float32)
        kept = {name: shape[name] for name in ("HEADS", "WIDTH", "ROWS", "COLUMNS", "num_warps")}
        _start(
            query_mean,
            (grid.programs, grid.splits),
            _strided(query),
            mask,
            sums,
            cu_seqlens,
            query.shape[2],
            MAP=options.query_map,
            **kept,
        )
        sums = sums.sum(1) if grid.splits > 1 else sums.squeeze(1)
    states = query.new_empty(grid.programs, grid.splits, size, dtype=torch.float32)
    arguments: tuple[Any, ...] = (
        _strided(key),
        _strided(value),
        *rotary,
        mask,
        sums,
        states,
        cu_seqlens,
        key.shape[2],
        scale,
    )
    _start(summarize, (grid.programs, grid.splits), *arguments, MAP=options.key_map, **shape)
    states = _merged(states, sizes, warps)
    out = room(query, value)
    arguments = _strided(query), _strided(out), *rotary, states, cu_seqlens, query.shape[2], scale, options.eps
    axes = {"MAP": options.query_map, "NORMALIZER": options.normalizer}
    _start(read, (grid.programs, grid.read_splits), *arguments, **axes, **shape)
    return out, states, sums


def backward(
    grad: Tensor, inputs: Inputs, states: Tensor, sums: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value, rotary, visible, cu_seqlens = inputs
    grid, sizes, dot, warps = _plan(query, value, key.shape[2], cu_seqlens, BACKWARD_BLOCKS)
    scale = query.shape[-1] ** -0.5
    shape = {"HEADS": grid.heads, **sizes, **dot, "num_warps": warps}
    mask = _strided_mask(visible)
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    state_grads = query.new_empty(grid.programs, grid.splits, sizes["SIZE"], dtype=torch.float32)

    def over_queries(splits: int, query_grad: Any, mean_grads: Tensor | None, state_grads: Tensor | None) -> None:
        _start(
            read_backward,
            (grid.programs, splits),
            _strided(query),
            _strided(grad),
            query_grad,
            *rotary,
            mask,
            sums,
            mean_grads,
            states,
            state_grads,
            cu_seqlens,
            query.shape[2],
            scale,
            options.eps,
            MAP=options.query_map,
            NORMALIZER=options.normalizer,
            **shape,
        )

    over_queries(grid.splits, None if options.query_mean else _strided(dq), None, state_grads)
    state_grads = state_grads.sum(1) if grid.splits > 1 else state_grads.squeeze(1)
    mean_grads = None
    if options.query_mean:
        mean_grads = query.new_empty(grid.programs, grid.splits, query.shape[-1], dtype=torch.float32)
    tensors = [_strided(x) for x in (key, value, dk, dv)]
    arguments = *tensors, *rotary, mask, sums, mean_grads, states, state_grads, cu_seqlens, key.shape[2], scale
    _start(summarize_backward, (grid.programs, grid.splits), *arguments, MAP=options.key_map, **shape)
    if mean_grads is not None:
        over_queries(grid.read_splits, _strided(dq), mean_grads.sum(1), None)
    return dq, dk, dv


def causal_forward(inputs: Inputs, options: Options) -> Tensor:
    """Output of causal attention."""
    query, key, value, rotary, visible, cu_seqlens = inputs
    programs, shape = _causal_plan(query, value, cu_seqlens, options)
    out = room(query, value)
    tensors = [_strided(x) for x in (query, key, value, out)]
    scalars = query.shape[2], query.shape[-1] ** -0.5, options.eps
    arguments = *tensors, *rotary, _strided_mask(visible), cu_seqlens, *scalars
    _start(chunked, (programs,), *arguments, NORMALIZER=options.normalizer, **shape)
    return out


def causal_backward(grad: Tensor, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of causal attention."""
    query, key, value, rotary, visible, cu_seqlens = inputs
    programs, shape = _causal_plan(query, value, cu_seqlens, options)
    mask = _strided_mask(visible)
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    rows = query.new_empty(*query.shape[:2], 4, query.shape[2], dtype=torch.float32)
    tensors = [_strided(x) for x in (query, key, value, grad)]
    rest = rows, *rotary, mask, cu_seqlens, query.shape[2]
    arguments = *tensors, _strided(dq), *rest, query.shape[-1] ** -0.5, options.eps
    _start(chunked_query_backward, (programs,), *arguments, NORMALIZER=options.normalizer, **shape)
    _start(chunked_key_backward, (programs,), *tensors, _strided(dk), _strided(dv), *rest, **shape)
    return dq, dk, dv


def _start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **shape: Any) -> None:
    """Starts a kernel with as many tiles on the way as there is shared memory for."""
    key = (kernel, torch.cuda.current_device() if torch.cuda.is_available() else None, *shape.items())
    stages = _stages.get(key, MOST_STAGES)
    while True:
        try:
            kernel[grid](*arguments, **shape, num_stages=stages)
        except OutOfResources:
            if stages == 1:
                raise
            stages -= 1
        else:
            _stages[key] = stages
            return


def _causal_plan(
    query: Tensor, value: Tensor, cu_seqlens: Tensor | None, options: Options
) -> tuple[int, dict[str, Any]]:
    batch, heads, _, width = query.shape
    columns, value_columns = _columns(query, value)
    dot = _dot(query.dtype)
    if query.dtype == torch.float16 and not interpreted():
        dot["PRECISION"] = "tf32x3"  # scores and sums are rounded once more than in bidirectional attention
    chunks = CHUNKS if dot["DOT"] == tl.bfloat16 else WIDE_CHUNKS
    rows, warps = chunks[max(columns, value_columns)]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = {
        "HEADS": heads,
        "WIDTH": width,
        "VALUE_WIDTH": value.shape[-1],
        "ROWS": rows,
        "COLUMNS": columns,
        "VALUE_COLUMNS": value_columns,
        "QUERY_MAP": options.query_map,
        "KEY_MAP": options.key_map,
        "num_warps": warps,
        **dot,
    }
    return sequences * heads, shape


def _columns(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Head widths padded to the powers of two that products need, at least 16."""
    return padded(query.shape[-1]), padded(value.shape[-1])


def _plan(
    query: Tensor, value: Tensor, keys: int, cu_seqlens: Tensor | None, blocks: dict[int, tuple[int, int]]
) -> tuple[Grid, dict[str, int], dict[str, Any], int]:
    batch, heads, queries, width = query.shape
    columns, value_columns = _columns(query, value)
    rows, warps = blocks[max(columns, value_columns)]
    if cu_seqlens is not None:
        batch = cu_seqlens.shape[0] - 1
        queries = keys = -(-queries // max(batch, 1))
    programs = batch * heads
    wanted = -(-PROGRAMS_PER_PROCESSOR * _processors(query.device) // max(programs, 1))
    splits = max(1, min(wanted, -(-max(keys, queries) // rows)))
    grid = Grid(programs, heads, queries, splits, min(-(-queries // (rows * READ_TILES)), MOST_SPLITS))
    sizes = {
        "WIDTH": width,
        "VALUE_WIDTH": value.shape[-1],
        "SIZE": state_size(width, value.shape[-1]),
        "ROWS": rows,
        "COLUMNS": columns,
        "VALUE_COLUMNS": value_columns,
    }
    return grid, sizes, _dot(query.dtype), warps


def _dot(dtype: torch.dtype) -> dict[str, Any]:
    """The precision of the products' factors; sums are always float32.

    bfloat16 inputs are multiplied as they are. float16 is raised to TF32, which has its ten bits and a wider range:
    a state of large keys and values would not fit float16. float32 stays float32. The interpreter knows only float32.
    """
    if interpreted() or dtype == torch.float32:
        return {"DOT": tl.float32, "PRECISION": "ieee"}
    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PRECISION": "tf32"}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _merged(states: Tensor, sizes: dict[str, int], warps: int) -> Tensor:
    programs, splits, size = states.shape
    if splits == 1:
        return states.squeeze(1)
    merged = states.new_empty(programs, size)
    kept = {name: sizes[name] for name in sizes if name != "ROWS"}
    _start(merge, (programs,), states, merged, splits, **kept, num_warps=warps)
    return merged


def room(query: Tensor, value: Tensor) -> Tensor:
    """An empty output in the memory order of the values, so that the next layer needs no copy."""
    if query.shape[2] == value.shape[2]:
        return torch.empty_like(value)
    return value.new_empty(*query.shape[:3], value.shape[-1])


def _strided(x: Tensor) -> tuple[Any, ...]:
    return (x, *x.stride())


def _strided_mask(visible: Tensor | None) -> tuple[Any, ...] | None:
    return None if visible is None else _strided(visible.view(torch.uint8))
