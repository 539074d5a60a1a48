"""Steady steps: which of a run's steps count, their rate, and how sure a ratio of two rates is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 1_000
FEWEST = 3


def steady_steps(seconds: Sequence[float], warm: int) -> list[float]:
    """Steps after the first `warm`, at least without the first; the later half where fewer than three would be left."""
    late = list(seconds[max(1, warm) :])
    return late if len(late) >= FEWEST else list(seconds[max(1, len(seconds) // 2) :])


def rate(seconds: Sequence[float], batch: int) -> float | None:
    """Samples per second; None without a step."""
    return batch * len(seconds) / sum(seconds) if seconds and sum(seconds) > 0 else None


def ratio_of_rates(
    ours: Sequence[float], batch: int, control: Sequence[float], control_batch: int
) -> tuple[float, float, float] | None:
    """Our samples/s over the control's, and its 95 % interval by bootstrap over steps; None without steps of both."""
    if not ours or not control:
        return None
    generator = np.random.default_rng(0)
    drawn = [batch / _means(ours, generator), control_batch / _means(control, generator)]
    low, high = np.percentile(drawn[0] / drawn[1], [2.5, 97.5])
    value = (batch / float(np.mean(ours))) / (control_batch / float(np.mean(control)))
    return value, float(low), float(high)


def _means(seconds: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    values = np.asarray(seconds)
    return np.array([values[generator.integers(0, len(values), len(values))].mean() for _ in range(DRAWS)])
