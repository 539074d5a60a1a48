"""A run that lost a pod and went on, beside one that nothing has disturbed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.records import read_json
from zeropods.report.run import Run
from zeropods.report.table import Table

ATTEMPTS, FAULT, JOURNAL = "attempts", "fault.json", "restarts.json"


def disturbed_table(disturbed: Run, undisturbed: Run) -> Table:
    """What was lost, how soon it was found, what the run went on with, and the losses of both.

    `UserError` where the first one did not go on by itself.
    """
    if not (disturbed.folder / JOURNAL).is_file():
        raise UserError(f"{disturbed.folder}: did not go on by itself; nothing was lost")
    record, other = disturbed.record, undisturbed.record
    entry = read_json(disturbed.folder / JOURNAL)["restarts"][-1]
    first = read_json(disturbed.folder / ATTEMPTS / f"{record['attempt'] - 1}.json")
    told = " ".join(f"--{name} {value}" for name, value in entry["flags"].items())
    facts = {
        "ended by": (f"{entry['status']}: {entry['pod']}", "nothing"),
        "found after": (_seconds(_until_found(disturbed.folder, entry)), "-"),
        "trained again after": (_seconds(_until_first_step(record, entry)), "-"),
        "steps done twice": (str(first["steps"] - record["ranks"][0]["first_step"]), "0"),
        "pods": (f"{first['pods']}, then {record['pods']}: {', '.join(entry['pods'])}", str(other["pods"])),
        "told otherwise": (told or "nothing", "-"),
        "effective batch": tuple(str(one["effective_batch_size"]) for one in (record, other)),
        "steps": tuple(str(one["steps"]) for one in (record, other)),
        "last training loss": tuple(f"{one['losses'][-1]['loss']:.6f}" for one in (record, other)),
        "last validation loss": tuple(_validation(one) for one in (record, other)),
        "largest difference of a step's loss": (f"{largest_difference(record, other):.1e}", "-"),
    }
    lines = ({"": name, "went on": ours, "undisturbed": theirs} for name, (ours, theirs) in facts.items())
    return Table.of(lines)


def largest_difference(record: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Of the losses of the steps that both records have, relative to the other's."""
    known = {point["step"]: point["loss"] for point in other["losses"]}
    pairs = [(point["loss"], known[point["step"]]) for point in record["losses"] if point["step"] in known]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def _until_found(folder: Path, entry: Mapping[str, Any]) -> float | None:
    """From the fault to the moment when the supervisor saw that the run had ended."""
    if not (folder / FAULT).is_file():
        return None
    return float(entry["found_unix_seconds"] - read_json(folder / FAULT)["killed_unix_seconds"])


def _until_first_step(record: Mapping[str, Any], entry: Mapping[str, Any]) -> float | None:
    """From that moment to the first step of the last attempt, start of all processes included."""
    first = record["ranks"][0]
    if first["wall_seconds"] is None or first["start_seconds"] is None:
        return None
    began = first["ended_unix_seconds"] - first["wall_seconds"]
    return float(began + first["start_seconds"] - entry["found_unix_seconds"])


def _validation(record: Mapping[str, Any]) -> str:
    return f"{record['eval_losses'][-1]['loss']:.6f}" if record["eval_losses"] else "none"


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} s"
