"""Statistics of a column of numbers that are not kept."""

from __future__ import annotations

import math

from zeropods.measure.rank import Sampled


class Series:
    """Count, largest, smallest and mean of the numbers that were added; None is not a number."""

    def __init__(self) -> None:
        self.samples = 0
        self.total = 0.0
        self.largest = -math.inf
        self.smallest = math.inf

    def add(self, value: float | None) -> None:
        """Count a value in, if it was measured."""
        if value is None:
            return
        self.total += value
        self.largest = max(self.largest, value)
        self.smallest = min(self.smallest, value)
        self.samples += 1

    def sampled(self) -> Sampled | None:
        """The statistics; None where nothing was measured."""
        if self.samples == 0:
            return None
        mean = self.total / self.samples
        return Sampled(samples=self.samples, peak=float(self.largest), mean=mean, minimum=float(self.smallest))
