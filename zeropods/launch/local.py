"""A training script on this machine, from its start to a record, whether it can write one or not."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.launch.child import POLL_SECONDS, OverdueError, StandstillError, run_child
from zeropods.launch.command import Launch
from zeropods.launch.hangs import Standstill, ask_below, save_stacks
from zeropods.launch.outcome import (
    NEVER_A_CAUSE,
    PATIENCE_SECONDS,
    UnopenedError,
    await_lock,
    killed_for_memory,
    unmeasured,
)
from zeropods.measure.record import Record, RunConfig, compose_record, read_config, read_record, write_record
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, RECORD, locked
from zeropods.pods.processes import descendants, ending_in_order, find_process, is_stopped, oom_kills, send
from zeropods.report.run import Run
from zeropods.tables import progress

# The progress of a run, read from its `train.log`.

LINE = re.compile(r"step (\d+) (loss|eval_loss) ([\d.e+-]*\d|nan|inf|-inf)$")


class Entry(NamedTuple):
    """A line of the log that says how far the run is."""

    step: int
    name: str
    """`loss` or `eval_loss`."""
    loss: float


class Tail:
    """The entries that a growing log got since they were last asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.is_file() else 0

    def entries(self) -> list[Entry]:
        """New entries, of complete lines only."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        matches = map(LINE.search, whole.decode("utf-8", "replace").splitlines())
        return [Entry(int(m[1]), m[2], float(m[3])) for m in matches if m]


@contextmanager
def following(folder: Path) -> Iterator[Callable[[], None]]:
    """A progress bar over the optimizer steps of a run; call what it yields now and then."""
    tail = Tail(folder / "train.log")
    with progress("train", "steps") as bar:

        def tick() -> None:
            for entry in tail.entries():
                bar.total = bar.total or planned_steps(read_config(folder))
                bar.set_postfix({entry.name: f"{entry.loss:.4g}"}, refresh=False)
                bar.update(entry.step - bar.n)

        yield tick
        bar.leave = bar.n > 0
        # Where the clock ended it, what was done was all.
        bar.total = bar.total or bar.n or None


def planned_steps(config: RunConfig) -> int | None:
    """Optimizer steps of a run; None where the clock ends it."""
    asked = config.identity
    if asked.get("max_train_seconds") or "epochs" not in asked:
        return None
    if asked["max_steps"] > 0:
        return int(asked["max_steps"])
    return math.ceil(asked["epochs"] * math.ceil(config.train_rows / config.effective_batch_size))


# A command that trains on this machine, from its start to a record, whether it can write one or not.

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
    record: Record | None
    """Of the attempt that it made; None where it made none."""

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or a rank of it: DeepSpeed's launcher passes on what ended the rank, modulo 256."""
        ended_by = self.status is not None and self.status in (-signal.SIGKILL, 256 - signal.SIGKILL)
        return ended_by and (self.record is None or self.record.status == "failed")


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
    below = {process.pid for process in descendants(os.getpid())}
    save_stacks(
        standstill.folder, standstill.beats(), lambda: ask_below(os.getpid()), lambda process: process.pid in below
    )
    _let_write(standstill, below)
    raise StandstillError(found.reason)


def _let_write(standstill: Standstill, below: Collection[int]) -> None:
    """Ask the ranks themselves to end: what started them may pass nothing on. Those that wait then write."""
    ranks = {rank: find_process(beat.pid) for rank, beat in standstill.beats().items() if beat.pid in below}
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


def _of_command(folder: Path, status: int | None, reason: str, lines: list[str]) -> Record:
    """The record that the command wrote, unless it ended as it did because its time was over."""
    record = read_record(folder)
    if status is None and record.status in NEVER_A_CAUSE["timeout"]:
        return _of_caller(folder, "timeout", reason, lines)
    return record


def _of_caller(folder: Path, status: str, reason: str, lines: list[str]) -> Record:
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


# A training script as a command, run from a notebook: its progress, its run, or why it failed.

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


def run_one(planned: Launch, timeout_seconds: float | None = None) -> Record:
    """Run a launch of one process on this machine to its end, and return its record whatever it says.

    What was launched is remembered, as it is over pods. `UnopenedError` says why a run did not begin.
    """
    argv = [sys.executable, str(planned.script), *planned.arguments]
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        planning.remember(planned)
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
        return f"{folder}: {ended.record.status}: {ended.record.reason}; last lines of {LOG}:\n{last}"
    how = ended.reason if ended.status is None else f"ended with status {ended.status}"
    return f"{folder}: training {how} and without a record; it said:\n{last}"
