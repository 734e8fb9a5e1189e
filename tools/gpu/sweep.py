"""Tile, warps, stages and splits of every kernel as it is; each result is compared with that of today's setting."""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linvit.bench.checks import relative_error
from linvit.files import reason_of
from linvit.kernels import launch
from linvit.ops import rotary_2d
from tools.gpu.jobs import Case, Results
from tools.gpu.networks import medians

CODE = ("linvit/kernels",)
OPTIONS = {
    "rala": launch.Options("elu1", "elu1", True, "divide", 1e-6),
    "mala": launch.Options("elu1", "elu1", False, "magnitude", 1e-6),
}
SHAPES = ((64, 8, (56, 56)), (64, 8, (112, 112)), (64, 8, (14, 14)), (8, 4, (28, 28)))  # batch, heads, grid of tokens
TOY_SHAPES = ((1, 2, (5, 5)),)
WIDTH = 64
TOLERANCE = 2e-2  # between two orders of bfloat16 sums, of gradients
REPEATS = 20  # of a kernel in a graph, so that starting it does not count
TOGETHER = 8  # settings timed in turn, whose results the card has to hold
Shape = tuple[int, int, tuple[int, int]]


class Setting(NamedTuple):
    """Tokens per tile, warps, tiles on the way, programs per multiprocessor, and tiles that `read` reads at once."""

    rows: int
    warps: int
    stages: int
    programs: int
    tiles: int


AS_THEY_ARE = {"forward": Setting(*launch.BLOCKS[WIDTH], launch.MOST_STAGES, 2, launch.READ_TILES)}
AS_THEY_ARE["backward"] = Setting(*launch.BACKWARD_BLOCKS[WIDTH], launch.MOST_STAGES, 2, launch.READ_TILES)
SETTINGS = [
    *itertools.starmap(Setting, itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (2, 4), (4,))),
    *itertools.starmap(Setting, itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (2,), (16, 64))),
]


class Started(NamedTuple):
    """A kernel as it was started once, to be started again alone."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    shape: dict[str, Any]

    def again(self, stages: int, repeats: int = 1) -> None:
        for _ in range(repeats):
            self.kernel[self.grid](*self.arguments, **self.shape, num_stages=stages)


def cases(toy: bool) -> list[Case]:
    return [
        Case(
            f"{name} {work}, {shape[0]} × {shape[1]} heads, {shape[2][0] * shape[2][1]} tokens",
            partial(sweep, name, work, shape, toy),
            CODE,
            partial(generate, name, work, shape),
        )
        for name, shape, work in itertools.product(OPTIONS, TOY_SHAPES if toy else SHAPES, AS_THEY_ARE)
    ]


def sweep(name: str, work: str, shape: Shape, toy: bool) -> Results:
    """Milliseconds of each kernel of a pass with each setting; a setting with a wrong result, or no room, says so."""
    call, before = passes(name, work, shape, torch.float32 if toy else torch.bfloat16), AS_THEY_ARE[work]
    repeats = 1 if toy else REPEATS
    expected, first = _started(call, before)
    settings = [setting for setting in SETTINGS if setting != before][: 1 if toy else None]
    random.Random(0).shuffle(settings)
    times: dict[str, list[float]] = {}
    failures = {}
    for begin in range(0, len(settings), TOGETHER):
        calls = _calls(first, before, repeats)  # every time, so that a drift of the clocks shows
        for setting in settings[begin : begin + TOGETHER]:
            try:
                result, started = _started(call, setting)
                error = max(relative_error(got, other) for got, other in zip(result, expected, strict=True))
            except Exception as failure:  # compilers and drivers raise errors of many classes
                failures[_words(setting)] = reason_of(failure)[:100]
                continue
            if error <= TOLERANCE:
                calls |= _calls(started, setting, repeats)
            else:
                failures[_words(setting)] = f"wrong: error {error:.1e}"
        for label, milliseconds in medians(calls, toy, rounds=5).items():
            times.setdefault(label, []).append(milliseconds / repeats)
    return {"cells": list(_best(times, _words(before), work, shape)), "ms": times, "failures": failures}


def _best(times: dict[str, list[float]], before: str, work: str, shape: Shape) -> Iterator[dict[str, Any]]:
    """For each kernel the fastest setting, beside the one of today."""
    middle = {label: statistics.median(measured) for label, measured in times.items()}
    for kernel in dict.fromkeys(label.partition(", ")[0] for label in middle):
        own = {label.partition(", ")[2]: ms for label, ms in middle.items() if label.partition(", ")[0] == kernel}
        best = min(own, key=lambda setting: own[setting])
        found = {"kernel": kernel, "pass": work, "heads": shape[0] * shape[1], "tokens": shape[2][0] * shape[2][1]}
        yield found | {"ms": own[before], "with another setting": own[best], "setting": best}


def generate(name: str, work: str, shape: Shape) -> None:
    """Generates the code of all settings, with one image, whose kernels are the same."""
    call = passes(name, work, (1, *shape[1:]), torch.bfloat16)
    for setting in SETTINGS:
        with suppress(Exception):  # the sweep says which setting has no room
            _started(call, setting)


def passes(name: str, work: str, shape: Shape, dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    """A forward or backward pass of random tensors, heads outermost."""
    batch, heads, grid = shape
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = (batch, heads, grid[0] * grid[1], WIDTH)
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(4))
    inputs = launch.Inputs(query, key, value, rotary_2d(grid, WIDTH, device=device), None, None)
    if work == "forward":
        return lambda: launch.forward(inputs, OPTIONS[name])[:1]
    _, states, sums = launch.forward(inputs, OPTIONS[name])
    return lambda: launch.backward(grad, inputs, states, sums, OPTIONS[name])


def _started(call: Callable[[], tuple[Tensor, ...]], setting: Setting) -> tuple[tuple[Tensor, ...], list[Started]]:
    """The result of a call with a setting, and the kernels that it started."""
    started: list[Started] = []

    def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **shape: Any) -> None:
        started.append(Started(kernel, grid, arguments, shape))
        started[-1].again(setting.stages)

    blocks = {WIDTH: (setting.rows, setting.warps)}
    changed = {"BLOCKS": blocks, "BACKWARD_BLOCKS": blocks, "READ_TILES": setting.tiles, "_start": start}
    with _patched(changed | {"PROGRAMS_PER_PROCESSOR": setting.programs}):
        return call(), started


def _calls(started: list[Started], setting: Setting, repeats: int) -> dict[str, Callable[[], None]]:
    """The kernels by name and setting; the second time that a kernel is started in a pass is another entry."""
    names = [call.kernel.__name__ for call in started]
    return {
        f"{name}{' again' if name in names[:number] else ''}, {_words(setting)}": partial(
            call.again, setting.stages, repeats
        )
        for number, (name, call) in enumerate(zip(names, started, strict=True))
    }


def _words(setting: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in setting._asdict().items())


@contextmanager
def _patched(values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(launch, name) for name in values}
    for name, value in values.items():
        setattr(launch, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(launch, name, value)
