"""Preparing a data set: seconds, peak memory and size on disk; and how fast the command line starts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import raw_data
from benchmarks.figure import Figure, called, median


def measure(work: Path) -> list[Figure]:
    """Measure each command in a process of its own, as a user calls it."""
    raw, tokenizer, what = raw_data(work)
    out = work / "schema"
    arguments = ["prepare", "--data", str(raw), "--tokenizer", tokenizer, "--out", str(out)]
    seconds, peak = called(*arguments)
    again, _ = called(*arguments)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return [
        Figure(name="prepare, prompt schema, all examples", value=seconds, unit="s", asked="at most 10", note=what),
        Figure(name="prepare, peak resident memory", value=peak / 2**30, unit="GiB", asked="at most 1.5"),
        Figure(name="prepare, size on disk", value=size / 2**20, unit="MiB", asked="at most 40"),
        Figure(name="prepare, second call", value=again, unit="s", asked="does nothing"),
        median("zeropods --help", [called("--help")[0] for _ in range(5)], "under 0.5"),
    ]
