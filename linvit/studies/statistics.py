"""Means and paired differences over seeds, with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


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
    """Estimate of the mean of `differences`; p is that of the paired t-test."""
    return estimate(differences(ours, others), level)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple tests (Holm, Scand. J. Statist. 6, 1979): reject if the result is ≤ α."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def differences(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """ours − others, seed by seed; seeds with a value that is not finite are left out."""
    return [our - other for our, other in zip(ours, others, strict=True) if math.isfinite(our - other)]
