"""Seconds to read and check a profiler report of a model with 1,000 modules, from a file."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.figure import Figure, median
from zeropods.measure.profile_corrections import check

MADE = Path(__file__).resolve().parents[1] / "tests" / "fast" / "data" / "made-wide-twice.txt"
LAYERS = 91
"""Number of blocks of 11 modules each; with the embedding, the list, the output layer and the root
1,005 modules."""
ROUNDS = 7


def measure(work: Path) -> list[Figure]:
    """The median of seven rounds, with the slowest in the note."""
    path = work / "profile.txt"
    path.write_text(_report())
    seconds = [_seconds(path) for _ in range(ROUNDS)]
    modules = path.read_text().count("% Params") + 1
    kilobytes = path.stat().st_size / 1e3
    name = f"profiler report of {modules:,} modules, read and checked"
    return [median(name, seconds, "under 1", f"{kilobytes:.0f} KB")]


def _report() -> str:
    """The made-up report of a small model, with its only block repeated `LAYERS` times."""
    text = MADE.read_text(encoding="utf-8")
    begin = text.index("    (0): Block(")
    end = text.index("  )\n  (head)")
    block = text[begin:end]
    blocks = []
    for number in range(LAYERS):
        blocks.append(block.replace("(0): Block(", f"({number}): Block("))
    return text[:begin] + "".join(blocks) + text[end:]


def _seconds(path: Path) -> float:
    began = time.perf_counter()
    check(path)
    return time.perf_counter() - began
