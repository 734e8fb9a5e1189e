"""Jobs on the kernels as they are: may they be used, and tile, warps, stages and splits of each."""

import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from evidence.gpu.carry import ROOT
from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import Deviation, gpu, medians, relative_error
from linvit.files import reason_of
from linvit.kernels import launch
from linvit.ops import rotary_2d

CODE = ("linvit/kernels", "linvit/ops")
TESTS = ("tests/kernels/test_gpu.py", "tests/ops/test_backend.py")
OPTIONS = {
    "rala": launch.Options("elu1", "elu1", True, "divide", 1e-6),
    "mala": launch.Options("elu1", "elu1", False, "magnitude", 1e-6),
}
SHAPES = ((64, 8, (56, 56)), (64, 8, (112, 112)), (64, 8, (14, 14)), (8, 4, (28, 28)))  # batch, heads, grid of tokens
WIDTH = 64
TOLERANCE = 2e-2  # between two orders of bfloat16 sums, of gradients
SAME = 1000  # calls whose results have to be the same bits: a race shows rarely
REPEATS = 20  # of a kernel in a graph, so that starting it does not count
TOGETHER = 8  # settings timed in turn, whose results the card has to hold
Shape = tuple[int, int, tuple[int, int]]
Pass = Callable[[], tuple[Tensor, ...]]


class Variant(NamedTuple):
    """Setting of a kernel, and how programs are made: turns, and fewest tiles for each, see `launch`."""

    setting: launch.Setting
    turns: int
    tiles: int


WORK = ("forward", "backward")
VARIANTS = [
    Variant(launch.Setting(*tile, registers), turns, tiles)
    for tile in itertools.product((32, 64, 128), (4, 8), (2, 3, 4))
    for registers, turns, tiles in ((None, 4, 16), (168, 4, 16), (None, 2, 16), (None, 4, 64))
]


def correctness(toy: bool) -> list[Case]:
    shapes = ((20, 16),) if toy else gpu.SHAPES
    with patch.multiple(
        gpu, SHAPES=shapes, machine_obstacle=lambda *_, **__: None
    ):  # what cannot run says so in its row
        named = gpu.cases(torch.device("cpu" if toy else "cuda"))
    listed = [Case(name, partial(exactness, name, errors), CODE, errors) for name, errors in named.items()]
    sizes: list[Shape] = [(1, 2, (5, 5))] if toy else [(64, 8, (14, 14)), (8, 4, (56, 56))]
    bits = []
    for name, work, shape in itertools.product(OPTIONS, WORK, sizes):
        words = f"{name} {work}, {shape[0]} × {shape[1]} heads, grid {shape[2]}, {SAME} times"
        bits.append(Case(words, partial(same_bits, name, work, shape, toy), CODE))
    if toy:
        return [case for case in listed if case.name.startswith("mala, float32")] + bits[:1]
    together = Case("processes that train together", train_together, ("linvit/runs", "linvit/tasks"))
    return [*listed, *bits, Case("tests for GPUs", tests, CODE), together]


def exactness(name: str, errors: Callable[[], list[Deviation]]) -> Results:
    check = gpu.checked(name, errors)
    worst = dict(zip(("worst of", "error", "allowed"), check.worst or (None,) * 3, strict=True))
    return {"cells": [{"case": name, **worst, "result": check.failure or "passed"}]}


def same_bits(name: str, work: str, shape: Shape, toy: bool) -> Results:
    """Whether a pass gives the same bits every time; raises ArithmeticError if one result differs."""
    call = passes(name, work, shape, torch.float32 if toy else torch.bfloat16)
    first, times = call(), 2 if toy else SAME
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(times - 1):
        different += torch.stack([(got != other).any() for got, other in zip(call(), first, strict=True)]).any()
    if count := int(different):
        raise ArithmeticError(f"{count} of {times} results differ from the first")
    return {"cells": [{"pass": f"{name} {work}", "heads": shape[0] * shape[1], "grid": str(shape[2]), "equal": times}]}


def tests() -> Results:
    output = _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *TESTS])
    return {"cells": [{"tests for GPUs": output.strip().splitlines()[-1].strip("= ")}]}


def train_together() -> Results:
    """NCCL with one process, and two processes on one card with gloo, each against one process alone."""
    answers = json.loads(_run(["tests/together.py", "gpu"]))
    names = ("NCCL, one process", "gloo, two processes on one card, SyncBatchNorm")
    table = [{"processes": name, "difference": each["difference"]} for name, each in zip(names, answers, strict=True)]
    return {"cells": table, "losses": answers}


def _run(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-450:])
    return done.stdout


