"""Run a training script on this machine, from its start to its record; it ends with the process
that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from zeropods.errors import UserError
from zeropods.launch.causes import signal_name
from zeropods.launch.command import Launch, runner_argv
from zeropods.launch.forks import Forked, fork, own_server
from zeropods.launch.logs import LAUNCH_LOG, OF_LAUNCHER, OF_SCRIPT, RunLog, shown_progress
from zeropods.launch.lost_pods_and_hangs import Ending, HangDetector, check_timeouts, judge
from zeropods.launch.outcome import Ranks, UnopenedError, failure, record_run
from zeropods.launch.restart import calls_for_another
from zeropods.launch.watched_rank import WatchedRank, start_watched
from zeropods.measure.environment import host
from zeropods.measure.exits import exits_noted
from zeropods.measure.record import (
    CONFIG,
    LAUNCH_LOCK,
    RECORD,
    RankExit,
    Record,
    read_config,
    read_record,
)
from zeropods.measure.run_folder import locked
from zeropods.pods.processes import (
    ask_for_stacks,
    descendants,
    end,
    oom_kills,
    oom_kills_since,
    start_bound,
)
from zeropods.programs import child_environment

PROCESS_POLL_SECONDS = 0.2
END_GRACE_SECONDS = 30.0
"""Seconds from SIGTERM to SIGKILL, in which a run can write its record."""
WRITE_SECONDS = 5.0
"""The same for the ranks of a hanging run, in which those that wait for another one can write what
they measured."""
Started = subprocess.Popen[bytes] | Forked | WatchedRank
"""Type of a process that was started here: a command, a fork, or a rank among several."""


def run_here(
    argv: list[str],
    folder: Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
) -> None:
    """Run a command that trains on this machine; `UserError` says why it failed.

    Args:
        argv: the command; it leaves its run in `folder`.
        timeout_seconds: limit for each attempt; None for no limit.
        step_timeout: as in `Supervision`.
        restarts: how many times to run the command again after a rank was killed, to go on from
            its newest checkpoint.
    """

    def start(output: IO[bytes]) -> Sequence[Started]:
        return [start_child(argv, output)]

    for restarts_so_far in range(restarts + 1):
        with locked(folder, LAUNCH_LOCK):
            had_log = (folder / LAUNCH_LOG).exists()
            try:
                record = to_end(start, folder, timeout_seconds, step_timeout)
            except (UnopenedError, KeyboardInterrupt, SystemExit):
                if not had_log:
                    _remove_needless_log(folder)
                raise
        if restarts_so_far == restarts or not calls_for_another(record):
            break
        how = f"restart {restarts_so_far + 1} of {restarts}"
        print(f"{folder}: {record.reason}; {how}", file=sys.stderr)
    if record.status != "ok":
        raise UserError(failure(folder, record))


def _remove_needless_log(folder: Path) -> None:
    """Remove the log if no run began and the log says no more than the error that is shown: nothing
    at all, or why one of our scripts refused to train."""
    log = folder / LAUNCH_LOG
    with suppress(FileNotFoundError):
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if not OF_LAUNCHER.match(line)]
        has_begun = (folder / CONFIG).exists()
        is_needless = not lines or OF_SCRIPT.match(lines[-1])
        if is_needless and not has_begun:
            log.unlink()


def run_planned(planned: Launch, timeout_seconds: float | None = None) -> Record:
    """Run a launch on this machine to its end and return its record, whether the run succeeded or
    not. The caller holds the lock of its folder.

    Its ranks are forks where the script is this project's own and there is no GPU. Raises as
    `to_end`.
    """

    def start(output: IO[bytes]) -> Sequence[Started]:
        server = None
        if planned.call.kind is not None:
            server = own_server()
        if server is not None:
            ranks = _fork_ranks(planned, server, output)
            if len(ranks) == planned.world_size:
                return ranks
        if planned.world_size == 1:
            argv = [sys.executable, str(planned.script), *planned.arguments]
        else:
            argv = runner_argv(planned, Path())
        return [start_child(argv, output)]

    return to_end(start, planned.folder, timeout_seconds)


def _fork_ranks(planned: Launch, server: Path, output: IO[bytes]) -> list[Started]:
    """Fork the ranks of a launch. Where not all of them could be forked, those that were are ended
    again, and fewer are returned.

    Args:
        server: path of the fork server's socket.
        output: file to which the ranks' stdout and stderr go.
    """
    ranks: list[Started] = []
    try:
        with open(os.devnull, "rb") as stdin:
            for rank in range(planned.world_size):
                forked = _fork_rank(planned, rank, server, stdin, output)
                if forked is not None:
                    ranks.append(forked)
    finally:
        # A fork was refused, or an interrupt came meanwhile.
        if len(ranks) < planned.world_size:
            _end(ranks, 0.0)
    return ranks


def _fork_rank(
    planned: Launch, rank: int, server: Path, stdin: IO[bytes], output: IO[bytes]
) -> Started | None:
    """Fork one rank of a launch; None where the server refuses."""
    words = [str(planned.script), *planned.arguments]
    environment = {**child_environment(), **_rank_variables(planned, rank)}

    def begin(output_descriptor: int) -> Forked | None:
        streams = (stdin.fileno(), output_descriptor, output_descriptor)
        return fork(server, words, environment, streams)

    if planned.world_size == 1:
        # It writes into the log itself, so that its last lines arrive even if this process is
        # killed.
        return begin(output.fileno())
    # What one of several writes comes through a pipe, from which it is passed on.
    return start_watched(rank, planned.folder, begin, output.fileno())


def _rank_variables(planned: Launch, rank: int) -> dict[str, str]:
    """Environment variables that tell a rank its number, and how it meets the others; none for the
    only rank."""
    if planned.world_size == 1:
        return {}
    size = str(planned.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        # torchrun and DeepSpeed's launcher name the local size differently; accelerate takes
        # torchrun's as 1 if unset.
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "LOCAL_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(planned.master_port),
    }


def to_end(
    start: Callable[[IO[bytes]], Sequence[Started]],
    folder: Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
) -> Record:
    """Run one training attempt in a run folder that is locked for it, and make sure that the
    attempt has a record.

    The processes get SIGTERM, then SIGKILL, if the caller is interrupted, if the time is up, or if
    one of several fails. In every case nothing of their process groups is left when this returns or
    raises.

    Args:
        start: starts the training processes, with stdout and stderr going to the file that it is
            given.

    Returns:
        The record of the attempt; the existing one where the script says that the run was finished
        before.

    Raises:
        UnopenedError: the attempt ended before it had opened its folder.
        UserError: a timeout makes no sense, or the record cannot be written.
    """
    check_timeouts(timeout_seconds, step_timeout)
    with exits_noted(folder):
        return _LocalAttempt(folder, timeout_seconds, step_timeout).run(start)


class _LocalAttempt:
    """One attempt of a run on this machine, whose folder is locked for it."""

    def __init__(
        self, folder: Path, timeout_seconds: float | None, step_timeout: float | None
    ) -> None:
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._ranks = Ranks(folder)
        self._oom_kills = oom_kills()
        """The kernel's count of OOM kills when the attempt began; None if it does not count
        them."""
        self._log = RunLog(folder)
        self._hangs = HangDetector(folder, step_timeout, self._ranks.have_opened_the_run)
        self._processes: Sequence[Started] = ()
        self._statuses: list[int | None] = []
        """What `poll` last returned for each process while the attempt was watched; None where the
        process was still running."""

    def run(self, start: Callable[[IO[bytes]], Sequence[Started]]) -> Record:
        """Start the processes, watch them until there is a verdict, end what is left, and record
        the attempt; returns and raises as `to_end`."""
        began = time.monotonic()
        with open(self._log.path, "ab") as output, shown_progress(self._folder) as update:
            self._processes = start(output)
            try:
                verdict = self._watch(began, update)
                # Before the rest is ended: ranks that are ended here are not to blame.
                self._ranks.note_exits()
                # Where a hang ends the attempt, `_watch` returns the detector's own object.
                if verdict is self._hangs.verdict:
                    self._end_hanging_ranks()
            finally:
                statuses_at_end = _end(self._processes, END_GRACE_SECONDS)
                self._log.read(ended=True)
        status = None
        if verdict.status is None:
            # The processes ended by themselves. One that failed while others were still running is
            # the first failure, whatever these have come to since.
            status = _first_failure([*self._statuses, *statuses_at_end])
            verdict = Ending(None, self._how_it_ended(status))
        if self._ranks.have_opened_the_run():
            self._note_ranks()
        elif status == 0:
            record = self._earlier_record()
            if record.status == "ok":
                return record
            # The record there is a failed attempt's, so the run is not finished.
            verdict = Ending(None, "ended with status 0 before it had opened the run")
        return self._record(verdict, has_failed=bool(status))

    def _watch(self, began: float, update: Callable[[], object]) -> Ending:
        """Watch the processes until there is a verdict, and return it.

        Args:
            began: when the attempt began, by the monotonic clock.
            update: is called several times per second to show progress.
        """
        while True:
            time.sleep(PROCESS_POLL_SECONDS)
            update()
            self._statuses = [process.poll() for process in self._processes]
            verdict = judge(
                launcher_status=_common_status(self._statuses),
                since_start=time.monotonic() - began,
                timeout_seconds=self._timeout_seconds,
                hang=self._hangs.check(),
            )
            if verdict is not None:
                return verdict

    def _end_hanging_ranks(self) -> None:
        """Save the stacks of the ranks of a run that hangs, and end them.

        The ranks themselves are asked to end, since what started them may not pass a signal on.
        Those that wait then write what they measured.
        """
        pids = {rank.beat.pid for rank in self._hangs.ranks.values()}
        hanging = [process for process in descendants(os.getpid()) if process.pid in pids]
        self._hangs.save_stacks(lambda: ask_for_stacks(hanging))
        end(lambda: hanging, WRITE_SECONDS)

    def _how_it_ended(self, status: int) -> str:
        """How the attempt ended by itself, by the exit status of its first failure or 0, as
        text."""
        if status < 0:
            return f"killed by {signal_name(-status)}"
        how = f"ended with status {status}"
        lines = self._log.tail()
        if lines:
            how += f"; its last message: {lines[-1]}"
        return how

    def _note_ranks(self) -> None:
        """Note how many ranks the run has. If the process that was started here is its only rank,
        and nobody else notes how it ends, note that too."""
        ranks = self._ranks
        world_size = read_config(self._folder).world_size
        # On one machine no rank has a pod with a name.
        ranks.pods = (None,) * world_size
        is_only_rank = world_size == 1 and len(self._processes) == 1
        if not is_only_rank or ranks.are_watched():
            return
        status = self._statuses[0]
        # The rank ran until the verdict, so its end is no cause.
        if status is None:
            return
        seen = RankExit(
            rank=0,
            host=host(),
            pid=self._processes[0].pid,
            status=status,
            ended_unix_seconds=time.time(),
        )
        ranks.note_exit(seen, self._log.tail())

    def _earlier_record(self) -> Record:
        """The record that was there before a command that succeeded without opening the run; its
        last line, which says why it did nothing, is shown on stderr. `UserError` where there is no
        record."""
        print("\n".join(self._log.tail()[-1:]), file=sys.stderr)
        if not (self._folder / RECORD).is_file():
            raise UserError(f"{self._folder}: the command succeeded but left no run record there")
        return read_record(self._folder)

    def _record(self, verdict: Ending, *, has_failed: bool) -> Record:
        """Write the record of the attempt.

        Args:
            has_failed: whether a process ended badly by itself, so that the kernel may have killed
                it; otherwise its OOM kills do not concern this attempt.
        """
        kills = oom_kills_since(self._oom_kills) if has_failed else None
        return record_run(
            self._ranks,
            verdict,
            self._log,
            out_of_memory=[None] if kills else [],
            uncounted=[None] if self._oom_kills is None else [],
        )


def _first_failure(statuses: Sequence[int | None]) -> int:
    """The first exit status that is a failure; 0 if none is. None stands for a process that
    runs."""
    for status in statuses:
        if status is not None and status != 0:
            return status
    return 0


def _common_status(statuses: Sequence[int | None]) -> int | None:
    """The exit status of all processes together: the first failure, as soon as one has failed; None
    while one runs and none has failed; 0 once all have succeeded."""
    first_failure = _first_failure(statuses)
    if first_failure == 0 and None in statuses:
        return None
    return first_failure


def start_child(argv: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, in a group of its own; it writes stdout and
    stderr to `output`."""
    return start_bound(argv, stdout=output, stderr=subprocess.STDOUT)


def _end(processes: Sequence[Started], grace_seconds: float) -> list[int]:
    """End processes by SIGTERM and, once they have ended or had their time, what is left of their
    groups by SIGKILL; returns their exit statuses.

    Args:
        grace_seconds: time that all of them together have to end by themselves.
    """
    deadline = time.monotonic() + grace_seconds
    try:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes]
