"""A training script as a command, run from a notebook: its progress, its run, or why it failed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from zeropods.errors import UserError
from zeropods.launch.child import run_child
from zeropods.launch.follow import following
from zeropods.measure.records import read_record
from zeropods.measure.run_folder import CONFIG, RECORD
from zeropods.report.run import Run

SCRIPT = Path(__file__).resolve().parents[2] / "textsql_train.py"
LOG = "launch.log"
"""What the script wrote on stdout and stderr, attempt after attempt; stands in the run folder."""
LAST_LINES = 8


def train(script: str | Path = SCRIPT, *, outputdir: str | Path, **flags: Any) -> Run:
    """Run a training script on this pod, in one process of its own, and return its run.

    A run that is finished already is returned as it is. Ctrl-C ends the script too, which leaves its
    record. `UserError` says why it failed.

    Args:
        flags: the script's flags, without their dashes; None leaves a flag out.
    """
    folder = Path(outputdir).resolve()
    return run_here(train_argv(script, outputdir=folder, **flags), folder)


def run_here(argv: list[str], folder: Path) -> Run:
    """Run a command that trains on this machine, as `train` says."""
    before = _stamp(folder)
    with tempfile.TemporaryFile() as output:
        try:
            with following(folder) as tick:
                status = run_child(argv, output, tick)
        finally:
            lines = _keep(output, folder)
    recorded = _stamp(folder) != before
    if status:
        raise UserError(_failure(folder, status, recorded, lines))
    if not recorded:
        print("\n".join(lines[-1:]), file=sys.stderr)
    return Run(folder)


def train_argv(script: str | Path, **flags: Any) -> list[str]:
    """The command that runs a training script with these flags."""
    return [sys.executable, str(script), *train_arguments(**flags)]


def train_arguments(**flags: Any) -> list[str]:
    """A script's arguments; a flag without a value is left out."""
    given = {name: value for name, value in flags.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def _stamp(folder: Path) -> int | None:
    """What changes when a record is written."""
    path = folder / RECORD
    return path.stat().st_mtime_ns if path.is_file() else None


def _keep(output: IO[bytes], folder: Path) -> list[str]:
    """Append the output to the run's log, where there is a run; returns its lines."""
    output.seek(0)
    text = output.read().decode("utf-8", "replace")
    if (folder / CONFIG).is_file():
        with open(folder / LOG, "a", encoding="utf-8") as log:
            log.write(text)
    return text.strip().splitlines()


def _failure(folder: Path, status: int, recorded: bool, lines: list[str]) -> str:
    last = "\n".join(lines[-LAST_LINES:])
    if not recorded:
        return f"{folder}: training ended with status {status} and without a record; it said:\n{last}"
    record = read_record(folder)
    return f"{folder}: {record['status']}: {record['reason']}; last lines of {LOG}:\n{last}"
