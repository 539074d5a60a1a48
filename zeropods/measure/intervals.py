"""95 % confidence intervals of what is measured: a mean of scores, a mean of repeats, a ratio of
two means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev, variance

CONFIDENCE = 0.95
LEAST_REPEATS = 3
"""Least number of repeats that have an interval: the spread of fewer says next to nothing."""
RESAMPLES = 9_999
BOOTSTRAP_SEED = 42


def score_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of a mean of scores, the same on every call.

    For zeros and ones it is Wilson's interval (1927). For other scores its ends are those of the
    percentile bootstrap: how often each distinct value occurs in a resample is multinomial, so the
    counts are drawn and not the values; with the few values that F1 takes, ten thousand resamples
    of ten thousand scores take only a moment.

    Returns:
        Its ends; None for no scores, and for equal ones that are neither 0 nor 1, which have no
        spread to resample.
    """
    import numpy as np
    from scipy.stats import binomtest

    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    number = len(values)
    if number and {0.0, 1.0}.issuperset(distinct):
        low, high = binomtest(int(sum(values)), number).proportion_ci(CONFIDENCE, "wilson")
        return float(low), float(high)
    if len(distinct) <= 1:
        return None
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    drawn_counts = generator.multinomial(number, counts / number, size=RESAMPLES)
    means = drawn_counts @ distinct / number
    low, high = np.quantile(means, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def t_interval(values: Sequence[float]) -> list[float] | None:
    """95 % confidence interval of the mean by Student's t: mean +- t(0.975, n - 1) x standard
    deviation / sqrt(n).

    It is meant for rates, which are never below 0, so the interval does not go below 0 either.

    Returns:
        Its ends; None for fewer than three values, whose spread says next to nothing.
    """
    if len(values) < LEAST_REPEATS:
        return None
    half = _quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return [max(0.0, mean(values) - half), mean(values) + half]


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> list[float] | None:
    """95 % interval of the ratio of two means: relative variances added (delta method), degrees of
    freedom by Welch.

    Returns:
        Its ends; None where either mean is of fewer than three values.
    """
    if min(len(ones), len(others)) < LEAST_REPEATS:
        return None
    parts = [_relative_variance(ones), _relative_variance(others)]
    whole = sum(parts)
    ratio = mean(ones) / mean(others)
    if whole == 0:
        return [ratio, ratio]
    squares = [
        parts[0] ** 2 / (len(ones) - 1),
        parts[1] ** 2 / (len(others) - 1),
    ]
    freedom = whole**2 / sum(squares)
    half = ratio * math.sqrt(whole) * _quantile(freedom)
    return [max(0.0, ratio - half), ratio + half]


def _relative_variance(values: Sequence[float]) -> float:
    """Variance of the mean of some values, as a share of the squared mean."""
    return variance(values) / len(values) / mean(values) ** 2


def _quantile(freedom: float) -> float:
    """Quantile of Student's t for a two-sided interval."""
    # Not scipy.stats, whose import takes a second.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
