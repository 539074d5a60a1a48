"""A measured figure beside the one that was asked for, and functions that measure commands and repeats."""

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
        value = "not measured" if self.value is None else f"{self.value:.3g} {self.unit}"
        interval = "" if self.interval is None else f" [{self.interval[0]:.3g}, {self.interval[1]:.3g}]"
        return f"{self.name:58} {value + interval:34} asked: {self.asked}  {self.note}"


def called(*words: object) -> tuple[float, int]:
    """Seconds and peak resident bytes of `zeropods WORDS`, as a user calls it, in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "zeropods", *map(str, words)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, words
    return time.perf_counter() - began, 1024 * used.ru_maxrss


def ratio(name: str, slow: Sequence[float], fast: Sequence[float], asked: str, note: str = "") -> Figure:
    """How many times faster `fast` is: the ratio of median seconds for the same work, with a bootstrap interval."""

    def of(slow: np.ndarray, fast: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(slow, axis) / np.median(fast, axis)

    low, high = bootstrap((slow, fast), of, n_resamples=2_000, method="percentile", rng=0).confidence_interval
    value = statistics.median(slow) / statistics.median(fast)
    return Figure(name=name, value=value, unit="x", asked=asked, interval=(float(low), float(high)), note=note)


def median(name: str, seconds: Sequence[float], asked: str, note: str = "") -> Figure:
    """The median of repeats; the note gives the slowest."""
    said = f"median of {len(seconds)}, slowest {max(seconds):.2f} s"
    value = statistics.median(seconds)
    return Figure(name=name, value=value, unit="s", asked=asked, note="; ".join(filter(None, [note, said])))
