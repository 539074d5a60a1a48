"""A measured figure beside the one that was asked for, and functions that measure commands and
repeats."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

RESAMPLES = 2_000


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a benchmark's result."""

    name: str
    value: float | None
    """None where it cannot be measured on this machine; `note` says why."""
    unit: str
    asked: str = "-"
    interval: tuple[float, float] | None = None
    """95 % confidence interval, where the figure comes from repeats or from many answers."""
    note: str = ""

    def line(self) -> str:
        """The figure as a line for people."""
        value = "not measured"
        if self.value is not None:
            value = f"{self.value:.3g} {self.unit}"
        if self.interval is not None:
            low, high = self.interval
            value += f" [{low:.3g}, {high:.3g}]"
        return f"{self.name:58} {value:34} asked: {self.asked}  {self.note}"


def called(*words: object) -> tuple[float, int]:
    """Seconds and peak resident bytes of `zeropods WORDS`, as a user calls it, in a process of its
    own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "zeropods", *map(str, words)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, words
    seconds = time.perf_counter() - began
    return seconds, 1024 * usage.ru_maxrss


def ratio(
    name: str, slow: Sequence[float], fast: Sequence[float], asked: str, note: str = ""
) -> Figure:
    """How many times faster `fast` is: the ratio of median seconds for the same work, with a
    bootstrap interval."""

    def ratio_of_medians(slow: np.ndarray, fast: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(slow, axis) / np.median(fast, axis)

    drawn = bootstrap(
        (slow, fast), ratio_of_medians, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    low, high = drawn.confidence_interval
    return Figure(
        name=name,
        value=statistics.median(slow) / statistics.median(fast),
        unit="x",
        asked=asked,
        interval=(float(low), float(high)),
        note=note,
    )


def median(name: str, seconds: Sequence[float], asked: str, note: str = "") -> Figure:
    """The median of repeats; the note gives the slowest."""
    repeats = f"median of {len(seconds)}, slowest {max(seconds):.2f} s"
    if note:
        repeats = f"{note}; {repeats}"
    value = statistics.median(seconds)
    return Figure(name=name, value=value, unit="s", asked=asked, note=repeats)
