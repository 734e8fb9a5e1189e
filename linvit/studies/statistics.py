"""Means and paired differences over seeds, with intervals, and the rules that turn them into verdicts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

HOLDS, FAILS, UNCLEAR = "holds", "does not hold", "cannot tell at this size"


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

    A single value has an unbounded interval and p = 1; values that are all the same have an interval without width, and
    p is 1 where they are zero and 0 elsewhere. No value at all gives a mean that is NaN.
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
    """Estimate of ours − others, seed by seed; the p-value is that of the paired t-test.

    A seed in which either is not finite is left out.
    """
    pairs = zip(ours, others, strict=True)
    return estimate([our - other for our, other in pairs if math.isfinite(our - other)], level)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm, Scand. J. Statist. 6, 1979): reject where the adjusted one is ≤ α."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def holm_levels(p_values: Sequence[float], alpha: float = 0.05) -> list[float]:
    """Confidence levels at which each difference's interval excludes zero exactly where Holm's procedure rejects.

    The k-th smallest of m p-values has 1 − α / (m − k + 1), until the first that is not rejected; it and all after it
    share its level.
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
    """The claim that a difference is positive, by its corrected interval: above zero, below zero, or around it."""
    if difference.low > 0:
        return HOLDS
    return FAILS if difference.high < 0 else UNCLEAR


def verdict_equal(difference: Estimate, margin: float) -> str:
    """The claim that a difference is smaller than a margin: its interval lies inside ±margin, beyond it, or neither."""
    if -margin < difference.low and difference.high < margin:
        return HOLDS
    return FAILS if difference.low > margin or difference.high < -margin else UNCLEAR


def verdict_all(verdicts: Sequence[str]) -> str:
    """A claim of several comparisons fails with any of them and holds only with all of them."""
    if FAILS in verdicts:
        return FAILS
    return HOLDS if verdicts and all(verdict == HOLDS for verdict in verdicts) else UNCLEAR


def verdict_share(count: int, total: int) -> str:
    """The claim that something happens in every run: in all, in none, or in some."""
    if total and count == total:
        return HOLDS
    return FAILS if count == 0 and total else UNCLEAR
