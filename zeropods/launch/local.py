"""A training script on this machine, from its start to its record; it ends with the process that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from zeropods.errors import UserError
from zeropods.launch.command import Launch, remember, runner_argv
from zeropods.launch.forks import Forked, fork, own_server
from zeropods.launch.hangs import HangDetector
from zeropods.launch.outcome import (
    LOG,
    Ending,
    Ranks,
    RunLog,
    UnopenedError,
    check_timeout,
    failure,
    following,
    overdue,
    record_run,
)
from zeropods.launch.restart import calls_for_another
from zeropods.measure.record import CONFIG, LAUNCH_LOCK, Record, read_config
from zeropods.measure.run_folder import locked
from zeropods.pods.processes import ask_for_stacks, deferred, descendants, ending_in_order, oom_kills, send
from zeropods.programs import bound_argv, child_environment
from zeropods.train.arguments import arguments_of

POLL_SECONDS = 0.2
GRACE_SECONDS = 30.0
"""From SIGTERM to SIGKILL: time for a run to write its record."""
HANG_GRACE_SECONDS = 3.0
"""The same for a run that hangs, whose ranks have had `WRITE_SECONDS` already."""
WRITE_SECONDS = 5.0
"""A rank that waits for another writes what it measured so soon after SIGTERM."""

OF_LAUNCHER = re.compile(r"\[[\d:., -]+\] \[[A-Z]+\] \[launch\.py:")
"""Begins a line that DeepSpeed's launcher has logged: what the script said last stands between two of them."""

Watch = Callable[[], object]
"""To be called some times per second while a run goes on; raises `HangError` where it hangs."""


class OverdueError(Exception):
    """A command took longer than it was given."""


class HangError(OverdueError):
    """A command does nothing any more."""


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

    def failure(self, folder: Path) -> str:
        """Why it failed, with its last lines."""
        if self.record is not None:
            return failure(folder, self.record)
        last = "\n".join(self.lines)
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
        step_timeout: as `Supervision` has it.
        restarts: how often it is run again where a rank was killed; it goes on from its newest checkpoint.
    """
    for number in range(restarts + 1):
        ended = run_to_end(argv, folder, timeout_seconds, step_timeout)
        if number == restarts or ended.record is None or not calls_for_another(ended.record):
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
    with ending_in_order(), locked(planned.folder, LAUNCH_LOCK):
        remember(planned)
        ended = run_planned(planned, timeout_seconds)
    if ended.record is None:
        verdict = Ending("timeout" if ended.status is None else "failed", ended.reason)
        raise UnopenedError(planned.folder, verdict, ended.lines)
    return ended.record


def run_planned(planned: Launch, timeout_seconds: float | None = None) -> CommandEnd:
    """Run a launch on this machine: forks where the script is this project's own and there is no GPU."""
    check_timeout(timeout_seconds)

    def run(output: IO[bytes], watch: Watch) -> int:
        ranks = _forked_ranks(planned, output)
        if ranks:
            return _await(ranks, watch, GRACE_SECONDS, timeout_seconds)
        alone = [sys.executable, str(planned.script), *planned.arguments]
        argv = alone if planned.world_size == 1 else runner_argv(planned, Path())
        return run_child(argv, output, watch, timeout_seconds=timeout_seconds)

    return to_end(run, planned.folder)


def _forked_ranks(planned: Launch, output: IO[bytes]) -> list[Forked]:
    """Every rank of a launch, begun; none where the fork server cannot fork them."""
    server = own_server() if arguments_of(planned.script) else None
    if server is None:
        return []
    with open(os.devnull, "rb") as nothing, deferred():
        streams = (nothing.fileno(), output.fileno(), output.fileno())
        words = [str(planned.script), *planned.arguments]
        ranks = [fork(server, words, _variables(planned, rank), streams) for rank in range(planned.world_size)]
    return [rank for rank in ranks if rank is not None] if None not in ranks else []


def _variables(planned: Launch, rank: int) -> dict[str, str]:
    """The environment of a rank: this process's, and what a launcher gives."""
    here, ranks = child_environment(), planned.world_size
    if ranks == 1:
        return here
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    # torchrun and DeepSpeed's launcher have two names for it; accelerate takes the first to be 1 where it is not there.
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
    return {**here, **own, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(planned.master_port)}


