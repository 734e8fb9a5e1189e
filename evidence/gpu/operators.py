"""Jobs on the operator: small sizes beside softmax attention, the share of a copy's rate, short softmax, flash_bla."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as softmax

from evidence.gpu import kernels
from evidence.gpu.carry import CARRIED, ROOT
from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import DEVICE, Row, crossover, measure, medians, plain_softmax, relative_error
from linvit.kernels import launch, softmax_attention
from linvit.kernels.softmax_launch import softmax_backward, softmax_forward
from linvit.layers.mechanisms import LINEAR_AXES
from linvit.ops import Rotary, linear_attention, rotary_2d
from linvit.ops.position import rotate

CODE = ("linvit/kernels", "linvit/ops")
OPTIONS = kernels.OPTIONS | {"linear": launch.Options("elu1", "elu1", False, "divide", 1e-6)}
ROTATED = {"rala": True, "mala": True, "linear": False}
SIDES = (7, 10, 14, 16, 18, 20, 28, 40, 56)  # of square grids of 49 to 3,136 tokens
BATCHES, HEADS = (1, 8, 64), (1, 2, 4, 8)
BESIDE = {"SDPA": False, "SDPA, rotated": True}
CROSSING = {8: "200 to 300"}  # tokens, predicted by batch
LARGE = (56, 112)
# How often a pass reads or writes a tensor of the queries' size, and the share of a copy's rate that is predicted.
PASSES = {("rala", False): 5, ("mala", False): 4, ("rala", True): 14, ("mala", True): 11}
PREDICTED = {False: 0.70, True: 0.55}
SHORT = (7, 14, 16)  # of the last two stages of a pyramid at 224 and, almost, at 256 px
# Microseconds of one launch, forward and with gradients: half of the card's issue rate.
SOFTMAX_PREDICTED = {False: (6, 35, 35), True: (15, 85, 90)}
TOLERANCE = 2e-2  # relative, from the formula in float32
FLASH = CARRIED / "flash-bidirectional-linear-attention"


def small(toy: bool) -> list[Case]:
    listed = []
    for batch, heads in ((1, 2),) if toy else itertools.product(BATCHES, HEADS):
        sides = (3, 5) if toy else SIDES
        calls = partial(beside_softmax, batch, heads, sides, toy), partial(generate, batch, heads, sides, False)
        listed.append(Case(f"{batch} × {heads} heads beside SDPA", calls[0], CODE, calls[1]))
    for (name, backward), side in itertools.product(PASSES, (5,) if toy else LARGE):
        calls = partial(beside_copy, name, side, backward, toy), partial(generate, 64, 8, (side,), backward, (name,))
        words = f"{name} {'with gradients' if backward else 'forward'}, {side**2} tokens, beside a copy"
        listed.append(Case(words, calls[0], CODE, calls[1]))
    return listed


def beside_softmax(batch: int, heads: int, sides: tuple[int, ...], toy: bool) -> Results:
    """Microseconds of our operators and of softmax attention, without and with rotation; where the lines cross."""
    table: list[dict[str, Any]] = []
    curves = {name: list[Row]() for name in (*ROTATED, *BESIDE)}
    for side in sides:
        tensors, rotary = operands(batch, heads, side, toy)
        calls: dict[str, Callable[[], Tensor]] = {name: operator(name, tensors, rotary, toy) for name in ROTATED}
        for name, call in calls.items():
            check(name, call(), tensors, rotary)
        calls |= {name: partial(of_softmax, tensors, rotary if rotated else None) for name, rotated in BESIDE.items()}
        times = medians(calls, toy)
        for name, ms in times.items():
            curves[name].append(Row(name, "", "bfloat16", batch, 1, tokens=side**2, median_ms=ms))
        table.append({"batch": batch, "heads": heads, "tokens": side**2} | {f"{n}, µs": 1000 * times[n] for n in times})
    crossings: list[dict[str, Any]] = []
    for name in ROTATED:
        cells: dict[str, Any] = {"operator": name, "batch": batch, "heads": heads}
        cells |= {f"beats {other} from": tokens(crossover(curves[name], curves[other])) for other in BESIDE}
        crossings.append(cells | {"predicted": CROSSING.get(batch)})
    return {"cells": table + crossings}


def tokens(extent: float | None) -> str:
    """Where curves cross, in words."""
    return "nowhere" if extent is None else f"{extent:.0f} tokens" if extent else "the first size"


def beside_copy(name: str, side: int, backward: bool, toy: bool) -> Results:
    """The share of the rate of a copy, in the same rounds, at which an operator reads and writes what it has to."""
    tensors, rotary = operands(1 if toy else 64, 8, side, toy)
    forward, source = operator(name, tensors, rotary, toy), tensors[0].clone()
    check(name, forward(), tensors, rotary)
    leaves, grad = [x.clone().requires_grad_() for x in tensors], torch.randn_like(source)
    tracked = operator(name, leaves, rotary, toy)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(tracked(), leaves, grad)

    copy = partial(torch.empty_like(source).copy_, source)
    times = medians({"ours": gradients if backward else forward, "copy": copy}, toy)
    share = PASSES[name, backward] / 2 * times["copy"] / times["ours"]
    cells: dict[str, Any] = {"operator": f"{name} {'with gradients' if backward else 'forward'}", "tokens": side**2}
    cells |= {"ms": times["ours"], "copy of the queries, ms": times["copy"], "share of the copy's rate": share}
    return {"cells": [cells | {"predicted": f"{PREDICTED[backward]} or more"}]}


def operands(batch: int, heads: int, side: int, toy: bool) -> tuple[list[Tensor], Rotary]:
    """Query, key and value, heads outermost, and their rotation."""
    generator = torch.Generator(DEVICE[toy]).manual_seed(0)
    shape, dtype = (batch, heads, side**2, kernels.WIDTH), torch.float32 if toy else torch.bfloat16
    drawn = [torch.randn(shape, generator=generator, device=DEVICE[toy]).to(dtype) for _ in range(3)]
    return drawn, rotary_2d((side, side), kernels.WIDTH, device=torch.device(DEVICE[toy]))


def operator(name: str, tensors: list[Tensor], rotary: Rotary | None, toy: bool) -> Callable[[], Tensor]:
    """A call with our kernels, with plain torch on a CPU."""
    rotary = rotary if ROTATED[name] else None
    backend = "torch" if toy else "triton"
    return partial(linear_attention, *tensors, rotary=rotary, backend=backend, **LINEAR_AXES[name])


def of_softmax(tensors: list[Tensor], rotary: Rotary | None) -> Tensor:
    query, key, value = tensors
    if rotary is not None:
        query, key = (rotate(x, rotary).to(x.dtype) for x in (query, key))
    return softmax(query, key, value)


def check(name: str, got: Tensor, tensors: list[Tensor], rotary: Rotary) -> None:
    """Raises ArithmeticError if a result is not what plain torch gives in float32."""
    check_error(name, relative_error(got, operator(name, [x.float() for x in tensors], rotary, True)()))


def check_error(name: str, error: float) -> None:
    """Raises ArithmeticError if it is too large."""
    if error > TOLERANCE:
        raise ArithmeticError(f"{name} is wrong: its relative error is {error:.1e}, expected at most {TOLERANCE:.0e}")


def generate(
    batch: int, heads: int, sides: tuple[int, ...], backward: bool, names: tuple[str, ...] = tuple(ROTATED)
) -> None:
    """Generates the code of the kernels that these calls start."""
    for name, side in itertools.product(names, sides):
        query, key, value = (
            torch.empty(batch, heads, side**2, kernels.WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(3)
        )
        table = torch.empty(side**2, kernels.WIDTH // 2, device="meta")
        rotary = (table, table) if ROTATED[name] else (None, None)
        inputs = launch.Inputs(query, key, value, rotary, None, None, None)
        out, states, sums = launch.forward(inputs, OPTIONS[name], backward)
        if backward and states is not None:
            launch.backward(out, inputs, states, sums, OPTIONS[name], inputs[:3])


def short_softmax(toy: bool) -> list[Case]:
    listed = []
    for backward, side in itertools.product((False, True), (3,) if toy else SHORT):
        words = f"softmax attention {'with gradients' if backward else 'forward'}, {side**2} tokens"
        calls = partial(beside_rotation, side, backward, toy), partial(generate_softmax, side, backward)
        listed.append(Case(words, calls[0], (*CODE, "linvit/layers"), calls[1]))
    return listed


def beside_rotation(side: int, backward: bool, toy: bool) -> Results:
    """Microseconds of softmax attention that rotates in its kernel, and in plain torch before, as it is or compiled."""
    tensors, rotary = projected(side, toy), rotary_2d((side, side), kernels.WIDTH, device=torch.device(DEVICE[toy]))
    functions: dict[str, Callable[..., Tensor]] = {"one kernel": softmax_attention, "rotation, SDPA": plain_softmax}
    functions["compiled"] = torch.compile(plain_softmax, dynamic=False)
    grad = torch.randn_like(tensors[2])

    def result(function: Callable[..., Tensor], dtype: torch.dtype = grad.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_(backward) for x in tensors]
        out = function(*leaves, rotary=rotary)
        return torch.autograd.grad(out, leaves, grad.to(dtype)) if backward else (out,)

    expected = result(plain_softmax, torch.float32)
    for name, function in functions.items():
        check_error(name, max(relative_error(*pair) for pair in zip(result(function), expected, strict=True)))
    times = medians({name: partial(result, function) for name, function in functions.items()}, toy)
    cells: dict[str, Any] = {"softmax attention": "with gradients" if backward else "forward", "tokens": side**2}
    cells |= {f"{name}, µs": 1000 * ms for name, ms in times.items()}
    predicted = None if toy else SOFTMAX_PREDICTED[backward][SHORT.index(side)]
    return {"cells": [cells | {"predicted, µs": predicted}]}


def projected(side: int, toy: bool, device: str | None = None) -> list[Tensor]:
    """Query, key and value in one projection with the gate, heads inside tokens."""
    batch, heads, dtype = (1, 2, torch.float32) if toy else (64, 8, torch.bfloat16)
    size = (batch, side**2, 4, heads, kernels.WIDTH)
    generator = None if device == "meta" else torch.Generator(DEVICE[toy]).manual_seed(0)
    packed = torch.randn(size, generator=generator, device=device or DEVICE[toy]).to(dtype)
    return list(packed.permute(2, 0, 3, 1, 4)[:3])


def generate_softmax(side: int, backward: bool) -> None:
    """Generates the code of the kernels that `beside_rotation` starts."""
    table = torch.empty(side**2, kernels.WIDTH // 2, device="meta")
    query, key, value = projected(side, False, "meta")
    inputs = launch.Inputs(query, key, value, (table, table), None, None, None)
    out, masses = softmax_forward(inputs, backward)
    if masses is not None:
        softmax_backward(torch.empty_like(out), inputs, out, masses)


def beside_flash_bla(toy: bool) -> list[Case]:
    code = (*CODE, str(FLASH.relative_to(ROOT)))  # once its source is there, the row is measured again
    return [
        Case(f"linear {'with gradients' if backward else 'forward'}", partial(flash_bla, backward, toy), code)
        for backward in (False, True)
    ]


def flash_bla(backward: bool, toy: bool) -> Results:
    """Linear attention without rotation with our kernels and with theirs, both checked against float64."""
    if not FLASH.exists():
        return {"cells": [{"flash_bla": f"none: {FLASH.relative_to(ROOT)} is missing, see docs/contribute/gpu.md"}]}
    if str(FLASH) not in sys.path:
        sys.path.append(str(FLASH))
    # Theirs asks for the GPU as soon as it is imported.
    variants, dtype = (("plain",), "float32") if toy else (("triton", "flash_bla"), "bfloat16")
    sizes = (49,) if toy else (784, 3136, 12544)
    options: dict[str, Any] = {"device": DEVICE[toy], "batch": 1 if toy else 8, "heads": 8, "tokens": sizes}
    options |= {"dtypes": (dtype,), "variants": variants, "rounds": 1 if toy else 9}
    table = []
    for row in measure("op", operators=("linear",), backward=backward, **options).rows:
        cells: dict[str, Any] = {"variant": row.variant if row.skipped is None else f"{row.variant}: {row.skipped}"}
        cells |= {"work": row.work, "tokens": row.tokens, "ms": row.median_ms, "± IQR": row.spread_ms}
        table.append(cells | {"error": row.error})
    return {"cells": table}
