"""A record's figures against one another: what contradicts itself is not shown as a result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.rates import samples_per_second, train_seconds
from zeropods.measure.tokens import real_tokens

RELATIVE = 1e-9


def check_arithmetic(path: Path, record: dict[str, Any]) -> None:
    """Refuse a record whose counts or rates do not follow from what its ranks measured; `UserError` names the first."""
    fault = next(_faults(record), None)
    if fault is not None:
        raise UserError(f"{path}: {fault}; it was changed after the run, or written by something else: run it again")


def _faults(record: dict[str, Any]) -> Iterator[str]:
    yield from _processes(record)
    yield from _steps(record)
    yield from _rates(record)


def _processes(record: dict[str, Any]) -> Iterator[str]:
    world, ranks = record["world_size"], [rank["rank"] for rank in record["ranks"]]
    if world != record["pods"] * record["slots"]:
        yield f"world_size {world}, pods x slots {record['pods']} x {record['slots']}"
    batch = record["per_device_train_batch_size"] * record["gradient_accumulation_steps"] * world
    if record["effective_batch_size"] != batch:
        yield f"effective_batch_size {record['effective_batch_size']}, rows x passes x processes give {batch}"
    if ranks != sorted(set(ranks) & set(range(world))):
        yield f"ranks {ranks}, world_size {world}"
    if record["status"] == "ok" and len(ranks) != world:
        yield f"status ok with {len(ranks)} of {world} ranks"
    for rank in record["ranks"]:
        if record["status"] == "ok" != rank["status"]:
            yield f"status ok, rank {rank['rank']} says {rank['status']}"


def _steps(record: dict[str, Any]) -> Iterator[str]:
    for rank in record["ranks"]:
        timed, shortest = len(rank["step_seconds"]), min(rank["step_seconds"], default=0.0)
        if shortest < 0:
            yield f"rank {rank['rank']}: a step took {shortest} s"
        if rank["step"] - rank["first_step"] != timed:
            yield f"rank {rank['rank']}: steps {rank['first_step']} to {rank['step']}, {timed} times"
        if rank["padded_tokens"] < real_tokens(rank, record["task"]):
            yield f"rank {rank['rank']}: padded_tokens {rank['padded_tokens']}, fewer than the real ones"
    reached = max((rank["step"] for rank in record["ranks"]), default=0)
    if record["steps"] != reached:
        yield f"steps {record['steps']}, its ranks reached {reached}"
    for key in ("losses", "eval_losses"):
        steps = [loss["step"] for loss in record[key]]
        if any(later < earlier for earlier, later in pairwise(steps)) or any(step > reached for step in steps):
            yield f"{key}: steps {steps[:6]} do not rise to at most {reached}"


def _rates(record: dict[str, Any]) -> Iterator[str]:
    ranks = record["ranks"]
    for key, expected in (
        ("train_seconds", train_seconds(ranks)),
        ("samples_per_second", samples_per_second(ranks, record["effective_batch_size"])),
    ):
        if not _equal(record[key], expected):
            yield f"{key} {record[key]}, its ranks' steps give {expected}"


def _equal(said: float | None, computed: float | None) -> bool:
    if said is None or computed is None:
        return said is computed
    return math.isclose(said, computed, rel_tol=RELATIVE)
