"""The tests that decide a claim, and what they can find."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats
from scipy.optimize import brentq

HOLDS, FAILS, UNCLEAR = "holds here", "not reproduced here", "undecided"


def p_above(values: Sequence[float], bound: float) -> float:
    """The p-value of the one-sided t-test that the mean is above a bound; 1 for fewer than two values."""
    if len(values) < 2:
        return 1.0
    if np.ptp(values) == 0:
        return float(values[0] <= bound)
    return float(stats.ttest_1samp(values, bound, alternative="greater").pvalue)


def p_higher(values: Sequence[float], bound: float) -> float:
    """The two-sided p-value if the mean is above a bound, else 1."""
    return min(1.0, 2 * p_above(values, bound))


def p_within(values: Sequence[float], margin: float) -> float:
    """The p-value of the equivalence test that the mean lies within ±margin: two one-sided tests (Schuirmann, 1987)."""
    return max(p_above(values, -margin), p_above([-value for value in values], -margin))


def power(effect: float, deviation: float, count: int, alpha: float) -> float:
    """The probability that a two-sided paired t-test at level alpha finds an effect.

    effect, deviation: mean and standard deviation of the differences. count: number of seeds.
    """
    critical = stats.t.ppf(1 - alpha / 2, count - 1)
    return float(stats.nct.sf(critical, count - 1, effect / deviation * math.sqrt(count)))


def power_within(margin: float, deviation: float, count: int, alpha: float) -> float:
    """The probability that the equivalence test at level alpha finds a difference of 0 to be within ±margin."""
    critical = stats.t.ppf(1 - alpha, count - 1)
    return max(0.0, 2 * float(stats.nct.sf(critical, count - 1, margin / deviation * math.sqrt(count))) - 1)


def found_with(probability: float, deviation: float, count: int, alpha: float) -> float:
    """The smallest effect that `power` says is found with that probability."""
    high = deviation
    while power(high, deviation, count, alpha) < probability:
        high *= 2
    return float(brentq(lambda effect: power(effect, deviation, count, alpha) - probability, 0.0, high))


def verdict_share(count: int, total: int) -> str:
    """The claim that something happens in every run: holds if in all, fails if in none, undecided if in some."""
    if total and count == total:
        return HOLDS
    return FAILS if count == 0 and total else UNCLEAR
