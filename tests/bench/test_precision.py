import math

import pytest
import torch

from linvit.bench import precision
from linvit.bench.checks import WrongResultError
from linvit.bench.page import cells
from linvit.bench.precision import OPERATORS, Options, measure
from linvit.bench.progress import Progress
from linvit.bench.rows import Report


def measured(**options):
    report = Report("precision")
    measure(Options(**options), report, Progress())
    return report


def test_released_arrangements_compute_the_same_in_float64():
    query, key, value = torch.randn(3, 1, 2, 60, 16, dtype=torch.float64)
    for ours, released in OPERATORS.values():
        torch.testing.assert_close(released(query, key, value), ours(query, key, value), rtol=1e-11, atol=1e-12)


def test_another_arrangement_is_refused(monkeypatch):
    monkeypatch.setitem(precision.OPERATORS, "mala", (OPERATORS["mala"][0], OPERATORS["rala"][1]))
    with pytest.raises(WrongResultError, match="the released mala computes a wrong result"):
        measured(tokens=(49,))


def test_ours_stays_finite_where_the_released_rala_overflows():
    report = measured(tokens=(3136,))
    rows = {(row.name, row.variant, row.dtype): row for row in report.rows}
    assert math.isinf(rows["rala", "deviation 16", "float16"].errors["released"])
    for row in rows.values():
        assert row.error <= 1.5 * row.errors["returned in dtype"]
        assert row.errors["float32 math"] < row.error < row.errors["released"]
    shown = cells(report)
    assert len(shown) == 12
    assert "not finite" in {row["released"] for row in shown}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="Unknown operator 'linear', expected one of rala, mala"):
        Options(names=("linear",))
