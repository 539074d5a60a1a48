"""A training script as a command, run from a notebook: its progress, its run, or why it failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.launch import finished
from zeropods.launch.alone import LOG, Ended, run_to_end
from zeropods.launch.command import Launch
from zeropods.launch.outcome import UnopenedError
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.signals import ending_in_order
from zeropods.report.run import Run

SCRIPT = Path(__file__).resolve().parents[2] / "textsql_train.py"


def train(
    script: str | Path = SCRIPT,
    *,
    outputdir: str | Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    **flags: Any,
) -> Run:
    """Run a training script on this pod, in one process of its own, and return its run.

    A run that is finished already is returned as it is. Ctrl-C ends the script too, which leaves its
    record. `UserError` says why it failed.

    Args:
        timeout_seconds: a run that takes longer is ended.
        step_timeout: as `launch.run.launch` has it.
        flags: the script's flags, without their dashes; None leaves a flag out.
    """
    folder = Path(outputdir).resolve()
    return run_here(train_argv(script, outputdir=folder, **flags), folder, timeout_seconds, step_timeout)


def run_here(
    argv: list[str],
    folder: Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
) -> Run:
    """Run a command that trains on this machine, as `train` says.

    Args:
        timeout_seconds: of each attempt.
        restarts: how often it is run again where it was killed; it goes on from its newest checkpoint.
    """
    ended = run_to_end(argv, folder, timeout_seconds, step_timeout)
    for number in range(1, restarts + 1):
        if not ended.was_killed:
            break
        print(f"{folder}: {ended.reason}; restart {number} of {restarts}", file=sys.stderr)
        ended = run_to_end(argv, folder, timeout_seconds, step_timeout)
    if ended.status != 0:
        raise UserError(_failure(folder, ended))
    if ended.record is None:
        print("\n".join(ended.lines[-1:]), file=sys.stderr)
    return Run(folder)


def run_one(planned: Launch, timeout_seconds: float | None = None) -> dict[str, Any]:
    """Run a launch of one process on this machine to its end, and return its record whatever it says.

    What was launched is remembered, as it is over pods. `UnopenedError` says why a run did not begin.
    """
    argv = [sys.executable, str(planned.script), *planned.arguments]
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        finished.remember(planned)
        ended = run_to_end(argv, planned.folder, timeout_seconds)
    if ended.record is None:
        status = "timeout" if ended.status is None else "failed"
        raise UnopenedError(planned.folder, status, ended.reason, ended.lines, "its output")
    return ended.record


def train_argv(script: str | Path, **flags: Any) -> list[str]:
    """The command that runs a training script with these flags."""
    return [sys.executable, str(script), *train_arguments(**flags)]


def train_arguments(**flags: Any) -> list[str]:
    """A script's arguments; a flag without a value is left out."""
    given = {name: value for name, value in flags.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def _failure(folder: Path, ended: Ended) -> str:
    last = "\n".join(ended.lines)
    if ended.record is not None:
        return f"{folder}: {ended.record['status']}: {ended.record['reason']}; last lines of {LOG}:\n{last}"
    how = ended.reason if ended.status is None else f"ended with status {ended.status}"
    return f"{folder}: training {how} and without a record; it said:\n{last}"
