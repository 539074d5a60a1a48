"""A training script on this machine, from its start to a record, whether it can write one or not."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.launch.child import POLL_SECONDS, HangError, OverdueError, run_child
from zeropods.launch.command import Launch
from zeropods.launch.hangs import HangDetector
from zeropods.launch.log import LAST_LINES, LOG, following
from zeropods.launch.outcome import (
    NEVER_A_CAUSE,
    Ending,
    UnopenedError,
    await_lock,
    killed_for_memory,
    written_at,
)
from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import Record, compose_record, read_record, write_record
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, RECORD, locked
from zeropods.pods.processes import ask_for_stacks, descendants, ending_in_order, oom_kills, send

WRITE_SECONDS = 5.0
"""A rank that waits for another writes what it measured so soon after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """How a command ended that trains on this machine."""

    status: int | None
    """Its exit status, negative for a signal; None where its time was over."""
    reason: str
    """Why it ended, as seen from outside."""
    lines: list[str]
    """The last lines that it wrote on stdout and stderr."""
    record: Record | None
    """The record of the attempt that it made; None where it made none."""

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or a rank of it: DeepSpeed's launcher passes on what ended the rank, modulo 256."""
        ended_by = self.status is not None and self.status in (-signal.SIGKILL, 256 - signal.SIGKILL)
        return ended_by and (self.record is None or self.record.status == "failed")

    def failure(self, folder: Path) -> str:
        """Why it failed, with its last lines."""
        last = "\n".join(self.lines)
        if self.record is not None:
            return f"{folder}: {self.record.status}: {self.record.reason}; last lines of {LOG}:\n{last}"
        how = self.reason if self.status is None else f"ended with status {self.status}"
        return f"{folder}: training {how} and without a record; it said:\n{last}"


def run_here(
    argv: list[str],
    folder: Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
) -> None:
    """Run a command that trains on this machine; `UserError` says why it failed.

    Args:
        timeout_seconds: of each attempt.
        restarts: how often it is run again where it was killed; it goes on from its newest checkpoint.
    """
    for number in range(restarts + 1):
        ended = run_to_end(argv, folder, timeout_seconds, step_timeout)
        if not ended.was_killed or number == restarts:
            break
        print(f"{folder}: {ended.reason}; restart {number + 1} of {restarts}", file=sys.stderr)
    if ended.status != 0:
        raise UserError(ended.failure(folder))
    if ended.record is None:
        print("\n".join(ended.lines[-1:]), file=sys.stderr)


def run_one(planned: Launch, timeout_seconds: float | None = None) -> Record:
    """Run a launch of one process on this machine to its end, and return its record whatever it says.

    What was launched is remembered, as it is over pods. `UnopenedError` says why a run did not begin.
    """
    argv = [sys.executable, str(planned.script), *planned.arguments]
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        planning.remember(planned)
        ended = run_to_end(argv, planned.folder, timeout_seconds)
    if ended.record is None:
        verdict = Ending("timeout" if ended.status is None else "failed", ended.reason)
        raise UnopenedError(planned.folder, verdict, ended.lines, "its output")
    return ended.record


def run_to_end(
    argv: list[str], folder: Path, timeout_seconds: float | None = None, step_timeout: float | None = None
) -> CommandEnd:
    """Run a command that trains into a run folder, and see to it that an attempt has a record.

    The command writes its own. Where it was killed, nobody else would write one; and where its time was
    over, it can only say that it was interrupted.

    Args:
        step_timeout: as `Supervision` has it.
    """
    hangs = hang_detector(folder, step_timeout)

    def run(output: IO[bytes]) -> int:
        with following(folder) as tick:

            def watch() -> None:
                tick()
                end_if_hanging(hangs)

            return run_child(argv, output, watch, timeout_seconds=timeout_seconds)

    return to_end(run, folder)


def to_end(run: Callable[[IO[bytes]], int], folder: Path) -> CommandEnd:
    """As `run_to_end`, for whatever it is that trains.

    Args:
        run: trains, lets stdout and stderr go into the file that it is given, and returns an exit status; raises
            `OverdueError` where its time was over.
    """
    opened, recorded, kills = written_at(folder / CONFIG), written_at(folder / RECORD), oom_kills()
    status, reason = None, ""
    with tempfile.NamedTemporaryFile() as output:
        try:
            status = run(output)
        except OverdueError as error:
            reason = str(error)
        finally:
            lines = _keep(output, folder)[-LAST_LINES:]
    if status is not None:
        reason = _how_it_ended(status, lines)
    has_begun = written_at(folder / CONFIG) != opened
    killed = unmeasured(folder) if status and (oom_kills() or 0) > (kills or 0) else None
    record = None
    if has_begun and killed is not None:
        record = _record(folder, "oom", killed_for_memory(folder, killed), lines)
    elif written_at(folder / RECORD) != recorded:
        record = read_record(folder)
        if status is None and record.status in NEVER_A_CAUSE["timeout"]:
            record = _record(folder, "timeout", reason, lines)
    elif has_begun:
        record = _record(folder, "timeout" if status is None else "failed", reason, lines)
    return CommandEnd(status=status, reason=reason, lines=lines, record=record)


def hang_detector(folder: Path, step_timeout: float | None = None) -> HangDetector:
    """What sees whether the next attempt of a run hangs."""
    before = written_at(folder / CONFIG)
    return HangDetector(folder, step_timeout, lambda: written_at(folder / CONFIG) != before)


def end_if_hanging(hangs: HangDetector) -> None:
    """Raise `HangError` where a run below this process hangs; the stacks of its ranks are kept.

    The ranks are asked to end themselves, since what started them may pass nothing on. Those that wait then write what
    they measured.
    """
    found = hangs.look()
    if found is None:
        return
    below = {process.pid: process for process in descendants(os.getpid())}
    ranks = {rank: below[beat.pid] for rank, beat in hangs.beats().items() if beat.pid in below}
    hangs.save_stacks(lambda: ask_for_stacks(ranks.values()))
    for process in ranks.values():
        send(process, signal.SIGTERM)
    files = [hangs.folder / "ranks" / f"{rank}.json" for rank in ranks if rank not in hangs.stopped]
    deadline = time.monotonic() + WRITE_SECONDS
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    raise HangError(found.reason)


def unmeasured(folder: Path) -> int | None:
    """The rank that began and has left no measurement; None where there is none."""
    ranks = (rank for rank in sorted(read_beats(folder)) if not (folder / "ranks" / f"{rank}.json").exists())
    return next(ranks, None)


def _record(folder: Path, status: str, reason: str, lines: list[str]) -> Record:
    # A rank below the command that ended was killed a moment ago.
    await_lock(folder)
    with locked(folder):
        record = compose_record(folder, status=status, reason=reason, last_lines=lines)
        write_record(folder, record)
    return record


def _how_it_ended(status: int, lines: list[str]) -> str:
    if status >= 0:
        said = f"; its last word: {lines[-1]}" if lines else ""
        return f"ended with status {status} and left no record{said}"
    return f"killed by {signal.Signals(-status).name}"


def _keep(output: IO[bytes], folder: Path) -> list[str]:
    """Append the output to the run's log, where there is a run; returns its lines."""
    output.seek(0)
    text = output.read().decode("utf-8", "replace")
    if (folder / CONFIG).is_file():
        with open(folder / LOG, "a", encoding="utf-8") as log:
            log.write(text)
    return text.strip().splitlines()
