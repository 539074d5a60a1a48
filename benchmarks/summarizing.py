"""How long the summary of many run folders, and of long runs, takes as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.figure import Figure, called, median
from tests.made import a_batch, a_rank, a_record, write_run
from zeropods.plan.known_models import known_config
from zeropods.tables import MIB

RUNS, REPEATS, RANKS, STEPS, SAMPLES, ROUNDS = 1_000, 5, 3, 40, 30, 5
LONG_RANKS, LONG_SAMPLES = 8, 520_000
"""Ranks of a long run, and samples of each: three days, two per second. Long runs are sampled less often now."""
MANY_RANKS, MANY_STEPS, MANY_LOSSES = 64, 1_000_000, 4_095
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
HEADER = (
    "unix_seconds,phase,allocated_bytes,reserved_bytes,device_used_bytes,resident_bytes,"
    "utilization_percent,power_watts\n"
)


def measure(work: Path) -> list[Figure]:
    """Seconds of `zeropods summary` over folders of a matrix: five repeats of each of 200 cells; and over long runs."""
    for number in range(RUNS):
        _write_run(work / "runs" / f"cell-{number // REPEATS}" / str(number % REPEATS + 1), number)
    seconds = [called("summary", work / "runs", "--out", work / f"summary-{round_}")[0] for round_ in range(ROUNDS)]
    _check(work / "summary-0")
    many = median(f"summary of {RUNS:,} run folders", seconds, "under 3", f"{RANKS} ranks, {STEPS} steps each")
    return [many, _three_days(work / "days", LONG_SAMPLES), *_many_steps(work)]


def _three_days(work: Path, samples: int) -> Figure:
    write_run(work / "run", a_record(ranks=[a_rank(rank) for rank in range(LONG_RANKS)]))
    _write_samples(work / "run", LONG_RANKS, samples)
    seconds, resident = called("summary", work, "--out", work.with_name(f"{work.name}-summary"))
    name, note = (
        f"summary of {LONG_RANKS} ranks with {samples:,} samples",
        f"at most {resident / MIB:,.0f} MiB resident",
    )
    return Figure(name=name, value=seconds, unit="s", asked="under 5, 500 MiB", note=note)


def _many_steps(work: Path) -> list[Figure]:
    losses = [{"step": step + 1, "loss": 8.0 - step / 7_000} for step in range(MANY_LOSSES)]
    steps = np.random.default_rng(0).gamma(100.0, 0.005, MANY_STEPS).tolist()
    first = a_rank(step_seconds=steps, losses=losses, eval_losses=losses)
    ranks = [first, *({**first, "rank": rank, "losses": [], "eval_losses": []} for rank in range(1, MANY_RANKS))]
    record = write_run(work / "steps" / "run", a_record(ranks=ranks)) / "record.json"
    name = f"{MANY_STEPS:,} steps on {MANY_RANKS} ranks"
    seconds, _ = called("summary", work / "steps", "--out", work / "steps-summary")
    return [
        Figure(name=f"record.json of {name}", value=record.stat().st_size / MIB, unit="MiB", asked="at most 5"),
        Figure(name=f"summary of {name}", value=seconds, unit="s", asked="under 5"),
    ]


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
            shape=known_config("t5-tiny"),
            largest_batch=a_batch(16, 40, 30),
            losses=losses,
        )
        for rank in range(RANKS)
    ]
    technique, flags = TECHNIQUES[cell % len(TECHNIQUES)], {"learning_rate": cell // len(TECHNIQUES), "seed": number}
    write_run(folder, a_record(ranks=ranks, technique=technique, run_id=str(number), identity=flags))
    _write_samples(folder, RANKS, SAMPLES)


def _write_samples(folder: Path, ranks: int, count: int) -> None:
    samples = "".join(f"{1_700_000_000 + i / 2},steady,,,,{10**9 + i},,\n" for i in range(count))
    (folder / "memory").mkdir()
    for rank in range(ranks):
        (folder / "memory" / f"{rank}.csv").write_text(HEADER + samples)


def _check(out: Path) -> None:
    document = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert len(document["runs"]) == RUNS and len(document["groups"]) == RUNS // REPEATS, out
