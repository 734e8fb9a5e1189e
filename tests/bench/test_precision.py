import torch

from linvit.bench.precision import OPERATORS, half_precision, markdown


def test_released_arrangements_compute_the_same_in_float64():
    query, key, value = torch.randn(3, 1, 2, 60, 16, dtype=torch.float64)
    for ours, released in OPERATORS.values():
        torch.testing.assert_close(released(query, key, value), ours(query, key, value), rtol=1e-11, atol=1e-12)


def test_ours_stays_finite_where_the_released_rala_overflows():
    rows = {(r.operator, r.scale, r.dtype): r for r in half_precision(tokens=(3136,))}
    overflowing = rows["rala", 16, torch.float16]
    assert overflowing.released != overflowing.released
    assert all(r.ours <= 1.5 * r.returned for r in rows.values())
    assert all(r.float32_math < r.ours < r.released for r in rows.values() if r.released == r.released)
    assert len(list(markdown(iter(rows.values())))) == len(rows) + 2
