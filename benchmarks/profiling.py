"""Seconds to read and check a profiler report of a model with 1,000 modules, from a file."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.figure import Figure
from tests.made_profile import Model
from zeropods.measure.profile_checks import check

LAYERS = 91
"""Of 11 modules each; with the embedding, the list, the output layer and the root 1,005."""
ROUNDS = 7


def measure(work: Path) -> list[Figure]:
    """Median of seven rounds, with the slowest."""
    path = work / "profile.txt"
    path.write_text(Model(layers=LAYERS, width=768, tokens=64, rows=8, vocabulary=32_000, twice=True).report())
    seconds = [_seconds(path) for _ in range(ROUNDS)]
    modules = path.read_text().count("% Params") + 1
    return [
        Figure(
            name=f"profiler report of {modules:,} modules, read and checked",
            value=statistics.median(seconds),
            unit="s",
            asked="under 1",
            note=f"{path.stat().st_size / 1e3:.0f} KB; slowest of {ROUNDS}: {max(seconds):.2f} s",
        )
    ]


def _seconds(path: Path) -> float:
    began = time.perf_counter()
    check(path)
    return time.perf_counter() - began
