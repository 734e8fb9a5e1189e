"""The limits of the kernels. Imports no Triton, so that it can also report that Triton is missing."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linvit.formulas import Formula
from linvit.formulas import feature_map as feature_maps
from linvit.formulas import normalizer as normalizers

JOINING = (*feature_maps.ACROSS_TOKENS, *feature_maps.ACROSS_HEADS)
FEATURE_MAPS = tuple(name for name in feature_maps.FEATURE_MAPS if name not in JOINING)
WEIGHTINGS = ("uniform", "query_mean")
NORMALIZERS = tuple(normalizers.NORMALIZERS)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PADDED = (16, 32, 64, 128)  # head widths are padded to the next of these
WIDEST = PADDED[-1]
FARTHEST = 2**31 - 1  # offsets have 32 bits
OLDEST = (7, 0)  # torch._inductor.exc: "Triton only supports devices of CUDA Capability >= 7.0"
# Triton uses tensor cores from here on; below, it multiplies float16 like float32 (triton-lang/triton#5066).
TENSOR_CORES = (8, 0)
ON_TENSOR_CORES = {"softmax": "softmax attention", "product": "a product with what surrounds it"}
LARGEST_WINDOW = 7, 7  # of depthwise convolutions, and of those one column wide and one row high
LONGEST = 11, 31
MOST_KEYS = 256  # of softmax attention, a program of which has all keys of a head at once
# Bytes of shared memory of the largest kernel with one tile on the way, by calls, dtype and padded width: the most that
# Triton 3.6 or 3.9 takes for 7.5 (the row of float32), 8.6, 9.0 or 12.0, forward or backward.
SHARED = {
    "bidirectional": {
        torch.float32: (17920, 37376, 49408, 98432),
        torch.float16: (9216, 24576, 49152, 147456),
        torch.bfloat16: (10752, 20480, 32768, 98304),
    },
    "causal": {
        torch.float32: (49408, 66048, 53376, 99328),
        torch.float16: (49152, 65536, 81920, 180224),
        torch.bfloat16: (23040, 40960, 73728, 108544),
    },
    "softmax": dict.fromkeys((torch.float16, torch.bfloat16), (47104, 61440, 73728, 163840)),
    "depthwise": dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), (1024,) * 4),  # at any width
    "product": dict.fromkeys((torch.float16, torch.bfloat16), (99328,) * 4),
}


def obstacle(query: Tensor, key: Tensor, value: Tensor, *, causal: bool | str = False, **options: Any) -> str | None:
    """Why these arguments of `linear_attention` cannot run on the kernels, as a clause; None if they can."""
    gradients = not causal and options.get("mixing") is None
    reason = inputs_obstacle(query, value, gradients=gradients, causal=causal, **options)
    if reason is not None:
        return reason
    if not torch.compiler.is_compiling() and transforms():
        return "forward-mode gradients or a transform of torch.func are active, and the kernels do not support them"
    if causal == "block" and options.get("cu_seqlens") is not None:
        return "causal='block' has no kernel for packed sequences"
    weighting, by_mass = options.get("weighting", "uniform"), uses_mass(options.get("normalizer", "divide"))
    if isinstance(weighting, Tensor):
        if by_mass and torch.is_grad_enabled() and weighting.requires_grad:
            return "the normalizer uses the mass, which has no gradient of weights that are given"
    elif weighting == "query_mean" and by_mass:
        return "the normalizer uses the mass, which has a kernel for uniform weights only"
    elif causal and weighting != "uniform":
        return f"weighting={weighting!r} has no causal kernel"
    if any(x.shape[2] * x.stride(2) + x.shape[3] * x.stride(3) > FARTHEST for x in (query, key, value)):
        return f"the tokens of a head are spread over more than {FARTHEST:,} numbers"
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"head widths are {query.shape[-1]} and {value.shape[-1]}, and the kernels support up to {WIDEST}"
    if len({query.device, key.device, value.device}) > 1:
        return f"the tensors are on {query.device}, {key.device} and {value.device}"
    columns = padded(max(query.shape[-1], value.shape[-1]))
    missing: str | None = machine_obstacle(query.device, query.dtype, columns, "causal" if causal else "bidirectional")
    return missing


def softmax_obstacle(
    query: Tensor, key: Tensor, value: Tensor, *, rotary: tuple[Tensor, Tensor] | None = None
) -> str | None:
    """Why `softmax_attention` cannot compute this on the kernels, as a clause; None if it can."""
    tensors = query, key, value
    if not torch.compiler.is_compiling() and transforms():
        return "forward-mode gradients or a transform of torch.func are active, and the kernels do not support them"
    if any(x.dim() != 4 or x.shape[:2] != query.shape[:2] or 0 in x.shape for x in tensors):
        return "the kernel needs tensors (batch, heads, tokens, width) that are not empty"
    if key.shape[2] != value.shape[2] or key.shape[3] != query.shape[3]:
        return "the keys have another number than the values, or another width than the queries"
    if key.shape[2] > MOST_KEYS or max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"the kernel supports up to {MOST_KEYS} keys and head widths up to {WIDEST}"
    for table in rotary or ():
        if table.requires_grad or any(table.shape != (x.shape[2], x.shape[3] // 2) for x in (query, key)):
            return "the kernel needs rotary tables of shape (tokens, width / 2) for all tokens, without gradients"
    if query.dtype not in DTYPES or any(x.dtype != query.dtype or x.device != query.device for x in tensors):
        return f"the tensors are {query.dtype}, or differ in dtype or device"
    if any(x.shape[2] * x.stride(2) + x.shape[3] * x.stride(3) > FARTHEST for x in tensors):
        return f"the tokens of a head are spread over more than {FARTHEST:,} numbers"
    columns = padded(max(query.shape[-1], value.shape[-1]))
    missing: str | None = machine_obstacle(query.device, query.dtype, columns, "softmax")
    return missing


def depthwise_obstacle(x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor | None]) -> str | None:
    """Why the kernels cannot convolve a map (batch, channels, height, width), as a clause; None if they can.

    weights: (channels, 1, height, width) each; others: maps of the same shape that are added or multiplied.
    """
    maps = [x, *(other for other in others if other is not None)]
    if not torch.compiler.is_compiling() and transforms():
        return "forward-mode gradients or a transform of torch.func are active, and the kernels do not support them"
    if x.dim() != 4 or 0 in x.shape or any(each.shape != x.shape for each in maps):
        return "the kernels need maps (batch, channels, height, width) of one shape that are not empty"
    if x.dtype not in DTYPES or any(each.dtype != x.dtype or each.device != x.device for each in maps):
        return f"the maps are {x.dtype}, or differ in dtype or device"
    if any(each.stride(1) != 1 for each in maps):
        return "the channels of a map are not next to each other in memory"
    for weight in weights:
        height, width = weight.shape[2:]
        small = height <= LARGEST_WINDOW[0] and width <= LARGEST_WINDOW[1]
        strip = (width == 1 and height <= LONGEST[0]) or (height == 1 and width <= LONGEST[1])
        if not (small or strip) or height % 2 == 0 or width % 2 == 0:
            return f"a weight is {height}×{width}, and the kernels support odd sizes up to 7×7, 11×1 and 1×31"
    if any(each.shape[2] * each.stride(2) + each.shape[3] * each.stride(3) > FARTHEST for each in maps):
        return f"a map is spread over more than {FARTHEST:,} numbers"
    missing: str | None = machine_obstacle(x.device, x.dtype, calls="depthwise")
    return missing


def product_obstacle(
    inputs: Sequence[Tensor],
    weight: Tensor,
    *,
    residual: Sequence[Tensor] = (),
    added: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    **_: Any,
) -> str | None:
    """Why the kernel cannot compute this, as a clause; None if it can. Arguments as of `surrounded_product`."""
    outputs = [*residual, *(() if added is None else (added,))]
    maps = [*inputs, *outputs]
    if not torch.compiler.is_compiling() and transforms():
        return "forward-mode gradients or a transform of torch.func are active, and the kernels do not support them"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*maps, weight)):
        return "a gradient is needed, which the kernel does not have"
    if any(x.dim() != 4 or 0 in x.shape for x in maps) or max(len(inputs), len(residual)) > 2:
        return "the kernel needs one or two maps (batch, height, width, channels) that are not empty"
    if inputs[0].dtype not in DTYPES or any(x.dtype != inputs[0].dtype or x.device != inputs[0].device for x in maps):
        return f"the maps are {inputs[0].dtype}, or differ in dtype or device"
    height, width = inputs[0].shape[1:3]
    sizes = [(inputs, (height, width)), (outputs, output_size((height, width), weight, stride, padding))]
    for some, size in sizes:
        if any(tuple(x.shape[:3]) != (len(inputs[0]), *size) for x in some):
            return "the maps have other sizes than the input or the output"
    if any(not _in_a_row(x) for x in maps) or (weight.dim() == 4 and inputs[0].stride(2) != inputs[0].shape[3]):
        return "the channels of a map are not next to each other in memory, or its pixels not at equal distances"
    missing: str | None = machine_obstacle(inputs[0].device, inputs[0].dtype, calls="product")
    return missing


def output_size(size: tuple[int, int], weight: Tensor, stride: int, padding: int) -> tuple[int, int]:
    """Height and width of what a linear layer, or a convolution, makes of a map of this size."""
    if weight.dim() == 2:
        return size
    height, width = ((side + 2 * padding - k) // stride + 1 for side, k in zip(size, weight.shape[2:], strict=True))
    return height, width


def _in_a_row(x: Tensor) -> bool:
    """Whether the pixels of (batch, height, width, channels) are at equal distances, and channels are neighbours."""
    height, width = x.shape[1:3]
    wanted = x.stride(2) * width * height, x.stride(2) * width, x.stride(2), 1
    return all(size == 1 or step == want for size, step, want in zip(x.shape, x.stride(), wanted, strict=True))


def inputs_obstacle(
    query: Tensor,
    value: Tensor,
    *,
    gradients: bool = False,
    feature_map: Any = "elu1",
    weighting: Any = "uniform",
    normalizer: Any = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    state: Any = None,
    shard: Any = None,
    cu_seqlens: Any = None,
    mixing: Any = None,
    causal: bool | str = False,
) -> str | None:
    """Why neither the GPU nor the CPU kernels support these arguments, as a clause; None if one of them may.

    gradients: whether the kernel supports weights that are given, and has gradients of rotary tables.
    """
    if not gradients if isinstance(weighting, Tensor) else weighting not in WEIGHTINGS:
        shown = "a Tensor" if isinstance(weighting, Tensor) else repr(weighting)
        return f"weighting is {shown}, and the kernels support {', '.join(WEIGHTINGS)}"
    if state is not None or shard is not None:
        return f"the kernels support no {'shard' if state is None else 'state'}"
    if mixing is not None:
        if causal or cu_seqlens is not None or weighting != "uniform":
            return "blocks have a kernel for bidirectional attention of a batch with equal weights only"
        if uses_mass(normalizer) and torch.is_grad_enabled():
            return "the normalizer uses the mass, which has no gradient of a mixing"
    if query.dtype not in DTYPES:
        return f"the tensors are {query.dtype}, and the kernels support float16, bfloat16 and float32"
    if not query.numel() or not value.numel():
        return "a tensor is empty"
    if rotary is not None and rotary[0].dim() != 2:
        return "the kernels need rotary tables of shape (tokens, width / 2)"
    if rotary is not None and not gradients and any(table.requires_grad for table in rotary):
        return "this kernel has no gradients of rotary tables"
    return None


def uses_mass(normalizer: str | Formula) -> bool:
    """Whether a normalizer depends on the total weight."""
    return normalizer.uses_mass if isinstance(normalizer, Formula) else normalizer == "sum"


def transforms() -> bool:
    """Whether forward-mode gradients or a transform of `torch.func` are active, which kernels do not support."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def padded(width: int) -> int:
    """The width of the tiles of heads of this width."""
    return next(columns for columns in PADDED if width <= columns)


