import math

import pytest

from linvit.studies.statistics import (
    FAILS,
    HOLDS,
    UNCLEAR,
    Estimate,
    estimate,
    holm,
    holm_levels,
    paired,
    verdict_all,
    verdict_equal,
    verdict_higher,
    verdict_share,
)


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


def test_holm_levels_by_hand():
    # ascending: .005 ≤ .05/4, .01 ≤ .05/3, .03 > .05/2 stops, .04 shares its level
    assert holm_levels([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
        [1 - 0.05 / 3, 1 - 0.05 / 2, 1 - 0.05 / 2, 1 - 0.05 / 4]
    )


def test_corrected_intervals_exclude_zero_exactly_where_holm_rejects():
    samples = [
        [3.0, 3.4, 2.7, 3.1],
        [1.0, 0.2, 1.5, 0.9],
        [0.4, -0.3, 0.6, 0.2],
        [-2.0, -2.1, -2.6, -2.2],
        [0.1, 0.3, 0.2, 0.9],
    ]
    p_values = [estimate(sample).p for sample in samples]
    rejected = [p <= 0.05 for p in holm(p_values)]
    intervals = [estimate(sample, level) for sample, level in zip(samples, holm_levels(p_values), strict=True)]
    assert [one.low > 0 or one.high < 0 for one in intervals] == rejected
    assert True in rejected
    assert False in rejected


@pytest.mark.parametrize(
    ("low", "high", "higher", "equal"),
    [
        (0.1, 0.9, HOLDS, HOLDS),
        (-0.9, -0.1, FAILS, HOLDS),
        (-0.5, 0.5, UNCLEAR, HOLDS),
        (-2.0, 2.0, UNCLEAR, UNCLEAR),
        (0.5, 2.0, HOLDS, UNCLEAR),
        (1.5, 2.0, HOLDS, FAILS),
        (-3.0, -1.5, FAILS, FAILS),
        (0.0, 0.5, UNCLEAR, HOLDS),
        (-math.inf, math.inf, UNCLEAR, UNCLEAR),
    ],
)
def test_verdict_follows_the_interval(low, high, higher, equal):
    difference = Estimate((low + high) / 2, low, high, 0.5, 5)
    assert verdict_higher(difference) == higher
    assert verdict_equal(difference, margin=1.0) == equal


def test_a_claim_of_several_parts():
    assert verdict_all([HOLDS, HOLDS]) == HOLDS
    assert verdict_all([HOLDS, UNCLEAR]) == UNCLEAR
    assert verdict_all([HOLDS, UNCLEAR, FAILS]) == FAILS
    assert verdict_all([]) == UNCLEAR
    assert [verdict_share(part, 5) for part in (5, 3, 0)] == [HOLDS, UNCLEAR, FAILS]
    assert verdict_share(0, 0) == UNCLEAR
