"""Starts the kernels, with their numbers of programs and block sizes."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from linvit.kernels.device_code import device_code, interpreted
from linvit.kernels.merge import merge
from linvit.kernels.read import read
from linvit.kernels.short import attend_head
from linvit.kernels.state import query_mean, summarize
from linvit.kernels.state_backward import read_backward, summarize_backward
from linvit.kernels.support import padded
from linvit.kernels.tiles import pack_table


class Setting(NamedTuple):
    """Tokens per tile, warps per program, tiles on the way from memory at once, and most registers per thread."""

    rows: int
    warps: int
    stages: int = 3
    registers: int | None = None


# By the wider of the two head widths padded to a power of two. A program keeps S (width × value width, float32) and a
# few tiles at once. Chosen by what the compiler says for compute capability 9.0: no registers spilled, fewest
# instructions, and three programs of `summarize` and four of `read` on a multiprocessor (tests/kernels/budgets.yaml).
BACKWARD = {16: Setting(128, 4, 2), 32: Setting(128, 4, 2), 64: Setting(64, 4, 2), 128: Setting(64, 8, 2)}
SETTINGS = {
    "query_mean": {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4), 128: Setting(32, 8)},
    "summarize": {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4, 3, 168), 128: Setting(64, 8)},
    "merge": {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4), 128: Setting(32, 8)},
    "merge_blocks": {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4), 128: Setting(32, 8)},
    "read": {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4, 3, 128), 128: Setting(64, 4)},
    "attend_head": {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4, 3, 168), 128: Setting(64, 8)},
    "read_backward": {16: Setting(128, 4), 32: Setting(64, 4), 64: Setting(32, 4), 128: Setting(32, 8, 2)},
    "summarize_backward": BACKWARD,
}
# float16, multiplied as TF32, and float32, multiplied without tensor cores.
TF32_FORWARD = {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 4), 128: Setting(32, 8)}
TF32_BACKWARD = {16: Setting(128, 4), 32: Setting(128, 4), 64: Setting(64, 8), 128: Setting(32, 8)}
TF32_SETTINGS = {name: TF32_BACKWARD if name.endswith("backward") else TF32_FORWARD for name in SETTINGS}
FLOAT32 = {16: Setting(64, 4), 32: Setting(32, 4), 64: Setting(16, 8), 128: Setting(16, 8)}
# Causal attention keeps the scores of a chunk besides the state and the tiles.
CHUNKS = {16: Setting(64, 4), 32: Setting(64, 4), 64: Setting(64, 8), 128: Setting(32, 8)}
WIDE_CHUNKS = {16: Setting(64, 4), 32: Setting(64, 4), 64: Setting(32, 4), 128: Setting(16, 8)}
_stages: dict[tuple[Any, ...], int] = {}  # that fitted, by kernel, GPU and shape
# Programs on a multiprocessor at once, and how often they should take turns, so that few wait for the last. A state is
# as large as one or two tiles and comes from L2: with fewer tiles than this, reading it takes longer than turns save.
RESIDENT = 3
TURNS = 4
TILES = 16
# Most tokens of heads that one program computes, with at least as many heads as multiprocessors, and with fewer. Of
# shorter ones starting a second kernel would be the larger part; to be measured on a GPU (docs/contribute/gpu.md).
AT_ONCE = 1024
AT_ONCE_ALONE = 256
PACKED = 1024  # numbers that a program of `pack_table` writes
# Whether several programs share a head of few and wait for each other. Off until a GPU has shown that it is safe.
WAITING = False


class Options(NamedTuple):
    """The axes of the formula that a kernel is compiled for, and eps."""

    query_map: str
    key_map: str
    query_mean: bool
    normalizer: str
    eps: float


class Inputs(NamedTuple):
    """The tensors of a call: as in `linear_attention`, (cos, sin), given weights, and offsets of packed sequences.

    Attributes:
        parameters: rows of the queries' and the keys' feature map and of the normalizer, (heads, any, columns).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rotary: tuple[Tensor | None, Tensor | None]
    visible: Tensor | None
    weights: Tensor | None
    cu_seqlens: Tensor | None
    parameters: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


