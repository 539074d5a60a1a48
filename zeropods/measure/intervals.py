"""95 % confidence intervals: of a mean of scores, a mean of repeats, and a ratio of two means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev, variance

CONFIDENCE = 0.95
LOWER_TAIL = (1 - CONFIDENCE) / 2
"""Share of the distribution below an interval: 2.5 %."""
UPPER_END = (1 + CONFIDENCE) / 2
"""Share of the distribution below the upper end of an interval: 97.5 %."""
LEAST_REPEATS = 3
"""Least number of repeats that have an interval: the spread of fewer says next to nothing."""
RESAMPLES = 9_999
"""Number of resamples of the bootstrap."""
BOOTSTRAP_SEED = 42


def score_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of a mean of scores, the same on every call.

    For zeros and ones it is Wilson's interval of a share (Wilson 1927). For other scores it is the
    percentile bootstrap (Efron and Tibshirani 1993, chapter 13): from the 2.5 % to the 97.5 %
    quantile of the means of resamples.

    Returns:
        Its ends; None for no scores, and for equal ones other than 0 and 1, which have no spread to
        resample.
    """
    import numpy as np
    from scipy.stats import binomtest

    scores, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    number = len(values)
    are_zeros_and_ones = {0.0, 1.0}.issuperset(scores)
    if number > 0 and are_zeros_and_ones:
        ones = int(sum(values))
        interval = binomtest(ones, number).proportion_ci(CONFIDENCE, "wilson")
        return float(interval.low), float(interval.high)
    if len(scores) <= 1:
        return None
    # How often each distinct score occurs in a resample is multinomial, so these counts are drawn
    # and not the scores. F1 takes few values: ten thousand resamples of ten thousand scores take
    # only a moment.
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    shares = counts / number
    resampled_counts = generator.multinomial(number, shares, size=RESAMPLES)
    resampled_means = resampled_counts @ scores / number
    low, high = np.quantile(resampled_means, (LOWER_TAIL, UPPER_END))
    return float(low), float(high)


def t_interval(values: Sequence[float]) -> list[float] | None:
    """95 % confidence interval of the mean of repeats, by Student's t (Student 1908).

    Its ends are mean +- t(0.975, n - 1) x standard deviation / sqrt(n). It is meant for rates,
    which are never below 0, so the interval does not go below 0 either.

    Returns:
        Its ends; None for fewer than three values, whose spread says next to nothing.
    """
    number = len(values)
    if number < LEAST_REPEATS:
        return None
    center = mean(values)
    half_width = _quantile(number - 1) * stdev(values) / math.sqrt(number)
    return [max(0.0, center - half_width), center + half_width]


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float]
) -> list[float] | None:
    """95 % confidence interval of the ratio of two means.

    By the delta method, the relative variance of a ratio is the sum of those of its two means. The
    degrees of freedom of such a sum are those of Welch and Satterthwaite (Welch 1947):
    (a + b)^2 / (a^2 / (n - 1) + b^2 / (m - 1)).

    Args:
        numerators: values whose mean is divided.
        denominators: values whose mean it is divided by.

    Returns:
        Its ends, of which the lower is at least 0; None where either mean is of fewer than three
        values.
    """
    fewest = min(len(numerators), len(denominators))
    if fewest < LEAST_REPEATS:
        return None
    ratio = mean(numerators) / mean(denominators)
    variance_above = _relative_variance(numerators)
    variance_below = _relative_variance(denominators)
    relative_variance = variance_above + variance_below
    # Without a spread there are no degrees of freedom.
    if relative_variance == 0:
        return [ratio, ratio]
    square_above = variance_above**2 / (len(numerators) - 1)
    square_below = variance_below**2 / (len(denominators) - 1)
    freedom = relative_variance**2 / (square_above + square_below)
    half_width = ratio * math.sqrt(relative_variance) * _quantile(freedom)
    return [max(0.0, ratio - half_width), ratio + half_width]


def _relative_variance(values: Sequence[float]) -> float:
    """Variance of the mean of some values, as a share of the squared mean."""
    variance_of_mean = variance(values) / len(values)
    return variance_of_mean / mean(values) ** 2


def _quantile(freedom: float) -> float:
    """97.5 % quantile of Student's t with so many degrees of freedom, which a two-sided interval of
    95 % needs."""
    # Not scipy.stats, whose import takes a second.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, UPPER_END))
