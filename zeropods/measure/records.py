"""The record of a run: composed from what was asked (config.json) and what each rank measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.errors import UserError

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "failed", "timeout", "interrupted", "pod_lost")
CAUSES = ("oom", "failed", "timeout", "pod_lost", "interrupted", "ok")
"""Statuses from what ends a run by itself to what follows from it."""


@dataclass(kw_only=True)
class RankMeasurement:
    """What one rank measured of its own attempt. Absent is None, never 0."""

    rank: int
    host: str
    status: str = "failed"
    reason: str | None = None
    step: int = 0
    """Optimizer step that the run has reached, earlier attempts included."""
    first_step: int = 0
    """Optimizer step from which this attempt went on."""
    stopped_by: str | None = None
    """`steps`, `time` or `early_stopping`."""
    start_seconds: float | None = None
    """From the process's start to its first step."""
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each optimizer step, data loading included, evaluation and saving not."""
    warmup_steps: int = 1
    """How many of the first steps a rate leaves out."""
    evaluate_seconds: list[float] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)
    source_tokens: int = 0
    target_tokens: int = 0
    padded_tokens: int = 0
    """Tokens of both sides with padding, over the same steps."""
    losses: list[dict[str, float]] = field(default_factory=list)
    """Mean loss a label token over all ranks, since the entry before: `{"step", "loss"}`."""
    eval_losses: list[dict[str, float]] = field(default_factory=list)
    ended_unix_seconds: float | None = None
    """When this attempt ended, by this pod's clock."""
    peak_resident_bytes: int | None = None
    """The kernel's own peak of the process (VmHWM)."""
    peak_allocated_bytes: int | None = None
    """`torch.cuda.max_memory_allocated`; None where there is no GPU."""
    peak_reserved_bytes: int | None = None

    def write(self, folder: Path) -> None:
        """Write `ranks/N.json` of a run folder."""
        atomic.write_json(folder / "ranks" / f"{self.rank}.json", asdict(self))


def compose_record(
    folder: Path,
    *,
    status: str | None = None,
    reason: str | None = None,
    pod: str | None = None,
    last_lines: Sequence[str] = (),
) -> dict[str, Any]:
    """The record of the last attempt of a run folder; the one place where a record is made.

    Args:
        status: overrules what the ranks say (a supervisor knows that a pod was lost).
        reason: why, where `status` is given.
        pod: the pod that it is about.
        last_lines: what was written last, where the run did not end well.
    """
    config = read_json(folder / "config.json")
    ranks = [read_json(path) for path in sorted((folder / "ranks").glob("*.json"), key=lambda p: int(p.stem))]
    if status is None:
        status, reason = _status(ranks, config["world_size"])
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: value for key, value in config.items() if key != "schema_version"},
        "status": status,
        "reason": reason,
        "pod": pod,
        "last_lines": list(last_lines),
        "steps": max((r["step"] for r in ranks), default=0),
        "train_seconds": _slowest(ranks, train_seconds),
        "samples_per_second": _samples_per_second(ranks, config["effective_batch_size"]),
        "losses": ranks[0]["losses"] if ranks else [],
        "eval_losses": ranks[0]["eval_losses"] if ranks else [],
        "ranks": ranks,
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `record.json`: the last thing that a run does."""
    atomic.write_json(folder / "record.json", record)


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run folder."""
    path = Path(folder) / "record.json"
    if not path.is_file():
        raise UserError(f"{folder}: no record.json: no run there, or one that is running or was killed")
    record = read_json(path)
    if record.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version {record.get('schema_version')!r}; this version reads {SCHEMA_VERSION}")
    if record.get("status") not in STATUSES:
        raise UserError(f"{path}: status {record.get('status')!r}; expected one of {', '.join(STATUSES)}")
    return record


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder; `UserError` if the file is damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged: {error}; put the run folder aside") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: {type(document).__name__}; expected a JSON object")
    return document


def train_seconds(rank: dict[str, Any]) -> float:
    """Seconds of all optimizer steps of a rank, evaluation and saving left out."""
    return sum(rank["step_seconds"])


def first_failure(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank that began the end: the others fail because it is gone, or are stopped. None where all went well."""
    ended = [r for r in ranks if r["status"] != "ok"]
    return min(ended, key=lambda r: (CAUSES.index(r["status"]), r.get("ended_unix_seconds") or 0.0), default=None)


def _status(ranks: list[dict[str, Any]], world_size: int) -> tuple[str, str | None]:
    first = first_failure(ranks)
    if first is not None:
        place = f"rank {first['rank']} on {first['host']}: " if world_size > 1 else ""
        return first["status"], f"{place}{first['reason']}"
    if len(ranks) < world_size:
        return "failed", f"{world_size - len(ranks)} of {world_size} ranks left no measurement"
    return "ok", None


def _slowest(ranks: list[dict[str, Any]], seconds: Any) -> float | None:
    return max(map(seconds, ranks), default=0.0) or None


def _samples_per_second(ranks: list[dict[str, Any]], effective_batch_size: int) -> float | None:
    """Training samples of all ranks together a second, over the steps after warm-up."""
    timed = [r["step_seconds"][r["warmup_steps"] :] for r in ranks]
    if not timed or not min(map(len, timed)):
        return None
    return min(effective_batch_size * len(steps) / sum(steps) for steps in timed)
