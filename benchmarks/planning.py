"""How long a plan takes as a command: the interpreter's start, all techniques for t5-3b, and JSON output."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure, called, median

ROUNDS = 7


def measure(work: Path) -> list[Figure]:
    """The median of seven rounds, after one that warms the disk's cache."""
    seconds = [called("plan", "--model", "t5-3b", "--json")[0] for _ in range(1 + ROUNDS)][1:]
    return [median("plan for t5-3b", seconds, "under 0.5")]
