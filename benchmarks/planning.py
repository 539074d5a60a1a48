"""How long a plan takes, as a command: the interpreter's start, all techniques of t5-3b, its JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure

ROUNDS = 7
COMMAND = (sys.executable, "-m", "zeropods", "plan", "--model", "t5-3b", "--json")
ROOT = Path(__file__).resolve().parents[1]


def measure(work: Path) -> list[Figure]:
    """Median of some rounds, after one that warms the disk's cache."""
    seconds = [_round() for _ in range(1 + ROUNDS)][1:]
    note = f"median of {ROUNDS} processes, slowest {max(seconds):.2f} s"
    return [
        Figure(name="plan for t5-3b", value=statistics.median(seconds), unit="s", asked="under 0.5", note=note),
    ]


def _round() -> float:
    began = time.perf_counter()
    done = subprocess.run(COMMAND, cwd=ROOT, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    assert len(json.loads(done.stdout)["techniques"]) == 8
    return seconds
