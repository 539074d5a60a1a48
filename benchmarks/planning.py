"""How long a plan takes as a command: the interpreter's start, all techniques for t5-3b, and JSON
output."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure, called, median

ROUNDS = 7


def measure(work: Path) -> list[Figure]:
    """The median of seven rounds, after one that warms the disk's cache."""
    _seconds_of_a_plan()
    seconds = [_seconds_of_a_plan() for _ in range(ROUNDS)]
    return [median("plan for t5-3b", seconds, "under 0.5")]


def _seconds_of_a_plan() -> float:
    seconds, _ = called("plan", "--model", "t5-3b", "--json")
    return seconds
