"""Preparing a data set: seconds, peak memory and size on disk; and how fast the command line
starts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import raw_data
from benchmarks.figure import Figure, called, median
from zeropods.tables import GIB, MIB

STARTS = 5
"""Number of times that the command line is started."""


def measure(work: Path) -> list[Figure]:
    """Measure each command in a process of its own, as a user calls it."""
    raw, tokenizer, what = raw_data(work)
    out = work / "schema"
    words = ["prepare", "--data", str(raw), "--tokenizer", tokenizer, "--out", str(out)]
    first_seconds, peak_bytes = called(*words)
    second_seconds, _ = called(*words)
    return [
        Figure(
            name="prepare, prompt schema, all examples",
            value=first_seconds,
            unit="s",
            asked="at most 10",
            note=what,
        ),
        Figure(
            name="prepare, peak resident memory",
            value=peak_bytes / GIB,
            unit="GiB",
            asked="at most 1.5",
        ),
        Figure(
            name="prepare, size on disk",
            value=_bytes_of_files(out) / MIB,
            unit="MiB",
            asked="at most 40",
        ),
        Figure(
            name="prepare, second call",
            value=second_seconds,
            unit="s",
            asked="does nothing",
        ),
        median("zeropods --help", _seconds_of_help(), "under 0.5"),
    ]


def _bytes_of_files(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _seconds_of_help() -> list[float]:
    seconds = []
    for _ in range(STARTS):
        call_seconds, _ = called("--help")
        seconds.append(call_seconds)
    return seconds
