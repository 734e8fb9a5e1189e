import math

import numpy as np
import pytest
from scipy import stats

from evidence.claims import (
    found_with,
    p_above,
    p_higher,
    p_within,
    power,
    power_within,
)
from linvit.studies.table import Estimate, estimate, holm, paired


def test_interval_and_p_are_those_of_the_tables():
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764451 * math.sqrt(2.5 / 5)  # t quantile 0.975 of 4 degrees of freedom, from a table
    assert found.mean == 3
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half), rel=1e-7)
    assert found.p == pytest.approx(0.0132, abs=5e-5)  # t = 3 / √0.5 = 4.243
    assert found.count == 5


def test_a_higher_level_widens_the_interval_by_the_quantiles():
    values = [0.5, 1.5, 1.0, 2.0]
    narrow, wide = estimate(values, 0.95), estimate(values, 0.99)
    assert (wide.high - wide.mean) / (narrow.high - narrow.mean) == pytest.approx(5.840909 / 3.182446, rel=1e-6)


def test_pairs_take_away_what_seeds_share():
    ours, others = [91.0, 71.0, 81.0], [90.0, 70.0, 80.5]
    found = paired(ours, others)
    assert found.mean == pytest.approx(2.5 / 3)
    assert found.p < 0.05 < estimate([one - 80 for one in ours]).p
    assert paired(others, ours).high == pytest.approx(-found.low)


def test_a_seed_that_is_not_finite_leaves_its_pair_out():
    assert paired([1.0, math.nan, 3.0], [0.0, 0.0, 1.0]) == estimate([1.0, 2.0])
    assert paired([math.nan] * 2, [0.0] * 2).count == 0


def test_one_value_and_equal_values_have_no_width_to_estimate():
    single = estimate([2.0])
    assert (single.mean, single.low, single.high, single.p) == (2.0, -math.inf, math.inf, 1.0)
    assert estimate([0.0, 0.0]).p == 1
    assert estimate([0.5, 0.5]) == Estimate(0.5, 0.5, 0.5, 0.0, 2)
    assert math.isnan(estimate([]).mean)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_one_sided_p_values_are_halves_of_the_two_sided_one():
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert p_above(values, 0.0) == pytest.approx(estimate(values).p / 2)
    assert p_higher(values, 0.0) == pytest.approx(estimate(values).p)
    assert p_above(values, 3.0) == pytest.approx(0.5)
    assert p_higher(values, 3.5) == 1
    assert (p_above([2.0], 0.0), p_above([2.0, 2.0], 1.0), p_above([2.0, 2.0], 2.0)) == (1.0, 0.0, 1.0)


def test_equivalence_is_the_worse_of_both_sides():
    values = [0.1, 0.3, 0.2, 0.4, 0.0]  # mean 0.2, deviation 0.158, t = ±(1 ∓ 0.2)·√5/0.158
    assert p_within(values, 1.0) == pytest.approx(float(stats.t.sf(0.8 * math.sqrt(5) / math.sqrt(0.025), 4)))
    assert p_within([-value for value in values], 1.0) == pytest.approx(p_within(values, 1.0))
    assert p_within(values, 0.1) > 0.5


@pytest.mark.slow
def test_power_is_what_simulations_find():
    generator = np.random.default_rng(0)
    found = within = 0
    for _ in range(2000):
        values = generator.normal(0.8, 0.6, 5)
        found += estimate(values).p < 0.05
        within += p_within(values - 0.8, 1.0) < 0.05
    assert power(0.8, 0.6, 5, 0.05) == pytest.approx(found / 2000, abs=0.03)
    assert power_within(1.0, 0.6, 5, 0.05) == pytest.approx(within / 2000, abs=0.03)
    assert power(found_with(0.8, 0.6, 5, 0.05), 0.6, 5, 0.05) == pytest.approx(0.8)
    strict = 0.05 / 22  # two seeds find only what is hundreds of times the deviation
    assert power(found_with(0.8, 0.6, 2, strict), 0.6, 2, strict) == pytest.approx(0.8)
    assert power_within(0.1, 0.6, 5, 0.05) == 0
