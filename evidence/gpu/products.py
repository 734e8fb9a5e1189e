"""The job on layers with what surrounds them: our kernel beside torch and inductor's templates, and its tiles."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from evidence.gpu.depthwise import TRAFFIC, beside
from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import DEVICE
from linvit.bench.product import LAYERS, Layer, cast_to, operands
from linvit.kernels import product_launch, surrounded_product
from linvit.layers.product import composed

CODE = ("linvit/kernels", "linvit/bench/product.py")


def norm_and(out: int, width: int, **rest: Any) -> Layer:
    return Layer((width,), out, norm=True, **rest)


# Layers and heights of their maps in the stages of ravlt_tiny and care_s0 at 224 px.
STAGES = {
    "norm and projections": tuple((norm_and(4 * c, c), side) for c, side in ((64, 56), (128, 28), (256, 14), (512, 7))),
    "norm and GELU": tuple(
        (norm_and(7 * c // 2, c, activation="gelu"), side) for c, side in ((64, 56), (128, 28), (256, 14), (512, 7))
    ),
    "sum": tuple(
        (Layer((7 * c // 2,), c, residual=(c,)), side) for c, side in ((64, 56), (128, 28), (256, 14), (512, 7))
    ),
    "groups, layer scale and sum": (
        (Layer((64,), 32, residual=(8, 24), scaled=True, added=True), 56),
        (Layer((512,), 128, residual=(32, 96), scaled=True, added=True), 14),
    ),
    "convolution": (
        (Layer((3,), 32, 3, 2, 1, activation="gelu"), 224),
        (Layer((32,), 32, 3, 1, 1, activation="gelu"), 112),
        (Layer((64,), 128, 3, 2, 1), 56),
        (Layer((256,), 512, 3, 2, 1), 14),
    ),
}
TOY = {name: ((LAYERS[name], 6),) for name in ("norm and GELU", "convolution")}
VARIANTS = tuple(itertools.product((64, 128), (64, 128), (32, 64)))
"""Pixels and channels of a tile, and numbers that it multiplies at once."""


def cases(toy: bool) -> list[Case]:
    listed = []
    for name, layers in (TOY if toy else STAGES).items():
        for layer, side in layers:
            words = f"{name}, {sum(layer.inputs)} to {layer.out} channels, {side}×{side}"
            measure = partial(beside_torch, name, layer, side, toy)
            listed.append(Case(words, measure, CODE, partial(generate, layer, side)))
    return listed


def beside_torch(name: str, layer: Layer, side: int, toy: bool) -> Results:
    """Microseconds of torch, as it is and by inductor's templates, of ours, and of ours with the best other tiles."""
    dtype, shape = (torch.float32, (1, side, side)) if toy else (torch.bfloat16, (64, side, side))
    given = cast_to(dtype, operands(layer, shape, DEVICE[toy]))
    truth = result(composed, cast_to(torch.float64, given))
    mode = "default" if toy else "max-autotune-no-cudagraphs"
    functions: dict[str, Callable[..., Tensor]] = {"torch": composed}
    functions["inductor"] = torch.compile(composed, dynamic=False, mode=mode)
    if not toy:
        functions["ours"] = surrounded_product
    calls = {each: partial(result, function, given) for each, function in functions.items()}
    others = {} if toy else {str(each): partial(with_tiles, each, calls["ours"]) for each in VARIANTS}
    times, failures, measured = beside(calls, others, truth, toy)
    cells: dict[str, Any] = {"layer": name, "channels": f"{sum(layer.inputs)} to {layer.out}", "height": side}
    cells |= measured
    cells |= {"floor, µs": 1000 * floor(given, truth[0])}
    return {"cells": [cells], "ms": times, "failures": failures}


def result(function: Callable[..., Tensor], given: dict[str, Any]) -> tuple[Tensor]:
    with torch.no_grad():
        return (function(**given),)


def with_tiles(variant: tuple[int, int, int], call: Callable[[], Any]) -> Any:
    """The call with other tiles."""
    rows, columns, depth = variant
    with patch.multiple(product_launch, ROWS=rows, COLUMNS=columns, DEPTH=depth):
        return call()


def floor(given: dict[str, Any], out: Tensor) -> float:
    """Milliseconds of a copy that reads and writes the maps once."""
    maps = [*given["inputs"], *given["residual"], *(() if given["added"] is None else (given["added"],))]
    return (sum(x.numel() for x in maps) + out.numel()) * maps[0].element_size() / TRAFFIC


def generate(layer: Layer, side: int) -> None:
    """Generates the code that the case starts."""
    given = cast_to(torch.bfloat16, operands(layer, (64, side, side), "meta"))

    def call() -> None:
        product_launch.product_forward(**given)

    for variant in (None, *VARIANTS):
        with suppress(Exception):  # the job says which tiles have no room
            call() if variant is None else with_tiles(variant, call)
