"""Growth and crossover of curves that are known."""

import pytest

from linvit.bench.clock import Timing
from linvit.bench.kinds import measure
from linvit.bench.rows import Report, Row, Trial, crossover, curves, exponent, fill


def curve(name, times, **options):
    return [Row(name, "plain", "float32", 1, 1, tokens=tokens, median_ms=ms, **options) for tokens, ms in times.items()]


def test_exponent_of_a_power():
    assert exponent(curve("a", {n: 3 * n**1.5 for n in (10, 100, 5000)})) == pytest.approx(1.5)
    assert exponent(curve("a", {10: 1e9, 100: 1, 1000: 10}), least_extent=100) == pytest.approx(1)
    assert exponent(curve("a", {10: 1})) is None


def test_crossover_lies_where_the_lines_meet():
    steep = curve("softmax", {n: n**2 for n in (10, 100, 1000)})
    flat = curve("linear", {n: 250 * n for n in (10, 100, 1000)})
    assert crossover(flat, steep) == pytest.approx(250)
    assert crossover(steep, flat) is None
    assert crossover(curve("fast", {10: 1, 100: 1}), steep) == 0
    assert crossover(curve("elsewhere", {7: 1}), steep) is None


def test_curves_are_apart_where_anything_but_the_extent_differs():
    rows = curve("a", {100: 2, 10: 1}) + curve("a", {10: 1}, work="forward_backward")
    rows.append(Row("a", "plain", "float32", 8, 1, tokens=10, skipped="no time"))
    assert {name: len(line) for name, line in curves(rows).items()} == {
        "a plain float32": 2,
        "a plain float32, forward + backward": 1,
    }
    assert [row.extent for row in curves(rows)["a plain float32"]] == [10, 100]


def test_a_row_as_json_has_the_fields_that_are_promised():
    row = Row("rala", "fused", "float32", 1, 1, size=(3, 5))
    timings = {
        "it": Timing([0.01, 0.02, 0.03]),
        "plain": Timing([0.04, 0.04, 0.06]),
        "peer": Timing([0.02, 0.02, 0.03]),
    }
    rivals = {"sdpa": "peer", "reference": "none", "self": "it"}
    fill(Trial(row, "it", base="plain", rivals=rivals), timings, "cpu")
    found = Report("op", rows=[row]).as_dict()["rows"][0]
    assert found["ratio"] == pytest.approx(2)
    assert found["base"] == "rala plain float32"
    assert found["against"] == {"sdpa": pytest.approx(1)}
    assert {"name", "variant", "dtype", "batch", "threads", "median_ms", "spread_ms"} < set(found)
    assert row.extent == 15


def test_an_unknown_kind_or_option_is_one_sentence():
    with pytest.raises(ValueError, match="`kind` is 'ops', expected one of op, model, train"):
        measure("ops")
    with pytest.raises(ValueError, match=r"Unknown option 'round', expected one of .* Did you mean 'rounds'"):
        measure("op", round=3)