@torch.compiler.assume_constant_result
def machine_obstacle(
    device: torch.device, dtype: torch.dtype | None = None, columns: int = PADDED[0], calls: str = "bidirectional"
) -> str | None:
    """Why kernels cannot run on such tensors, without a dtype on any of this device, as a clause; None if they can.

    calls: a key of SHARED.
    """
    if find_spec("triton") is None:
        return "Triton is not installed; pip install triton, if it supports this machine"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        oldest = TENSOR_CORES if dtype == torch.bfloat16 or calls in ON_TENSOR_CORES else OLDEST
        if capability < oldest:
            actual, lowest = ("{}.{}".format(*version) for version in (capability, oldest))
            what = ON_TENSOR_CORES.get(calls) or dtype or "any dtype"
            return f"the GPU's compute capability is {actual}, and the kernels need {lowest} for {what}"
        rows = SHARED[calls]
        kind = torch.float32 if capability < TENSOR_CORES else dtype or torch.bfloat16
        if kind not in rows:
            return f"{ON_TENSOR_CORES.get(calls, calls)} in {kind} has no kernel"
        needed = rows[kind][PADDED.index(columns)]
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if needed > limit:
            heads = f"{calls} attention in {dtype} at width {columns}"
            return f"{heads} needs {needed:,} bytes of shared memory per program, and the GPU has {limit:,}"
        return None
    if device.type == "cpu":
        from linvit.kernels.device_code import interpreted

        if interpreted():
            return None
    return f"the tensors are on {device.type}, and the kernels need CUDA tensors"