def settings(work: str, toy: bool) -> list[Case]:
    shapes = ((1, 2, (5, 5)),) if toy else SHAPES
    listed = []
    for name, shape in itertools.product(OPTIONS, shapes):
        words = f"{name} {work}, {shape[0]} × {shape[1]} heads, {shape[2][0] * shape[2][1]} tokens"
        calls = partial(sweep, name, work, shape, toy), partial(generate, name, work, shape)
        listed.append(Case(words, calls[0], CODE[:1], calls[1]))
    return listed


forward_settings, backward_settings = (partial(settings, work) for work in WORK)


def sweep(name: str, work: str, shape: Shape, toy: bool) -> Results:
    """Milliseconds of each kernel of a pass with each setting; a setting with a wrong result, or no room, says so."""
    call = passes(name, work, shape, torch.float32 if toy else torch.bfloat16)
    expected, first = started(call, None)
    others = VARIANTS[: 1 if toy else None]
    random.Random(0).shuffle(others)
    times: dict[str, list[float]] = {}
    failures, repeats = {}, 1 if toy else REPEATS
    for begin in range(0, len(others), TOGETHER):
        calls = dict(first)  # every time, so that a drift of the clocks shows
        for variant in others[begin : begin + TOGETHER]:
            try:
                result, again = started(call, variant)
                error = max(relative_error(got, other) for got, other in zip(result, expected, strict=True))
            except Exception as failure:  # compilers and drivers raise errors of many classes
                failures[str(variant)] = reason_of(failure)[:100]
                continue
            if error <= TOLERANCE:
                calls |= again
            else:
                failures[str(variant)] = f"wrong: error {error:.1e}"
        repeated = {label: lambda call=call: [call() for _ in range(repeats)] for label, call in calls.items()}
        for label, milliseconds in medians(repeated, toy, rounds=5).items():
            times.setdefault(label, []).append(milliseconds / repeats)
    middle = {label: statistics.median(measured) for label, measured in times.items()}
    table = []
    for kernel in [label.partition(", ")[0] for label in first]:
        best = min((label for label in middle if label.startswith(f"{kernel}, ")), key=lambda label: middle[label])
        cells = {"kernel": kernel, "pass": f"{name} {work}", "heads": shape[0] * shape[1], "grid": str(shape[2])}
        cells |= {"ms": middle[f"{kernel}, now"], "with another setting": middle[best]}
        table.append(cells | {"setting": best.partition(", ")[2]})
    return {"cells": table, "ms": times, "failures": failures}


def generate(name: str, work: str, shape: Shape) -> None:
    """Generates the code of all settings, with one image, whose kernels are the same."""
    call = passes(name, work, (1, *shape[1:]), torch.bfloat16)
    for variant in (None, *VARIANTS):
        with suppress(Exception):  # the sweep says which setting has no room
            started(call, variant)


def passes(name: str, work: str, shape: Shape, dtype: torch.dtype) -> Pass:
    """A forward or backward pass of random tensors, heads outermost."""
    batch, heads, grid = shape
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = (batch, heads, grid[0] * grid[1], WIDTH)
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(4))
    inputs = launch.Inputs(query, key, value, rotary_2d(grid, WIDTH, device=device), None, None, None)
    if work == "forward":
        return lambda: launch.forward(inputs, OPTIONS[name])[:1]
    _, states, sums = launch.forward(inputs, OPTIONS[name])
    assert states is not None

    def gradients() -> tuple[Tensor, ...]:
        into = tuple(map(torch.empty_like, inputs[:3]))
        launch.backward(grad, inputs, states, sums, OPTIONS[name], into)
        return into

    return gradients


def started(call: Pass, variant: Variant | None) -> tuple[tuple[Tensor, ...], dict[str, Callable[[], object]]]:
    """The result of a pass with a variant, or as it is, and its kernels, by name, to be started again alone."""
    again: dict[str, Callable[[], object]] = {}
    original = launch.Call.start
    changed: dict[str, Any] = {"TURNS": launch.TURNS}
    if variant is not None:
        setting = {WIDTH: variant.setting}
        settings = dict.fromkeys(launch.SETTINGS, setting)
        changed = {"SETTINGS": settings, "FLOAT32": setting, "TURNS": variant.turns, "TILES": variant.tiles}

    def start(this: launch.Call, kernel: Any, splits: int, *arguments: Any) -> None:
        name = kernel.fn.__name__
        name += " again" * any(label.startswith(f"{name}, ") for label in again)  # RALA's read_backward runs twice

        def go() -> None:
            with patch.multiple(launch, **changed):
                original(this, kernel, splits, *arguments)

        again[f"{name}, {variant or 'now'}"] = go
        go()

    with patch.object(launch.Call, "start", start), patch.multiple(launch, **changed):
        return call(), again
