"""Whether results are exact enough: those of a variant before its speed is shown, and those of a kernel.

A kernel's error against float64 may be twice that of plain torch in the same dtype. How far a float32 result is off
depends on the order of its sums, by a factor of three from draw to draw, so torch's own error is the root mean square
over several orders of the channels and, where not causal, of the tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linvit.kernels import softmax_attention
from linvit.layers.operator import rotated
from linvit.ops import Rotary, linear_attention

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.int8: 5e-1}
"""Largest relative L2 error of a result; float32 is what `linvit.fuse` promises, and about ten times the usual error.

In bfloat16 the released order of RALA loses 2e-2 (the page Results), a whole network with random weights 6e-3
to 5e-2: no speed is refused for the rounding of its dtype, and none is shown for a wrong result, whose error is about
1.
"""

ORDERS = 8
NAMES = ("output", "query", "key", "value")
HALF_BFLOAT16 = 2**-9  # the relative rounding error of bfloat16

Function = Callable[..., Tensor]
KERNEL: Function = partial(linear_attention, backend="triton")
PLAIN: Function = partial(linear_attention, backend="torch")
SOFTMAX_KERNEL: Function = softmax_attention


def plain_softmax(
    query: Tensor, key: Tensor, value: Tensor, *, rotary: Rotary | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """What the kernel of softmax attention replaces; arguments as there."""
    query, key = rotated(query, key, rotary)
    mask = None if key_mask is None else key_mask[:, None, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


class WrongResultError(ArithmeticError):
    """A variant computes a wrong result, so its speed means nothing."""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of expected; infinite for another shape or if a value is not finite."""
    if got.shape != expected.shape or not got.isfinite().all():
        return float("inf")
    expected = expected.detach().double()
    norm, distance = float(expected.norm()), float((got.detach().double() - expected).norm())
    return distance / (norm or 1.0)


def error_in(dtype: torch.dtype, got: Tensor, expected: Tensor) -> float:
    """relative_error, infinite for a result of another dtype."""
    return relative_error(got, expected) if got.dtype == dtype else float("inf")


def check(name: str, got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest relative error among the results of a variant."""
    error = max(relative_error(result, other) for result, other in zip(got, expected, strict=True))
    if error > tolerance:
        raise WrongResultError(
            f"{name} computes a wrong result: its relative error is {error:.1e}, expected at most {tolerance:.0e}; "
            "no speed is shown, leave the variant out or fix it"
        )
    return error


class Deviation(NamedTuple):
    """The relative L2 error of the output, or of one gradient, against float64, and the largest that is allowed."""

    name: str
    error: float
    allowed: float


def deviations(
    tensors: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    kernel: Function = KERNEL,
    plain: Function = PLAIN,
    **options: Any,
) -> list[Deviation]:
    """The errors of output and gradients of a kernel, and twice those of plain torch.

    tensors: query, key and value, (batch, heads, tokens, width). dtype: in which both compute. kernel, plain: functions
    of the three tensors and the options of `linear_attention`.
    """
    tensors = [x.to(dtype) for x in tensors]
    grad = _gradient(tensors).to(dtype)
    truth = output_and_gradients(plain, tensors, grad, torch.float64, **options)
    others = [_in_another_order(plain, tensors, grad, dtype, **options) for _ in range(ORDERS)]
    actual = output_and_gradients(kernel, tensors, grad, dtype, **options)
    unit = torch.finfo(dtype).eps / 2  # nothing is better than one rounding of its result
    rows = []
    for name, result, expected, *other in zip(NAMES, actual, truth, *others, strict=True):
        of_plain = (sum(relative_error(each, expected) ** 2 for each in other) / ORDERS) ** 0.5
        allowed = 2 * max(of_plain, unit) if expected.any() else 0.0
        rows.append(Deviation(name, error_in(dtype, result, expected), allowed))
    return rows


def deviations_in_bfloat16(
    tensors: Sequence[Tensor], kernel: Function = KERNEL, plain: Function = PLAIN, **options: Any
) -> list[Deviation]:
    """The errors of output and gradients of a kernel in bfloat16, and three times what rounding its inputs causes.

    Plain torch rounds inputs and results alone; bfloat16 products also round Rκ(q), Rκ(k) and S, each as much again.
    """
    tensors = [x.bfloat16() for x in tensors]
    # As if the inputs had been rounded just now: what they lost is the floor of any bfloat16 form.
    sharp = [x.double() * (1 + torch.empty_like(x.double()).uniform_(-1, 1) * HALF_BFLOAT16) for x in tensors]
    grad = _gradient(tensors)
    truth, floor = (output_and_gradients(plain, x, grad, torch.float64, **options) for x in (tensors, sharp))
    actual = output_and_gradients(kernel, tensors, grad, torch.bfloat16, **options)
    return [
        Deviation(name, error_in(torch.bfloat16, a, t), 3 * max(relative_error(f, t), HALF_BFLOAT16))
        for name, a, f, t in zip(NAMES, actual, floor, truth, strict=True)
    ]


def output_and_gradients(
    function: Function, tensors: Sequence[Tensor], grad: Tensor, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """The output of a function in this dtype, and the gradients of query, key and value for this one of the output."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    if options.get("rotary") is not None:
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        options["rotary"] = Rotary(*(table.to(table_dtype) for table in options["rotary"]))
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def _gradient(tensors: Sequence[Tensor]) -> Tensor:
    query, _, value = tensors
    return torch.randn(*query.shape[:3], value.shape[-1], device=query.device)


def _in_another_order(
    function: Function, tensors: Sequence[Tensor], grad: Tensor, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """What a function gives for the same tokens and channels, summed in another order."""
    query, key, value = tensors
    device = query.device
    pairs = torch.randperm(query.shape[-1] // 2, device=device)
    channels = (2 * pairs[:, None] + torch.arange(2, device=device)).flatten()
    channels = torch.cat((channels, torch.arange(len(channels), query.shape[-1], device=device)))
    values = torch.randperm(value.shape[-1], device=device)
    tokens = torch.arange(query.shape[2], device=device)
    if query.shape[2] == key.shape[2] and not options.get("causal") and "cu_seqlens" not in options:
        tokens = torch.randperm(query.shape[2], device=device)
        if options.get("key_mask") is not None:
            options["key_mask"] = options["key_mask"][..., tokens]
    if options.get("rotary") is not None:
        options["rotary"] = Rotary(*(table[tokens][:, pairs] for table in options["rotary"]))
    keys = tokens if query.shape[2] == key.shape[2] else torch.arange(key.shape[2], device=device)
    moved = [query[:, :, tokens][..., channels], key[:, :, keys][..., channels], value[:, :, keys][..., values]]
    out, dq, dk, dv = output_and_gradients(function, moved, grad[:, :, tokens][..., values], dtype, **options)
    back = [tokens.argsort(), keys.argsort(), channels.argsort(), values.argsort()]
    return [
        out[:, :, back[0]][..., back[3]],
        dq[:, :, back[0]][..., back[2]],
        dk[:, :, back[1]][..., back[2]],
        dv[:, :, back[1]][..., back[3]],
    ]