class Call:
    """A call of the kernels: its constants, and how many programs it needs.

    Attributes:
        programs: heads of all batch entries, packed sequences, or blocks.
        queries, keys: tokens of an average sequence, or a block.
        tokens, key_tokens: of a sequence and of a block.
        constants: what kernels are compiled for; each takes those that it has arguments for.
    """

    def __init__(self, inputs: Inputs, options: Options, causal: bool = False, block: int = 0) -> None:
        query, key, value, rotary, _, _, cu_seqlens, self.parameters = inputs
        batch, heads, self.queries, width = query.shape
        self.keys = key.shape[2]
        if cu_seqlens is not None:
            batch = cu_seqlens.shape[0] - 1
            self.queries = self.keys = -(-self.queries // max(batch, 1))
        self.tokens, self.key_tokens = (query.shape[2],) * 2, (key.shape[2],) * 2
        if block:
            self.tokens = self.key_tokens = query.shape[2], block
            batch, self.queries, self.keys = batch * -(-query.shape[2] // block), block, block
        self.programs = batch * heads
        self.device, self.dtype = query.device, query.dtype
        columns, value_columns = padded(width), padded(value.shape[-1])
        self.columns = max(columns, value_columns)
        query_map, key_map = device_code(options.query_map, True), device_code(options.key_map, True)
        normalizer = device_code(options.normalizer, False)
        half = query.dtype == torch.bfloat16
        self.size = state_size(width, value.shape[-1])
        self.constants: dict[str, Any] = {
            "HEADS": heads,
            "WIDTH": width,
            "VALUE_WIDTH": value.shape[-1],
            "SIZE": self.size,
            "COLUMNS": columns,
            "VALUE_COLUMNS": value_columns,
            "QUERY_MAP": query_map.functions,
            "KEY_MAP": key_map.functions,
            "POSITIVE": query_map.positive,
            "NORMALIZER": normalizer.functions,
            # Without a rotation the gradient of the queries is a small difference of products with the values' mean.
            "RAW": half and normalizer.proportional and rotary[0] is not None,
            **_precision(query.dtype, causal),
        }
        self._rotary = rotary

    @cached_property
    def table(self) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines as float16 pairs in int32 for bfloat16, whose rounding is eight times as large.

        Making it takes a launch, which only long sequences are worth.
        """
        cos, sin = self._rotary
        if cos is None or sin is None or self.dtype != torch.bfloat16:
            return cos, sin
        pairs = torch.empty(cos.shape, dtype=torch.int32, device=cos.device)
        pack_table[(-(-cos.numel() // PACKED),)](cos, sin, pairs, cos.numel(), NUMBERS=PACKED)
        return pairs, None

    def parameters_with_sums(self, of_queries: str, of_keys: str, step: int = 1) -> tuple[Any, ...]:
        """The rows of parameters, and room for their gradients by program and tile; None where there are none.

        of_queries, of_keys: kernels that fill it, whose tiles advance by a multiple of `step` tokens.
        """
        sums: list[Any] = []
        kernels = (of_queries, self.tokens), (of_keys, self.key_tokens), (of_queries, self.tokens)
        for rows, (kernel, tokens) in zip(self.parameters, kernels, strict=True):
            tiles = -(-tokens[1] // (self.setting(kernel).rows // step * step))
            sums.append(strided(None if rows is None else rows.new_zeros(self.programs, tiles, *rows.shape[1:])))
        return *self.parameters, *sums

    def parameter_gradients(self, parameters: tuple[Any, ...]) -> list[Tensor | None]:
        """What kernels have written there, (heads, any, columns) each."""
        heads = self.constants["HEADS"]
        return [None if x is None else x[0].unflatten(0, (-1, heads)).sum((0, 2)) for x in parameters[3:]]

    def setting(self, name: str) -> Setting:
        """That of a kernel."""
        half = self.dtype == torch.bfloat16
        if name.startswith("chunked"):
            return (CHUNKS if half else WIDE_CHUNKS)[self.columns]
        if self.dtype == torch.float32:
            return FLOAT32[self.columns]
        return (SETTINGS if half else TF32_SETTINGS)[name][self.columns]

    def splits(self, name: str, tokens: int) -> int:
        """Programs among which the tokens of a head are distributed."""
        tiles = -(-tokens // self.setting(name).rows)
        slots = RESIDENT * processors(self.device)
        filled, turns = (-(-turn * slots // max(self.programs, 1)) for turn in (1, TURNS))
        return max(1, min(tiles, max(filled, min(turns, tiles // TILES))))

    def splits_at_once(self) -> int:
        """Programs for each head if all is computed in one launch; 0 if the sequences are too long for that."""
        if max(self.queries, self.keys) > (AT_ONCE if self.programs >= processors(self.device) else AT_ONCE_ALONE):
            return 0
        slots = RESIDENT * processors(self.device) // 2  # all must be there at once, or they wait for ever
        tiles = -(-max(self.queries, self.keys) // self.setting("attend_head").rows)
        return max(1, min(tiles, slots // max(self.programs, 1))) if WAITING else 1

    def start(self, kernel: Any, splits: int, *arguments: Any, programs: int | None = None) -> None:
        """Starts a kernel with as many tiles on the way as there is shared memory for."""
        rows, warps, most, registers = self.setting(kernel.fn.__name__)
        constants = self.constants | {"ROWS": rows}
        for name, columns in (("FOLD", "COLUMNS"), ("VALUE_FOLD", "VALUE_COLUMNS")):
            # Rows that the threads of a program load at once, 16 bytes each.
            constants[name] = min(rows, max(32 * warps * (16 // self.dtype.itemsize) // constants[columns], 1))
        shape = {name: constant for name, constant in constants.items() if name in kernel.arg_names}
        key = (kernel, torch.cuda.current_device() if torch.cuda.is_available() else None, *shape.items())
        stages = _stages.get(key, most)
        limit = {} if registers is None else {"maxnreg": registers}
        while True:
            staged = {"STAGES": stages} if "STAGES" in kernel.arg_names else {}
            try:
                kernel[programs or self.programs, splits](
                    *arguments, **shape, **staged, **limit, num_warps=warps, num_stages=stages
                )
            except OutOfResources:
                if stages == 1:
                    raise
                stages -= 1
            else:
                _stages[key] = stages
                return


def state_size(width: int, value_width: int) -> int:
    """Floats per state: S, z, u, r, n and shift, rounded up to 64 bytes so that all rows are aligned."""
    size = width * value_width + 2 * width + value_width + 2
    return -(-size // 16) * 16


def forward(inputs: Inputs, options: Options, keep: bool = True) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, the heads' states, and with query-mean weights each head's sum of κ(q) and its number of queries.

    keep: whether the states are needed, for gradients.
    """
    query, key, value, rotary, visible, weights, cu_seqlens, _ = inputs
    call = Call(inputs, options)
    scale, mask, out = query.shape[-1] ** -0.5, strided_mask(visible), room(query, value)
    splits = call.splits_at_once()
    if splits:
        shape = call.programs, splits
        sums = query.new_empty(*shape, query.shape[-1] + 1, dtype=torch.float32) if options.query_mean else None
        states = query.new_empty(*shape, call.size, dtype=torch.float32) if keep or WAITING else None
        counters = query.new_zeros(call.programs, 3, dtype=torch.int32) if WAITING else None
        tensors = (
            *(strided(x) for x in (query, key, value, out)),
            call.parameters,
            rotary,
            mask,
            strided(weights),
            sums,
            states,
        )
        call.start(
            attend_head, splits, *tensors, counters, cu_seqlens, call.tokens, call.key_tokens, scale, options.eps
        )
        if not keep or states is None:
            return out, None, None
        return out, _merged(call, states), None if sums is None else _total(sums)
    sums = None
    if options.query_mean:
        splits = call.splits("query_mean", call.queries)
        sums = query.new_empty(call.programs, splits, query.shape[-1] + 1, dtype=torch.float32)
        call.start(query_mean, splits, strided(query), mask, call.parameters, sums, cu_seqlens, call.tokens)
        sums = _total(sums) if keep else sums  # one of gradients is as they need it; `summarize` adds the others itself
    states = summaries(call, inputs, mask, sums, scale)
    read_with(call, query, out, states, cu_seqlens, scale, options.eps)
    return out, states, sums


def summaries(call: Call, inputs: Inputs, mask: Any, sums: Tensor | None, scale: float) -> Tensor:
    """The state of each program's sequence or block."""
    splits = call.splits("summarize", call.keys)
    states = inputs.query.new_empty(call.programs, splits, call.size, dtype=torch.float32)
    tensors = strided(inputs.key), strided(inputs.value), call.parameters, call.table, mask, strided(inputs.weights)
    parts = sums.shape[1] if sums is not None and sums.dim() == 3 else 1
    call.start(summarize, splits, *tensors, sums, parts, states, inputs.cu_seqlens, call.key_tokens, scale)
    return _merged(call, states)


def read_with(
    call: Call, query: Tensor, out: Tensor, states: Tensor, cu_seqlens: Tensor | None, scale: float, eps: float
) -> None:
    splits = call.splits("read", call.queries)
    tensors = strided(query), strided(out), call.parameters, call.table, states, cu_seqlens
    call.start(read, splits, *tensors, call.tokens, scale, eps)


def backward(
    grad: Tensor,
    inputs: Inputs,
    states: Tensor,
    sums: Tensor | None,
    options: Options,
    into: Sequence[Tensor],
    tables: bool = False,
    block: int = 0,
    mixture: Any = None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Writes the gradients of query, key and value into three tensors.

    states: what heads read; with causal blocks what these see, with a mixture of blocks what it has mixed.

    Returns those of given weights; if asked for of the tables, whose cosines and sines are side by side; and those of
    parameters.
    """
    query, key, value, _, visible, weights, cu_seqlens, _ = inputs
    call = Call(inputs, options, block=block)
    parameters = call.parameters_with_sums("read_backward", "summarize_backward")
    scale, mask = query.shape[-1] ** -0.5, strided_mask(visible)
    dq, dk, dv = into
    dweights = None if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
    of_queries, of_keys = (torch.empty_like(x, dtype=torch.float32) if tables else None for x in (query, key))
    query_splits, key_splits = call.splits("read_backward", call.queries), call.splits("summarize_backward", call.keys)
    state_grads = query.new_empty(call.programs, query_splits, call.size, dtype=torch.float32)

    def over_queries(dq: Tensor | None, mean_grads: Tensor | None, state_grads: Tensor | None) -> None:
        table_grads = None if dq is None else strided(of_queries)
        tensors = strided(query), strided(grad), strided(dq), table_grads, parameters, call.table, mask
        rest = sums, mean_grads, states, state_grads, cu_seqlens, call.tokens, scale, options.eps
        call.start(read_backward, query_splits, *tensors, *rest)

    over_queries(None if options.query_mean else dq, None, state_grads)
    state_grads = _total(state_grads)
    if mixture is not None:
        states, state_grads = mixture.states, mixture.backward(state_grads)
    if block:
        states, state_grads = _of_blocks(states, state_grads, query, value)
    mean_grads = None
    if options.query_mean:
        mean_grads = query.new_empty(call.programs, key_splits, query.shape[-1], dtype=torch.float32)
    tensors = *(strided(x) for x in (key, value, dk, dv, of_keys)), parameters, call.table, mask
    rest = sums, mean_grads, states, state_grads, cu_seqlens, call.key_tokens, scale
    call.start(summarize_backward, key_splits, *tensors, strided(weights), strided(dweights), *rest)
    if mean_grads is not None:
        over_queries(dq, _total(mean_grads), None)
    both = None if of_queries is None or of_keys is None else of_queries.sum((0, 1)) + of_keys.sum((0, 1))
    return dweights, both, call.parameter_gradients(parameters)


def _of_blocks(states: Tensor, grads: Tensor, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What `summarize_backward` needs for the tokens of a block, which all later blocks see.

    states, grads: (batch × blocks × heads, size), of what each block sees. A state is a mean, and centred; the sums
    from which all of them are made have the sum of the gradients over the later blocks. The result is written as a
    state of mass 1 with the mean u and r of all tokens, near which products are exact, and its gradient.
    """
    (batch, heads, _, width), value_width = query.shape, value.shape[-1]
    sizes = [width * value_width, width, value_width, width]
    sizes.append(grads.shape[-1] - sum(sizes))
    _, _, u, r, mass = states.view(batch, -1, heads, states.shape[-1]).split(sizes, dim=-1)
    S_grad, z_grad, u_grad, r_grad, _ = grads.view(batch, -1, heads, grads.shape[-1]).split(sizes, dim=-1)
    n = mass[..., :1].masked_fill(mass[..., :1] == 0, 1)
    last_u, last_r = (x[:, -1:].expand_as(x) for x in (u, r))
    matrix = S_grad.unflatten(-1, (width, value_width))
    r_grad = r_grad + (matrix @ (last_u - u).unsqueeze(-1)).squeeze(-1)
    u_grad = u_grad + ((last_r - r).unsqueeze(-2) @ matrix).squeeze(-2)
    of_later = [(x / n).flip(1).cumsum(1).flip(1) for x in (S_grad, z_grad, u_grad, r_grad)]
    nothing = torch.zeros_like(mass)
    mass = nothing.index_fill(-1, torch.zeros(1, dtype=torch.int64, device=mass.device), 1)
    state = torch.cat((torch.zeros_like(S_grad), torch.zeros_like(z_grad), last_u, last_r, mass), dim=-1)
    return state.flatten(0, 2), torch.cat((*of_later, nothing), dim=-1).flatten(0, 2)


def _precision(dtype: torch.dtype, causal: bool) -> dict[str, Any]:
    """The precision of the products' factors; sums are always float32.

    bfloat16 inputs are multiplied as they are. float16 is raised to TF32, which has its ten bits and a wider range:
    a state of large keys and values would not fit float16. float32 stays float32. The interpreter knows only float32.
    """
    if dtype == torch.bfloat16:
        return {"DOT": tl.float32 if interpreted() else tl.bfloat16, "PRECISION": "bf16"}
    if interpreted() or dtype == torch.float32:
        return {"DOT": tl.float32, "PRECISION": "ieee"}
    # In causal attention scores and sums are rounded once more.
    return {"DOT": tl.float32, "PRECISION": "tf32x3" if causal else "tf32"}


def _merged(call: Call, states: Tensor) -> Tensor:
    """The states of heads, from those of their splits."""
    programs, splits, size = states.shape
    if splits == 1:
        return states.squeeze(1)
    merged = states.new_empty(programs, size)
    call.start(merge, 1, states, merged, splits)
    return merged


def _total(sums: Tensor) -> Tensor:
    return sums.sum(1) if sums.shape[1] > 1 else sums.squeeze(1)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def room(query: Tensor, value: Tensor) -> Tensor:
    """An empty output in the memory order of the values, so that the next layer needs no copy."""
    if query.shape[2] == value.shape[2]:
        return torch.empty_like(value)
    return value.new_empty(*query.shape[:3], value.shape[-1])


def strided(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x, *x.stride())


def strided_mask(visible: Tensor | None) -> tuple[Any, ...] | None:
    return None if visible is None else strided(visible.view(torch.uint8))
