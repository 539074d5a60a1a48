"""A command that trains on this machine, from its start to a record, whether it can write one or not."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zeropods.launch.child import POLL_SECONDS, OverdueError, StandstillError, run_child
from zeropods.launch.follow import following
from zeropods.launch.out_of_memory import killed_for_memory, unmeasured
from zeropods.launch.outcome import NEVER_A_CAUSE, PATIENCE_SECONDS, await_lock
from zeropods.launch.stacks import ask_below, save_stacks
from zeropods.launch.standstill import Standstill
from zeropods.measure.records import compose_record, read_record, write_record
from zeropods.measure.run_folder import CONFIG, RECORD, locked
from zeropods.pods.agent.descendants import Tree
from zeropods.pods.agent.stacks import is_stopped
from zeropods.pods.oom_kills import oom_kills
from zeropods.pods.processes import read_process, send

LOG = "launch.log"
"""What the script wrote on stdout and stderr, attempt after attempt; stands in the run folder."""
LAST_LINES = 8
WRITE_SECONDS = 5.0
"""A rank that waits for another writes what it measured so soon after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended that trains on this machine."""

    status: int | None
    """Its exit status, negative for a signal; None where its time was over."""
    reason: str
    """Why it ended, as seen from outside."""
    lines: list[str]
    """The last lines that it wrote on stdout and stderr."""
    record: dict[str, Any] | None
    """Of the attempt that it made; None where it made none."""

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or a rank of it: DeepSpeed's launcher passes on what ended the rank, modulo 256."""
        ended_by = self.status is not None and self.status in (-signal.SIGKILL, 256 - signal.SIGKILL)
        return ended_by and (self.record is None or self.record["status"] == "failed")


def run_to_end(
    argv: list[str], folder: Path, timeout_seconds: float | None = None, step_timeout: float | None = None
) -> Ended:
    """Run a command that trains into a run folder, and see to it that an attempt has a record.

    The command writes its own. Where it was killed, nobody else would write one; and where its time was
    over, it can only say that it was interrupted.

    Args:
        step_timeout: as `launch.run.launch` has it.
    """
    standstill = watched(folder, step_timeout)

    def run(output: IO[bytes]) -> int:
        with following(folder) as tick:

            def watch() -> None:
                tick()
                end_standstill(standstill)

            return run_child(argv, output, watch, timeout_seconds=timeout_seconds)

    return to_end(run, folder)


def watched(folder: Path, step_timeout: float | None = None) -> Standstill:
    """What sees whether the next attempt of a run stands still."""
    before = stamp(folder / CONFIG)
    return Standstill(folder, (), step_timeout, lambda: stamp(folder / CONFIG) != before)


def end_standstill(standstill: Standstill) -> None:
    """Raise `StandstillError` where a run below this process stands still; the stacks of its ranks are kept."""
    found = standstill.look()
    if found is None:
        return
    below = {process.pid for process in Tree.read().below(os.getpid())}
    save_stacks(
        standstill.folder, standstill.beats(), lambda: ask_below(os.getpid()), lambda process: process.pid in below
    )
    _let_write(standstill, below)
    raise StandstillError(found.reason)


def _let_write(standstill: Standstill, below: Collection[int]) -> None:
    """Ask the ranks themselves to end: what started them may pass nothing on. Those that wait then write."""
    ranks = {rank: read_process(beat.pid) for rank, beat in standstill.beats().items() if beat.pid in below}
    waiting = {rank for rank, process in ranks.items() if process and send(process, signal.SIGTERM)}
    waiting -= {rank for rank, process in ranks.items() if process and is_stopped(process)}
    deadline = time.monotonic() + WRITE_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        waiting = {rank for rank in waiting if not (standstill.folder / "ranks" / f"{rank}.json").exists()}


def to_end(run: Callable[[IO[bytes]], int], folder: Path) -> Ended:
    """As `run_to_end`, for whatever it is that trains.

    Args:
        run: trains, lets stdout and stderr go into the file that it is given, and returns an exit status; raises
            `OverdueError` where its time was over.
    """
    opened, recorded, kills = stamp(folder / CONFIG), stamp(folder / RECORD), oom_kills()
    status: int | None = None
    with tempfile.TemporaryFile() as output:
        try:
            status = run(output)
        except OverdueError as error:
            reason = str(error)
        finally:
            lines = _keep(output, folder)[-LAST_LINES:]
    if status is not None:
        reason = _how_it_ended(status, lines)
    record = None
    killed = unmeasured(folder) if status and (oom_kills() or 0) > (kills or 0) else None
    if stamp(folder / CONFIG) != opened and killed is not None:
        record = _of_caller(folder, "oom", killed_for_memory(folder, killed), lines)
    elif stamp(folder / RECORD) != recorded:
        record = _of_command(folder, status, reason, lines)
    elif stamp(folder / CONFIG) != opened:
        record = _of_caller(folder, "timeout" if status is None else "failed", reason, lines)
    return Ended(status=status, reason=reason, lines=lines, record=record)


def _of_command(folder: Path, status: int | None, reason: str, lines: list[str]) -> dict[str, Any]:
    """The record that the command wrote, unless it ended as it did because its time was over."""
    record = read_record(folder)
    if status is None and record["status"] in NEVER_A_CAUSE["timeout"]:
        return _of_caller(folder, "timeout", reason, lines)
    return record


def _of_caller(folder: Path, status: str, reason: str, lines: list[str]) -> dict[str, Any]:
    # A rank below the command that ended was killed a moment ago.
    await_lock(folder, PATIENCE_SECONDS)
    with locked(folder):
        record = compose_record(folder, status=status, reason=reason, last_lines=lines)
        write_record(folder, record)
    return record


def _how_it_ended(status: int, lines: list[str]) -> str:
    if status >= 0:
        said = f"; its last word: {lines[-1]}" if lines else ""
        return f"ended with status {status} and left no record{said}"
    return f"killed by {signal.Signals(-status).name}"


def stamp(path: Path) -> int | None:
    """What changes when a file is written anew."""
    return path.stat().st_mtime_ns if path.is_file() else None


def _keep(output: IO[bytes], folder: Path) -> list[str]:
    """Append the output to the run's log, where there is a run; returns its lines."""
    output.seek(0)
    text = output.read().decode("utf-8", "replace")
    if (folder / CONFIG).is_file():
        with open(folder / LOG, "a", encoding="utf-8") as log:
            log.write(text)
    return text.strip().splitlines()