def run_to_end(
    argv: list[str], folder: Path, timeout_seconds: float | None = None, step_timeout: float | None = None
) -> CommandEnd:
    """Run a command that trains into a run folder, and see to it that an attempt has a record."""
    return to_end(partial(run_child, argv, timeout_seconds=timeout_seconds), folder, step_timeout)


def to_end(run: Callable[[IO[bytes], Watch], int], folder: Path, step_timeout: float | None = None) -> CommandEnd:
    """As `run_to_end`, for whatever it is that trains.

    Args:
        run: trains, lets stdout and stderr go into the file that it is given, and returns an exit status; raises
            `OverdueError` where its time was over.
    """
    ranks, kills, log = Ranks(folder), oom_kills(), RunLog()
    hangs = HangDetector(folder, step_timeout, ranks.have_opened_the_run)
    status, verdict = None, Ending()
    with tempfile.NamedTemporaryFile() as output, following(folder) as tick:

        def watch() -> None:
            tick()
            _end_if_hanging(hangs)

        try:
            status = run(output, watch)
        except OverdueError as error:
            verdict = Ending("timeout", str(error))
        finally:
            _keep(output, folder, log)
    if status is not None and status < 0:
        verdict = Ending(None, f"killed by {signal.Signals(-status).name}")
    elif status is not None:
        said = f"; its last message: {log.tail()[-1]}" if log.tail() else ""
        verdict = Ending(None, f"ended with status {status}{said}")
    record = None
    if ranks.have_opened_the_run():
        ranks.pods = (None,) * read_config(folder).world_size
        out_of_memory = frozenset({None} if status and (oom_kills() or 0) > (kills or 0) else ())
        record = record_run(ranks, verdict, log, out_of_memory=out_of_memory)
    return CommandEnd(status=status, reason=verdict.reason or "", lines=log.tail(), record=record)


def _end_if_hanging(hangs: HangDetector) -> None:
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


def _keep(output: IO[bytes], folder: Path, log: RunLog) -> None:
    """Append the output to the run's log, where there is a run, and take up its lines."""
    output.seek(0)
    text = output.read().decode("utf-8", "replace")
    if (folder / CONFIG).is_file():
        with open(folder / LOG, "a", encoding="utf-8") as file:
            file.write(text)
    for line in text.strip().splitlines():
        if not OF_LAUNCHER.match(line):
            log.add(line)


# The process that trains


def run_child(
    argv: list[str],
    output: IO[bytes],
    watch: Watch = lambda: None,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float | None = None,
) -> int:
    """Run a command to its end and return its exit status, negative for a signal.

    Where the caller is interrupted, or the command's time is over, it gets SIGTERM, then SIGKILL; either
    way nothing of its process group is left when this returns or raises.

    Args:
        output: takes what the command writes on stdout and stderr.
        timeout_seconds: a command that takes longer is ended, and `OverdueError` raised.
    """
    check_timeout(timeout_seconds)
    process = subprocess.Popen(
        bound_argv(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=child_environment(),
    )
    return _await([process], watch, grace_seconds, timeout_seconds)


def _await(
    processes: Sequence[subprocess.Popen[bytes] | Forked],
    watch: Watch,
    grace_seconds: float,
    timeout_seconds: float | None,
) -> int:
    """Wait until all have ended, or one has failed, whose status is returned; nothing of their groups is left then."""
    started, failed = time.monotonic(), 0
    try:
        while not failed and None in (statuses := [process.poll() for process in processes]):
            if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                raise OverdueError(overdue(timeout_seconds))
            watch()
            time.sleep(POLL_SECONDS)
            failed = next(filter(None, statuses), 0)
        watch()
    except HangError:
        grace_seconds = min(grace_seconds, HANG_GRACE_SECONDS)
        raise
    finally:
        ended = _end(processes, grace_seconds)
    return failed or next(filter(None, ended), 0)


def _end(processes: Sequence[subprocess.Popen[bytes] | Forked], grace_seconds: float) -> list[int]:
    """End processes by SIGTERM, and what is left of their groups by SIGKILL; returns their exit statuses."""
    deadline = time.monotonic() + grace_seconds
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes]
