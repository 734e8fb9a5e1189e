"""`linvit bench op` on a few tokens."""

import pytest
import torch
from tiers import quick

from linvit.bench import operators
from linvit.bench.operators import Case, build_call, grid, measure, operands
from linvit.bench.options import OperatorOptions
from linvit.bench.rows import Progress, Report
from linvit.layers.mechanisms import LINEAR_AXES


def measured(**options):
    report = Report("op")
    measure(OperatorOptions(**{"tokens": (12,), "rounds": 1, "heads": 2, "width": 8, **options}), report, Progress())
    return report


@pytest.mark.parametrize("backward", [False, True])
def test_every_operator_is_checked_and_timed(backward):
    names = [name for name in LINEAR_AXES if name != "agent"]
    report = measured(operators=names, variants=("plain", "reference", "sdpa"), backward=backward)
    times = {(row.name, row.variant): row for row in report.rows}
    assert all(times[name, "plain"].median_ms > 0 for name in names)
    assert times["rala", "reference"].ratio > 0
    assert times["rala", "plain"].against.keys() == {"reference", "sdpa"}
    assert times["rala", "plain"].work == ("forward_backward" if backward else "forward")
    assert "not implemented" in times["inline", "reference"].skipped
    assert 0 < times["mala", "plain"].error < 1e-5


@pytest.mark.parametrize("layout", quick(operators.LAYOUTS, operators.LAYOUTS[:1]))
@pytest.mark.parametrize("dtype", operators.DTYPES)
def test_layouts_and_dtypes(layout, dtype):
    report = measured(operators=("rala",), dtypes=("float32", dtype), layout=layout)
    assert all(row.median_ms > 0 for row in report.rows)


def test_layouts_differ_in_strides_alone():
    cases = {layout: Case("rala", "plain", "float32", 6, 2, 3, 4, layout=layout) for layout in operators.LAYOUTS}
    drawn = {layout: operands(case)[0][0] for layout, case in cases.items()}
    assert all(torch.equal(x, drawn["heads"]) for x in drawn.values())
    assert drawn["tokens"].stride() == (72, 4, 12, 1) == drawn["own"].stride()
    assert drawn["map"].stride() == (72, 24, 1, 6)


@pytest.mark.parametrize("variant", ["plain", "sdpa"])
def test_the_exact_results_of_single_images_are_those_of_the_batch(variant):
    case = Case("rala", variant, "float32", 12, batch=3, heads=2, width=8, backward=True)
    inputs, gradient = operands(case)
    whole = operators._call(operators._function(case, torch.float64), [x.double() for x in inputs], gradient.double())
    for result, expected in zip(operators.exact(case), whole(), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_what_cannot_run_says_why():
    rows = {row.variant: row for row in measured(operators=("rala",), variants=("triton", "sdpa"), sdpa_tokens=3).rows}
    assert "triton" in rows["triton"].skipped.lower()
    assert "up to 3 tokens" in rows["sdpa"].skipped
    assert rows["sdpa"].median_ms is None


def test_growth_and_crossover_are_found():
    found = measured(operators=("linear",), tokens=(784, 1568)).findings
    assert found["growth"].keys() == {"linear plain float32", "linear reference float32", "softmax sdpa float32"}


def test_grids_are_the_most_square():
    assert [grid(tokens) for tokens in (49, 196, 12, 13)] == [(7, 7), (14, 14), (3, 4), (1, 13)]


@pytest.mark.slow
def test_compiled():
    case = Case("rala", "compiled", "float32", 49, heads=2, width=16)
    torch.testing.assert_close(build_call(case)()[0], operators.exact(case)[0].float(), rtol=1e-4, atol=1e-5)
