"""Traced formulas as Triton, derivatives included, against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from formula_examples import (
    EPS,
    FORMULAS,
    GENERATED,
    HEADS,
    MAPS,
    RULES,
    SCALE,
    WIDTH,
    WITHIN_TOKENS,
    assert_as_good_as_torch,
    assert_kernel_as_good_as_torch,
    generated_options,
    gradients,
    held,
    inputs,
    over_heads,
    rows,
    traced,
)
from hypothesis import HealthCheck, given, settings
from tiers import quick

from linvit.formulas.triton_source import triton_functions, triton_source
from linvit.ops import linear_attention, rotary_1d

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
    if formula.is_map:
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


SHIFTS = torch.linspace(0.5, 1.5, 20)


def sharp(x):
    y = torch.relu(x).square()
    return y / (y.norm(dim=-1, keepdim=True) + 1e-6)


def shifted(x):
    return F.softplus(x * SHIFTS.to(x))


def doubtful(num, den, mass, scale, eps):
    gain = torch.sigmoid(num) / (den + eps)
    return gain, gain * num + 0.1 * den


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"feature_map": sharp, "weighting": "query_mean"}, {}),
        ({"feature_map": shifted, "normalizer": doubtful}, {"rotary": True, "key_mask": True}),
        ({"feature_map": (sharp, shifted), "normalizer": doubtful}, {"causal": True}),
        pytest.param(
            {"feature_map": ("elu1", sharp), "normalizer": "magnitude"}, {"rotary": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"feature_map": shifted, "weighting": "query_mean"},
            {"rotary": True, "key_mask": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sharp", "masked", "causal", "magnitude", "query mean"],
)
def test_attention_with_functions_of_a_user(device, tiled, options, seen):
    tiled(rows=16, processors=2)
    options = options | {"causal": seen.get("causal", False)}
    mask = torch.rand(2, 45) > 0.4 if "key_mask" in seen else None
    rotary = rotary_1d(45, 20) if "rotary" in seen else None
    assert_kernel_as_good_as_torch("triton", device, options, rotary=rotary, key_mask=mask)


def learned_options(scalar, channels, gate):
    def normalizer(num, den, mass, scale, eps):
        share = gate.sigmoid() / (den.abs() + eps)
        return share, num * share + scale * (1 - gate)

    return {"feature_map": lambda x: F.softplus(x * scalar + channels) * scalar.sigmoid(), "normalizer": normalizer}


@pytest.mark.parametrize(
    "form",
    quick(
        [
            {},
            {"weighting": "query_mean"},
            {"causal": True},
            {"causal": "block", "block_size": 7},
            {"causal": "block", "block_size": 40},
        ],
        [{"weighting": "query_mean"}, {"causal": True}],
    ),
    ids=str,
)
def test_tensors_that_functions_hold_get_gradients(device, tiled, form):
    tiled(rows=16, processors=2)
    learned = [*GENERATED, torch.full((HEADS, 1, 1), 0.3)]
    mask = torch.rand(2, 45, generator=torch.Generator().manual_seed(0)) > 0.4
    rotary = None if form else rotary_1d(45, 20)
    options = lambda *tensors: learned_options(*tensors) | form  # noqa: E731
    assert_kernel_as_good_as_torch("triton", device, options, learned, rotary=rotary, key_mask=mask)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(FORMULAS)
def test_a_hundred_generated_formulas(formula):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert_kernel_as_good_as_torch("triton", device, generated_options(formula), GENERATED)


@pytest.mark.parametrize("name", quick(WITHIN_TOKENS, ["linear_angular", "rala_mala", "focused"]))
def test_every_mechanism_whose_maps_combine_no_tokens(device, tiled, name):
    tiled(rows=16, processors=2)
    assert_kernel_as_good_as_torch("triton", device, WITHIN_TOKENS[name])


@pytest.mark.parametrize(
    "form", [{}, {"weighting": "query_mean", "normalizer": "magnitude"}, {"causal": True}], ids=str
)
def test_features_over_heads_come_from_torch(device, tiled, form):
    tiled(rows=16, processors=2)
    mask = torch.rand(2, HEADS, 45, generator=torch.Generator().manual_seed(0)) > 0.4
    options = lambda *tensors: over_heads(*tensors) | form  # noqa: E731
    assert_kernel_as_good_as_torch("triton", device, options, GENERATED, rotary_1d(45, 20), mask)


def test_a_tensor_that_a_function_holds_is_read_at_each_call(device):
    factor = torch.ones(20, device=device)
    query, key, value = (torch.randn(1, 2, 30, 20, device=device) for _ in range(3))

    def scaled(x):
        return torch.relu(x * factor) + 0.1

    outs = []
    for _ in range(2):
        outs.append(linear_attention(query, key, value, feature_map=scaled, backend="triton"))
        expected = linear_attention(query, key, value, feature_map=scaled, backend="torch")
        torch.testing.assert_close(outs[-1], expected, rtol=1e-4, atol=1e-5)
        factor.mul_(torch.linspace(0.2, 3, 20, device=device))
    assert not torch.allclose(*outs, atol=1e-3)


def test_a_number_that_a_function_uses_is_that_of_the_call(device):
    query, key, value = (torch.randn(1, 1, 20, 16, device=device) for _ in range(3))
    for power in (1.0, 3.0):

        def mapped(x):
            return torch.relu(x) * power + 0.1  # noqa: B023

        kernel = linear_attention(query, key, value, feature_map=mapped, normalizer="none", backend="triton")
        plain = linear_attention(query, key, value, feature_map=mapped, normalizer="none", backend="torch")
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


def test_what_cannot_run_says_which_operation_and_where(device):
    query, key, value = (torch.randn(1, 1, 20, 16, device=device) for _ in range(3))
    reason = r"the queries' feature_map: `cumsum` \(test_kernel_formula.py, line \d+\)"
    with pytest.raises(ValueError, match=f"which cannot run: .*{reason}"):
        linear_attention(query, key, value, feature_map=lambda x: x.cumsum(2), backend="triton")
    assert linear_attention(query, key, value, feature_map=lambda x: x.cumsum(2)).shape == value.shape
