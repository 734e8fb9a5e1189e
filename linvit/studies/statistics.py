"""Means and paired differences over seeds with confidence intervals, and the rules that decide a claim by them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

HOLDS, FAILS, UNCLEAR = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, the two-sided t-interval around it, the p-value of mean = 0, and the number of seeds."""

    mean: float
    low: float
    high: float
    p: float
    count: int


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean, t-interval and one-sample t-test of the values, one per seed.

    A single value has an unbounded interval and p = 1. Equal values have an interval of width 0, and p = 1 if they are
    zero, else 0. Without values the mean is NaN.
    """
    if len(values) < 2:
        mean = float(values[0]) if values else math.nan
        return Estimate(mean, -math.inf, math.inf, 1.0, len(values))
    mean = float(np.mean(values))
    if np.ptp(values) == 0:
        return Estimate(mean, mean, mean, float(mean == 0), len(values))
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(level)
    return Estimate(mean, float(low), float(high), float(test.pvalue), len(values))


def paired(ours: Sequence[float], others: Sequence[float], level: float = 0.95) -> Estimate:
    """Estimate of the difference ours − others, seed by seed; p is that of the paired t-test.

    Seeds with a value that is not finite are left out.
    """
    pairs = zip(ours, others, strict=True)
    return estimate([our - other for our, other in pairs if math.isfinite(our - other)], level)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple tests (Holm, Scand. J. Statist. 6, 1979): reject if the result is ≤ α."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def holm_levels(p_values: Sequence[float], alpha: float = 0.05) -> list[float]:
    """Confidence levels for the differences, such that an interval excludes zero if and only if Holm's test rejects.

    The k-th smallest of m p-values gets the level 1 − α / (m − k + 1); the first that is not rejected and all
    after it get the same level.
    """
    levels = [0.0] * len(p_values)
    stopped: float | None = None
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        share = alpha / (len(p_values) - rank)
        levels[index] = 1 - (stopped or share)
        if stopped is None and p_values[index] > share:
            stopped = share
    return levels


def verdict_higher(difference: Estimate) -> str:
    """The claim that a difference is positive: holds if its interval lies above zero, fails if it lies below."""
    if difference.low > 0:
        return HOLDS
    return FAILS if difference.high < 0 else UNCLEAR


def verdict_equal(difference: Estimate, margin: float) -> str:
    """The claim that a difference is small: holds if its interval lies within ±margin, fails if it lies outside."""
    if -margin < difference.low and difference.high < margin:
        return HOLDS
    return FAILS if difference.low > margin or difference.high < -margin else UNCLEAR


def verdict_all(verdicts: Sequence[str]) -> str:
    """A claim of several comparisons: holds if all of them hold, fails if one fails."""
    if FAILS in verdicts:
        return FAILS
    return HOLDS if verdicts and all(verdict == HOLDS for verdict in verdicts) else UNCLEAR


def verdict_share(count: int, total: int) -> str:
    """The claim that something happens in every run: holds if in all, fails if in none, undecided if in some."""
    if total and count == total:
        return HOLDS
    return FAILS if count == 0 and total else UNCLEAR
