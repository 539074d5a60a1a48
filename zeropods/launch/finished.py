"""Whether a launch has been run to its end before: known without starting anything."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.data.manifest import FILE as MANIFEST
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.flags import flag_values
from zeropods.measure.records import read_json, read_record
from zeropods.measure.run_folder import RECORD

LAUNCH = "launch.json"
"""In the run folder: what was launched last."""


def record_of(launch: Launch) -> dict[str, Any] | None:
    """The record of this very launch if it is finished; `UserError` if another finished run is there."""
    if not (launch.folder / RECORD).is_file():
        return None
    record = read_record(launch.folder)
    if record["status"] != "ok":
        return None
    before = remembered(launch.folder)
    if before == identity(launch):
        return record
    other = "that was not launched over pods" if before is None else "with other arguments or data"
    raise UserError(
        f"{launch.folder}: holds a finished run on {record['pods']} pods {other}; choose another --outputdir"
    )


def remember(launch: Launch) -> None:
    """Keep what was launched beside its record."""
    atomic.write_json(launch.folder / LAUNCH, identity(launch))


def remembered(folder: Path) -> dict[str, Any] | None:
    """The identity of what was launched last into a run folder; None where nothing was."""
    path = folder / LAUNCH
    return read_json(path) if path.is_file() else None


def identity(launch: Launch) -> dict[str, Any]:
    """What makes two launches the same run: not the port, nor the lease, nor what it has gone on with by itself."""
    launch = launch.asked or launch
    flags = flag_values(launch.arguments)
    return {
        "script": str(launch.script),
        "arguments": list(launch.arguments),
        "pods": [host.slots for host in launch.hosts],
        "deepspeed": _digest(Path(flags.get("deepspeed", ""))),
        "dataset": _content_key(Path(flags.get("dataset_path", flags.get("data", ""))) / MANIFEST),
    }


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _content_key(manifest: Path) -> str | None:
    return read_json(manifest).get("content_key") if manifest.is_file() else None
