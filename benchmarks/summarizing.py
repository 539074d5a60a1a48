"""How long the summary of many run folders, and of long runs, takes as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.figure import Figure, called, median
from tests.made import a_batch, a_rank, a_record, write_run
from zeropods.plan.known_models import known_config
from zeropods.tables import MIB

RUNS = 1_000
REPEATS = 5
"""Number of runs of each cell of the matrix."""
RANKS = 3
STEPS = 40
SAMPLES = 30
ROUNDS = 5
LONG_RANKS = 8
LONG_SAMPLES = 520_000
"""Samples of each rank of a long run: three days, two per second. Long runs are sampled less often
now."""
MANY_RANKS = 64
MANY_STEPS = 1_000_000
MANY_LOSSES = 4_095
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
HEADER = (
    "unix_seconds,phase,allocated_bytes,reserved_bytes,device_used_bytes,resident_bytes,"
    "utilization_percent,power_watts\n"
)


def measure(work: Path) -> list[Figure]:
    """Seconds of `zeropods summary` over folders of a matrix: five repeats of each of 200 cells;
    and over long runs."""
    return [
        _many_runs(work),
        _three_days(work / "days", LONG_SAMPLES),
        *_many_steps(work),
    ]


def _many_runs(work: Path) -> Figure:
    for number in range(RUNS):
        cell = number // REPEATS
        repeat = number % REPEATS + 1
        _write_run(work / "runs" / f"cell-{cell}" / str(repeat), number)
    seconds = []
    for round_ in range(ROUNDS):
        round_seconds, _ = called("summary", work / "runs", "--out", work / f"summary-{round_}")
        seconds.append(round_seconds)
    _check(work / "summary-0")
    note = f"{RANKS} ranks, {STEPS} steps each"
    return median(f"summary of {RUNS:,} run folders", seconds, "under 3", note)


def _three_days(work: Path, samples: int) -> Figure:
    ranks = [a_rank(rank) for rank in range(LONG_RANKS)]
    write_run(work / "run", a_record(ranks=ranks))
    _write_samples(work / "run", LONG_RANKS, samples)
    seconds, resident_bytes = called("summary", work, "--out", f"{work}-summary")
    return Figure(
        name=f"summary of {LONG_RANKS} ranks with {samples:,} samples",
        value=seconds,
        unit="s",
        asked="under 5, 500 MiB",
        note=f"at most {resident_bytes / MIB:,.0f} MiB resident",
    )


def _many_steps(work: Path) -> list[Figure]:
    """The size of the record of a run with very many steps, and the seconds of its summary."""
    losses = [{"step": step + 1, "loss": 8.0 - step / 7_000} for step in range(MANY_LOSSES)]
    steps = np.random.default_rng(0).gamma(100.0, 0.005, MANY_STEPS).tolist()
    first = a_rank(step_seconds=steps, losses=losses, eval_losses=losses)
    ranks = [first]
    for rank in range(1, MANY_RANKS):
        ranks.append({**first, "rank": rank, "losses": [], "eval_losses": []})
    folder = write_run(work / "steps" / "run", a_record(ranks=ranks))
    record_bytes = (folder / "record.json").stat().st_size
    seconds, _ = called("summary", work / "steps", "--out", work / "steps-summary")
    name = f"{MANY_STEPS:,} steps on {MANY_RANKS} ranks"
    return [
        Figure(
            name=f"record.json of {name}",
            value=record_bytes / MIB,
            unit="MiB",
            asked="at most 5",
        ),
        Figure(
            name=f"summary of {name}",
            value=seconds,
            unit="s",
            asked="under 5",
        ),
    ]


def _write_run(folder: Path, number: int) -> None:
    """Write the run of a number: its cell is of one technique and one learning rate."""
    cell = number // REPEATS
    technique = TECHNIQUES[cell % len(TECHNIQUES)]
    identity = {"learning_rate": cell // len(TECHNIQUES), "seed": number}
    ranks = [_rank(rank, number) for rank in range(RANKS)]
    record = a_record(ranks=ranks, technique=technique, run_id=str(number), identity=identity)
    write_run(folder, record)
    _write_samples(folder, RANKS, SAMPLES)


def _rank(rank: int, number: int) -> dict[str, object]:
    return a_rank(
        rank,
        step_seconds=[0.5 + 0.001 * (number % 7 + step) for step in range(STEPS)],
        source_tokens=400_000,
        target_tokens=200_000,
        padded_tokens=700_000,
        shape=known_config("t5-tiny"),
        largest_batch=a_batch(16, 40, 30),
        losses=[{"step": step + 1, "loss": 8.0 - step / 10} for step in range(STEPS)],
    )


def _write_samples(folder: Path, ranks: int, count: int) -> None:
    """Write the samples of memory of each rank: the same of all."""
    lines = []
    for number in range(count):
        unix_seconds = 1_700_000_000 + number / 2
        resident_bytes = 10**9 + number
        lines.append(f"{unix_seconds},steady,,,,{resident_bytes},,\n")
    samples = HEADER + "".join(lines)
    (folder / "memory").mkdir()
    for rank in range(ranks):
        (folder / "memory" / f"{rank}.csv").write_text(samples)


def _check(out: Path) -> None:
    document = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert len(document["runs"]) == RUNS, out
    assert len(document["groups"]) == RUNS // REPEATS, out
