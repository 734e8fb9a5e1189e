"""Starts the kernels of softmax attention, with their numbers of programs and block sizes."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from linvit.kernels.device_code import interpreted
from linvit.kernels.launch import RESIDENT, Inputs, Setting, processors, room, strided, strided_mask
from linvit.kernels.softmax import softmax_head, softmax_head_backward
from linvit.kernels.support import MOST_KEYS, PADDED, padded

# Queries of a tile, by the keys of a program and the wider head width, both padded. Chosen as those in `launch`: fewest
# instructions, and without a mask no registers spilled in a loop forward, next to none backward. Where a width is
# missing, programs share the keys of a head.
FORWARD = {keys: dict.fromkeys(PADDED, Setting(64, 4, 1)) for keys in (64, 128, 256)}
FORWARD[256][128] = Setting(128, 8, 1)
BACKWARD = {
    64: dict.fromkeys((16, 32, 64), Setting(64, 4, 1)),
    128: {16: Setting(64, 8, 1), 32: Setting(64, 8, 1), 64: Setting(64, 8, 1), 128: Setting(32, 8, 1)},
    256: {16: Setting(64, 8, 1), 32: Setting(64, 8, 1), 64: Setting(32, 8, 1)},
}
AMPLE = 120_000  # bytes of shared memory; where there are fewer, a program has gradients of half as many keys
FACTORS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def softmax_forward(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Output, and the masses of `softmax_head` if they are kept for gradients."""
    query, out = inputs.query, room(inputs.query, inputs.value)
    masses = query.new_empty(query.shape[:3], dtype=torch.float32) if keep else None
    keys, setting = _chosen(FORWARD, inputs)
    tiles, programs = -(-query.shape[2] // setting.rows), query.shape[0] * query.shape[1]
    splits = max(1, min(tiles, RESIDENT * processors(query.device) // programs))
    _start(softmax_head, splits, keys, setting, inputs, out, masses)
    return out, masses


def softmax_backward(grad: Tensor, inputs: Inputs, out: Tensor, masses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value = inputs[:3]
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    keys, setting = _chosen(BACKWARD, inputs, MOST_KEYS if _has_ample_memory(query.device) else MOST_KEYS // 2)
    shares = -(-key.shape[2] // keys)
    parts = dq.unsqueeze(0) if shares == 1 else query.new_empty(shares, *query.shape, dtype=torch.float32)
    _start(softmax_head_backward, shares, keys, setting, inputs, out, grad, parts, dk, dv, masses)
    return dq if shares == 1 else dq.copy_(parts.sum(0)), dk, dv


def _chosen(settings: dict[int, dict[int, Setting]], inputs: Inputs, most: int = MOST_KEYS) -> tuple[int, Setting]:
    """The keys that a program has, at most so many, and its setting."""
    width = padded(max(inputs.query.shape[-1], inputs.value.shape[-1]))
    by_keys = {keys: of[width] for keys, of in settings.items() if width in of and keys <= most}
    keys = next((keys for keys in by_keys if keys >= inputs.key.shape[2]), max(by_keys))
    return keys, by_keys[keys]


def _has_ample_memory(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= AMPLE


def _start(kernel: Any, splits: int, keys: int, setting: Setting, inputs: Inputs, *tensors: Tensor | None) -> None:
    query, key, value, rotary, visible = inputs[:5]
    (batch, heads, queries, width), value_width = query.shape, value.shape[-1]
    kernel[batch * heads, splits](
        *map(strided, (query, key, value, *tensors)),
        rotary,
        strided_mask(visible),
        (queries, queries),
        key.shape[2],
        width**-0.5,
        HEADS=heads,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        ROWS=setting.rows,
        KEYS=keys,
        COLUMNS=padded(width),
        VALUE_COLUMNS=padded(value_width),
        # float16 stays float16, unlike in `launch`: no factor here is a sum over tokens.
        DOT=tl.float32 if interpreted() else FACTORS[query.dtype],
        PRECISION="bf16" if query.dtype == torch.bfloat16 else "ieee",
        num_warps=setting.warps,
        num_stages=setting.stages,
    )
