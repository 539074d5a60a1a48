"""The summary of many run folders, as a user calls it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.figure import Figure
from tests.made import a_rank, a_record, write_run
from zeropods.plan.shapes import T5_SHAPES

RUNS, REPEATS, RANKS, STEPS, SAMPLES, ROUNDS = 1_000, 5, 3, 40, 30, 5
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
HEADER = (
    "unix_seconds,phase,allocated_bytes,reserved_bytes,device_used_bytes,resident_bytes,"
    "utilization_percent,power_watts\n"
)


def measure(work: Path) -> list[Figure]:
    """Seconds of `zeropods summary` over folders of a matrix: five repeats of each of 200 cells."""
    for number in range(RUNS):
        _write_run(work / "runs" / f"cell-{number // REPEATS}" / str(number % REPEATS + 1), number)
    seconds = [_seconds(work / "runs", work / f"summary-{round_}") for round_ in range(ROUNDS)]
    _check(work / "summary-0")
    note = f"{RANKS} ranks, {STEPS} steps each; median of {ROUNDS} processes, slowest {max(seconds):.2f} s"
    name = f"summary of {RUNS:,} run folders"
    return [Figure(name=name, value=statistics.median(seconds), unit="s", asked="under 3", note=note)]


def _write_run(folder: Path, number: int) -> None:
    cell = number // REPEATS
    losses = [{"step": step + 1, "loss": 8.0 - step / 10} for step in range(STEPS)]
    ranks = [
        a_rank(
            rank,
            step_seconds=[0.5 + 0.001 * (number % 7 + step) for step in range(STEPS)],
            source_tokens=400_000,
            target_tokens=200_000,
            padded_tokens=700_000,
            shape=asdict(T5_SHAPES["t5-tiny"]),
            largest_batch={"rows": 16, "source_tokens": 40, "target_tokens": 30},
            losses=losses,
        )
        for rank in range(RANKS)
    ]
    technique, flags = TECHNIQUES[cell % len(TECHNIQUES)], {"learning_rate": cell // len(TECHNIQUES), "seed": number}
    write_run(folder, a_record(ranks=ranks, technique=technique, run_id=str(number), identity=flags))
    samples = "".join(f"{1_700_000_000 + i},steady,,,,{10**9 + i},,\n" for i in range(SAMPLES))
    (folder / "memory").mkdir()
    for rank in range(RANKS):
        (folder / "memory" / f"{rank}.csv").write_text(HEADER + samples)


def _seconds(runs: Path, out: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "zeropods", "summary", str(runs), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _check(out: Path) -> None:
    document = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert len(document["runs"]) == RUNS and len(document["groups"]) == RUNS // REPEATS, out
