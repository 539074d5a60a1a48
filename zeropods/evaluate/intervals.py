"""95 % intervals of shares and of means of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

Interval = tuple[float, float]

Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""
RESAMPLES = 9_999
SEED = 42


def interval(correct: int, examples: int) -> Interval | None:
    """The 95 % interval of a share; None for none of none.

    Between 0 and 1 it is the percentile bootstrap's. A resample of `examples` zeros and ones holds
    Binomial(examples, share) ones, so the percentiles of endlessly many resamples are that distribution's:
    `scipy.stats.bootstrap` without its noise and its seed. All resamples of a share of 0 or 1 are equal, which
    would claim certainty from any number of examples: there it is Wilson's interval.
    """
    if not examples:
        return None
    if correct in (0, examples):
        return wilson(correct / examples, examples)
    import numpy as np
    from scipy.special import bdtr

    at_most = bdtr(np.arange(examples + 1), examples, correct / examples)
    low, high = np.searchsorted(at_most, (0.025, 0.975))
    return int(low) / examples, int(high) / examples


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % percentile bootstrap interval of a mean of scores, the same each time.

    How often each distinct value occurs in a resample is multinomial, so the counts are drawn and not the values:
    with the few values that F1 takes, ten thousand resamples of ten thousand scores need a moment. Scores that are
    all equal have no spread to resample; if they are from 0 to 1 they get `wilson`, which holds for the widest
    spread that such a mean leaves room for.

    Returns:
        Its ends; None for no scores, and for equal ones outside of 0 to 1.
    """
    if not values:
        return None
    import numpy as np

    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    if len(distinct) == 1:
        only = float(distinct[0])
        return wilson(only, len(values)) if 0 <= only <= 1 else None
    drawn = np.random.default_rng(SEED).multinomial(len(values), counts / len(values), size=RESAMPLES)
    low, high = np.quantile(drawn @ distinct / len(values), (0.025, 0.975))
    return float(low), float(high)


def wilson(share: float, examples: int) -> Interval:
    """The 95 % score interval of Wilson (1927): never empty, never outside of 0 to 1."""
    middle = share + Z * Z / (2 * examples)
    half = Z * math.sqrt(share * (1 - share) / examples + Z * Z / (4 * examples * examples))
    whole = 1 + Z * Z / examples
    # Exactly 0 and 1 at the ends, where rounding would leave a little.
    low, high = (middle - half) / whole, (middle + half) / whole
    return (0.0 if share == 0 else max(0.0, low)), (1.0 if share == 1 else min(1.0, high))
