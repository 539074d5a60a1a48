"""What is known of a rank that the kernel ended for want of memory: it could write nothing itself."""

from __future__ import annotations

import csv
from pathlib import Path

from zeropods.measure.beat import Beat, read_beats

GIB = 2**30


def killed_for_memory(folder: Path, rank: int) -> str:
    """The reason of a run whose rank was killed: phase, step and the peak of its memory as it was sampled."""
    beat = read_beats(folder).get(rank)
    if beat is None:
        return f"rank {rank}: killed by the kernel, out of memory"
    peak = peak_bytes(folder / "memory" / f"{rank}.csv", beat)
    sampled = "" if peak is None else f", peak resident {peak / GIB:.2f} GiB"
    return f"rank {rank}: killed by the kernel, out of memory: phase {beat.phase}, {beat.step} steps done{sampled}"


def peak_bytes(path: Path, beat: Beat) -> float | None:
    """The most bytes that were resident in the attempt that a beat is of; None where none were sampled."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [(row["unix_seconds"], row["resident_bytes"]) for row in csv.DictReader(file)]
    except (OSError, KeyError):
        return None
    # The last line may have been cut off.
    values = [float(value) for at, value in rows if value and at and float(at) >= beat.began_unix_seconds - 1.0]
    return max(values, default=None)


def unmeasured(folder: Path) -> int | None:
    """The rank that began and has left no measurement; None where there is none."""
    ranks = (rank for rank in sorted(read_beats(folder)) if not (folder / "ranks" / f"{rank}.json").exists())
    return next(ranks, None)
