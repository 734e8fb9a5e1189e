"""The job on depthwise convolutions: ours beside those of torch and of inductor, and the tiles of ours."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import DEVICE, medians, relative_error
from linvit.bench.clock import TensorsCall
from linvit.bench.depthwise import WORKS, Operands, Work, kernel, operands, plain, results
from linvit.files import reason_of
from linvit.kernels import depthwise_launch

CODE = ("linvit/kernels", "linvit/bench/depthwise.py")
# Channels of a group and height of a map in the stages of ravlt_tiny and care_s0 at 224 px.
STAGES = {
    "LePE and gate": ((64, 56), (128, 28), (256, 14), (512, 7)),
    "position encoding": ((64, 56), (128, 28), (256, 14), (512, 7)),
    "feed-forward": ((224, 56), (448, 28), (896, 14), (1792, 7)),
    "interaction": ((96, 28), (192, 14)),
    "local groups": ((64, 14), (96, 7)),
    "strips and local groups": ((12, 56), (24, 28)),
}
TOY = {"LePE and gate": ((5, 6),), "strips and local groups": ((3, 5),)}
VARIANTS = tuple(itertools.product((2, 4, 8), (4, 8)))
"""Columns of a thread, and programs for each multiprocessor."""
TOLERANCE = 2e-2  # relative, from torch in float64
TRAFFIC = 4.27e9  # bytes per millisecond of a copy on an H200, measured; tensors read and written once


def cases(toy: bool) -> list[Case]:
    listed = []
    for name, shapes in (TOY if toy else STAGES).items():
        for (channels, side), backward in itertools.product(shapes, (False, True)):
            words = f"{name} {'with gradients' if backward else 'forward'}, {channels} channels, {side}×{side}"
            shape = (1 if toy else 64, channels, side, side)
            calls = partial(beside_torch, name, shape, backward, toy), partial(generate, name, shape, backward)
            listed.append(Case(words, calls[0], CODE, calls[1]))
    return listed


def beside_torch(name: str, shape: tuple[int, int, int, int], backward: bool, toy: bool) -> Results:
    """Microseconds of torch, as it is and compiled, of ours, and of ours with the best other tiles."""
    work, dtype = WORKS[name], torch.float32 if toy else torch.bfloat16
    given = operands(work, shape, DEVICE[toy]).to(dtype)
    truth = result(work, given.to(torch.float64), plain, backward)
    functions: dict[str, Callable[[Work, Operands], Tensor]] = {"torch": plain}
    functions["inductor"] = torch.compile(plain, dynamic=False)
    if not toy:
        functions["ours"] = kernel
    calls = {each: partial(result, work, given, function, backward) for each, function in functions.items()}
    others = {} if toy else {str(each): partial(with_tiles, each, calls["ours"]) for each in VARIANTS}
    times, failures, measured = beside(calls, others, truth, toy)
    cells: dict[str, Any] = {"convolutions": f"{name} {'with gradients' if backward else 'forward'}"}
    cells |= {"channels": shape[1] * len(work.kernels), "height": shape[2]}
    cells |= measured
    cells |= {"floor, µs": None if backward else 1000 * floor(given)}
    return {"cells": [cells], "ms": times, "failures": failures}


def beside(
    calls: Mapping[str, TensorsCall], others: Mapping[str, TensorsCall], truth: tuple[Tensor, ...], toy: bool
) -> tuple[dict[str, float], dict[str, str], dict[str, Any]]:
    """Milliseconds of calls and of ours with other tiles, why some cannot be timed, and cells of the table.

    calls: "torch", "inductor" and, unless toy, "ours".
    """
    faults = {name: fault(call, truth) for name, call in {**calls, **others}.items()}
    times = medians({name: call for name, call in {**calls, **others}.items() if faults[name] is None}, toy)
    best = min(times.keys() & others.keys(), key=times.__getitem__, default=None)
    cells: dict[str, Any] = {
        f"{name}, µs": 1000 * times[name] if name in times else None for name in ("torch", "inductor", "ours")
    }
    cells |= {"with other tiles, µs": None if best is None else 1000 * times[best], "tiles": best}
    return times, {name: reason for name, reason in faults.items() if reason is not None}, cells


def result(
    work: Work, given: Operands, function: Callable[[Work, Operands], Tensor], backward: bool
) -> tuple[Tensor, ...]:
    """The output, and all gradients if asked for."""
    if backward:
        return tuple(results(work, given, function))
    with torch.no_grad():
        return (function(work, given),)


def fault(call: TensorsCall, truth: tuple[Tensor, ...]) -> str | None:
    """Why a call cannot be timed."""
    try:
        error = max(relative_error(got, other) for got, other in zip(call(), truth, strict=True))
    except Exception as failure:  # compilers and drivers raise errors of many classes
        return reason_of(failure)[:100]
    return None if error <= TOLERANCE else f"wrong: error {error:.1e}"


def with_tiles(variant: tuple[int, int], call: Callable[[], Any]) -> Any:
    """The call with other tiles."""
    near, waves = variant
    tiles: dict[str, Any] = {"NEAR": {11: near}, "NEAR_BACK": {11: min(near, 4)}}
    with patch.multiple(depthwise_launch, **tiles, WAVES=waves):
        return call()


def floor(given: Operands) -> float:
    """Milliseconds of a copy that reads and writes the maps once."""
    maps = [x for x in (given.x, given.y, given.gate, given.grad) if x is not None]
    return sum(x.numel() * x.element_size() for x in maps) / TRAFFIC


def generate(name: str, shape: tuple[int, int, int, int], backward: bool) -> None:
    """Generates the code that the case starts."""
    work = WORKS[name]
    x, y, gate, weights, biases, grad = operands(work, shape, "meta").to(torch.bfloat16)
    groups, around = [len(group) for group in work.kernels], depthwise_launch.Around(y, gate, work.gelu, work.residual)

    def call() -> None:
        depthwise_launch.depthwise_forward(x, weights, biases, groups, around)
        if backward:
            depthwise_launch.all_gradients(grad, x, weights, biases, *around[:2], groups, *around[2:], True, True)

    for variant in (None, *VARIANTS):
        with suppress(Exception):  # the job says which tiles have no room
            call() if variant is None else with_tiles(variant, call)
