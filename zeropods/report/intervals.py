"""The interval in which a mean of repeats lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

CONFIDENCE = 0.95


def t_interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval of the mean by Student's t: mean +- t(0.975, n - 1) x standard deviation / sqrt(n).

    For rates, which are never below 0: neither is the interval, which is wide for two repeats (t = 12.7).

    Returns:
        Its ends; None for fewer than two values, of whose spread nothing is known.
    """
    if len(values) < 2:
        return None
    # Not scipy.stats, whose import takes a second.
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    half = quantile * stdev(values) / math.sqrt(len(values))
    return [max(0.0, mean(values) - half), mean(values) + half]
