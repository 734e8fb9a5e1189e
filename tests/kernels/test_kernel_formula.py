"""Traced formulas as Triton, derivatives included, against torch in float64."""

import pytest
import torch
from formula_examples import (
    EPS,
    MAPS,
    RULES,
    SCALE,
    WIDTH,
    assert_as_good_as_torch,
    gradients,
    held,
    inputs,
    rows,
    traced,
)
from tiers import quick

from linvit.kernels.formula.triton_source import triton_functions, triton_source

QUICK = (
    "elu1",
    "relu",
    "exp",
    "identity",
    "expm1",
    "softmax",
    "unit",
    "power",
    "directions",
    "outer",
    "learned unit",
    "divide",
    "gated",
)
NAMES = [(name, False) for name in MAPS] + [(name, True) for name in RULES]
CHOSEN = [(name, rule) for name, rule in NAMES if name in QUICK]
ROWS, COLUMNS = 16, 32
"""More than the examples have tokens and channels."""


KERNEL = """import triton
import triton.language as tl


@triton.jit
def kernel({arguments}, HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    head = tl.program_id(0) % HEADS
    rows = tl.program_id(0) * TOKENS + row
    tiles = rows[:, None] * WIDTH + column[None, :]
    shown, inside = row < TOKENS, (row < TOKENS)[:, None] & (column < WIDTH)[None, :]
    {body}
"""


def kernel_of(formula):
    """A kernel that calls the formula's functions for one head, and whether each of its results has channels."""
    results = len(formula.outputs)
    tiles = [formula.is_map] * (results + len(formula.gradients)) + [varies for _, varies in formula.sums]
    given = ["x", "dy"] if formula.is_map else ["dgain", "dlevel", "num", "den", "mass"]
    parameters = [x.data for x in formula.parameters]
    place, fill = ("tiles, mask=inside", 0.0) if formula.is_map else ("rows, mask=shown", 1.0)
    body = [f"{name} = tl.load({name} + {place}, other={fill})" for name in given]
    for x in formula.parameters:
        place = "head * WIDTH + column, mask=column < WIDTH, other=0.0" if x.axes else "head * WIDTH"
        body.append(f"{x.data} = tl.load({x.data} + {place})")
    outs = [f"out_{index}" for index in range(len(tiles))]
    rest = f"({', '.join(parameters)},)" if parameters else "None"
    if formula.factor is not None:
        body += ["out_0, out_1 = forward(x)", "out_1 *= dy"]
    elif formula.is_map:
        body.append(f"{', '.join(outs[:1])} = forward(x, {rest}, WIDTH)")
        body.append(f"{', '.join(outs[1:])} = backward(x, dy, {rest}, WIDTH)")
    else:
        rest = f"num, den, mass, {SCALE}, {EPS}{f', {rest}' if parameters else ''}"
        body.append(f"{', '.join(outs[:2])} = forward({rest})")
        body.append(f"{', '.join(outs[2:])} = backward(dgain, dlevel, {rest})")
    for index, tile in enumerate(tiles):
        place = "tiles, out_{0}, mask=inside" if tile else "rows, out_{0}, mask=shown"
        body.append(f"tl.store(out{index} + {place.format(index)})")
    arguments = given + parameters + [f"out{index}" for index in range(len(tiles))]
    return KERNEL.format(arguments=", ".join(arguments), body="\n    ".join(body)), tiles


def by_triton(formula, learned, rule, device):
    functions = triton_functions(triton_source(formula), formula.digest)
    source, tiles = kernel_of(formula)
    kernel = triton_functions(source, f"test {formula.digest}", ("kernel",), functions)["kernel"]
    given = [x for group in reversed(rows(torch.float32)) for x in group] if rule else list(inputs(torch.float32))
    batch, heads, tokens, width = (*given[0].shape[:3], WIDTH)
    outs = [torch.empty(batch, heads, tokens, width if tile else 1, device=device) for tile in tiles]
    tensors = held(formula, rule, torch.float32)
    parameters = [x.expand(heads, width).float().contiguous() for x in formula.parameter_tensors(tensors)]
    arguments = [x.to(device) for x in (*given, *parameters)]
    kernel[(batch * heads,)](*arguments, *outs, HEADS=heads, TOKENS=tokens, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS)
    outs = [x.cpu() for x in outs]
    count = len(outs) - len(formula.sums)
    return outs[:count] + gradients(formula, learned, [x.sum(2, keepdim=True) for x in outs[count:]], tensors)


@pytest.mark.parametrize("case", quick(NAMES, CHOSEN), ids=str)
def test_triton_is_as_good_as_torch(device, case):
    name, rule = case
    formula, example, learned = traced(name, rule)
    assert_as_good_as_torch(by_triton(formula, learned, rule, device), example, rule)
