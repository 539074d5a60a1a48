"""The record of a run: composed from what was asked (config.json) and what each rank measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.errors import UserError
from zeropods.measure.arithmetic import check_arithmetic
from zeropods.measure.rates import samples_per_second, train_seconds
from zeropods.measure.schema import SCHEMA_VERSION, check_form

CAUSES = ("oom", "failed", "timeout", "pod_lost", "interrupted", "ok")
"""Statuses from what ends a run by itself to what follows from it."""


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
        "train_seconds": train_seconds(ranks),
        "samples_per_second": samples_per_second(ranks, config["effective_batch_size"]),
        "losses": ranks[0]["losses"] if ranks else [],
        "eval_losses": ranks[0]["eval_losses"] if ranks else [],
        "ranks": ranks,
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `record.json`: the last thing that a run does."""
    atomic.write_json(folder / "record.json", record)


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run folder, its form and its arithmetic checked; `UserError` says what is wrong with it."""
    path = Path(folder) / "record.json"
    if not path.is_file():
        raise UserError(f"{folder}: no record.json: no run there, or one that is running or was killed")
    text = _read(path)
    record = _parsed(path, text)
    check_form(path, record, text)
    check_arithmetic(path, record)
    return record


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder; `UserError` if the file is damaged."""
    return _parsed(path, _read(path))


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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged: {error}; put the run folder aside") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}; put the run folder aside") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: {type(document).__name__}; expected a JSON object: put the run folder aside")
    return document
