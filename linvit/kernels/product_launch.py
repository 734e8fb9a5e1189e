"""Starts the kernel of products, with its programs and tiles, as a torch operator."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from linvit.kernels.device_code import interpreted
from linvit.kernels.launch import processors
from linvit.kernels.product import product_tile
from linvit.kernels.support import output_size

ROWS, COLUMNS = 128, 128  # most that a program has
DEPTH = 64  # numbers that it multiplies at once
LEAST = 16  # that tensor cores multiply
FACTORS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def tile_of(rows: int, width: int, run: int, device: torch.device) -> dict[str, int]:
    """Smaller tiles where there are fewer programs than multiprocessors; no deeper than what is multiplied."""
    columns = min(COLUMNS, max(LEAST, triton.next_power_of_2(width)))
    few = -(-rows // ROWS) * -(-width // columns) < processors(device)
    height = ROWS // 2 if few else ROWS
    depth = min(DEPTH, max(LEAST, run & -run if run >= DEPTH // 2 else triton.next_power_of_2(run)))
    warps = 8 if height * columns >= ROWS * COLUMNS else 4
    return {"ROWS": height, "COLUMNS": columns, "DEPTH": depth, "num_warps": warps, "num_stages": 3}


def product_forward(
    inputs: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    eps: float | None,
    activation: str,
    residual: Sequence[Tensor],
    scale: Tensor | None,
    added: Tensor | None,
    stride: int,
    padding: int,
) -> Tensor:
    """What the operator `product` returns."""
    x, out = inputs[0], room_for(inputs, weight, stride, padding)
    (_, height, width, _), (batch, out_height, out_width, out_channels) = x.shape, out.shape
    weight = (weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1)).contiguous()
    channels = sum(each.shape[-1] for each in inputs)
    run = channels * (1 if weight.dim() == 2 else weight.shape[2])
    rows = batch * out_height * out_width
    tile = tile_of(rows, out_channels, run, x.device)
    product_tile[(-(-rows // tile["ROWS"]) * -(-out_channels // tile["COLUMNS"]),)](
        beside(inputs),
        weight,
        bias,
        beside(residual),
        scale,
        None if added is None else pixels(added),
        out,
        rows,
        (height, width, out_height, out_width),
        eps or 0.0,
        N=out_channels,
        RUN=run,
        CHANNELS=channels,
        SPLIT=x.shape[-1],
        OUT_SPLIT=residual[0].shape[-1] if residual else 0,
        TALL=1 if weight.dim() == 2 else weight.shape[1],
        STRIDE=stride,
        PADDING=padding,
        NORM=eps is not None,
        ACTIVATION=activation,
        DOT=tl.float32 if interpreted() else FACTORS[x.dtype],
        PRECISION="bf16" if x.dtype == torch.bfloat16 else "ieee",
        **tile,
    )
    return out


def beside(tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    first, second = (*map(pixels, tensors), None, None)[:2]
    return first, second


def pixels(x: Tensor) -> tuple[Tensor, int]:
    """A tensor, and how far its pixels are from each other."""
    return x, x.stride(2)


def room_for(inputs: Sequence[Tensor], weight: Tensor, stride: int, padding: int) -> Tensor:
    """An empty output."""
    batch, height, width, _ = inputs[0].shape
    size = output_size((height, width), weight, stride, padding)
    return inputs[0].new_empty(batch, *size, weight.shape[0])


@library.custom_op(
    "linvit::product",
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor weight, Tensor? bias, float? eps, str activation, Tensor[] residual, "
    "Tensor? scale, Tensor? added, int stride, int padding) -> Tensor",
)
def surrounded(inputs: Sequence[Tensor], *rest: Any) -> Tensor:
    """As `linvit.kernels.surrounded_product`."""
    with torch.cuda.device_of(inputs[0]):
        return product_forward(inputs, *rest)


@surrounded.register_fake
def _(inputs: Sequence[Tensor], weight: Tensor, *rest: Any) -> Tensor:
    return room_for(inputs, weight, *rest[-2:])
