"""Run a training script on this machine, from its start to its record; it ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from zeropods.errors import UserError
from zeropods.launch.causes import signal_name
from zeropods.launch.command import Launch, runner_argv
from zeropods.launch.forks import Forked, fork, own_server
from zeropods.launch.logs import LOG, OF_LAUNCHER, OF_SCRIPT, RunLog, following
from zeropods.launch.lost_pods_and_hangs import Ending, HangDetector, check_timeouts, judge
from zeropods.launch.outcome import Ranks, UnopenedError, failure, record_run
from zeropods.launch.ranks import WatchedRank, start_watched
from zeropods.launch.restart import calls_for_another
from zeropods.measure.environment import host
from zeropods.measure.exits import exits_noted
from zeropods.measure.record import CONFIG, LAUNCH_LOCK, RECORD, RankExit, Record, read_config, read_record
from zeropods.measure.run_folder import locked
from zeropods.pods.processes import ask_for_stacks, descendants, end, oom_kills, oom_kills_since, start_bound
from zeropods.programs import child_environment
from zeropods.train.arguments import arguments_of

POLL_SECONDS = 0.2
GRACE_SECONDS = 30.0
"""Seconds from SIGTERM to SIGKILL, in which a run can write its record."""
WRITE_SECONDS = 5.0
"""The same for ranks of a hanging run: those that wait for another one write what they measured within this time."""
Started = subprocess.Popen[bytes] | Forked | WatchedRank
"""Type of a process that was started here."""


def run_here(
    argv: list[str],
    folder: Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
) -> None:
    """Run a command that trains on this machine; `UserError` says why it failed.

    Args:
        timeout_seconds: limit for each attempt.
        step_timeout: as in `Supervision`.
        restarts: how many times to run it again after a rank was killed; it resumes from its newest checkpoint.
    """
    for number in range(restarts + 1):
        with locked(folder, LAUNCH_LOCK):
            was_there = (folder / LOG).exists()
            try:
                record = to_end(lambda output: [start_child(argv, output)], folder, timeout_seconds, step_timeout)
            except (UnopenedError, KeyboardInterrupt, SystemExit):
                if not was_there:
                    _remove_told(folder)
                raise
        if number == restarts or not calls_for_another(record):
            break
        print(f"{folder}: {record.reason}; restart {number + 1} of {restarts}", file=sys.stderr)
    if record.status != "ok":
        raise UserError(failure(folder, record))


def _remove_told(folder: Path) -> None:
    """Remove the log if no run began and nothing was said, or one of our scripts said why, which has been shown."""
    with suppress(FileNotFoundError):
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if not OF_LAUNCHER.match(line)]
        if not (folder / CONFIG).exists() and (not lines or OF_SCRIPT.match(lines[-1])):
            (folder / LOG).unlink()


def run_planned(planned: Launch, timeout_seconds: float | None = None) -> Record:
    """Run a launch on this machine to its end and return its record, whatever it says; its folder is locked already.

    Its ranks are forks where the script is this project's own and there is no GPU.
    """
    words, number = [str(planned.script), *planned.arguments], planned.world_size
    # torchrun and DeepSpeed's launcher name the local size differently; accelerate takes torchrun's as 1 if unset.
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(number))
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(planned.master_port)}

    def start(output: IO[bytes]) -> Sequence[Started]:
        server = own_server() if arguments_of(planned.script) else None
        ranks: list[Started] = []
        try:
            with open(os.devnull, "rb") as nothing:
                for rank in range(number if server else 0):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **master} if number > 1 else {}
                    environment = {**child_environment(), **place}

                    def begin(words_to: int, environment: Mapping[str, str] = environment) -> Forked | None:
                        return fork(server or "", words, environment, (nothing.fileno(), words_to, words_to))

                    # The only rank writes into the log itself, which then goes on if this process is killed.
                    to = output.fileno()
                    forked = begin(to) if number == 1 else start_watched(rank, planned.folder, begin, to)
                    ranks += [] if forked is None else [forked]
        finally:
            # A fork was refused, or an interrupt came meanwhile.
            if len(ranks) < number:
                _end(ranks, 0.0)
        if len(ranks) == number:
            return ranks
        return [start_child([sys.executable, *words] if number == 1 else runner_argv(planned, Path()), output)]

    return to_end(start, planned.folder, timeout_seconds)


def to_end(
    start: Callable[[IO[bytes]], Sequence[Started]],
    folder: Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
) -> Record:
    """Run one training attempt in a run folder that is locked for it, and make sure that the attempt has a record.

    The processes get SIGTERM, then SIGKILL, if the caller is interrupted, if the time is up, or if one of several
    fails. In every case nothing of their process groups is left when this returns or raises.

    Args:
        start: starts the training processes, with stdout and stderr going to the file that it is given.

    Returns:
        The record of the attempt; the existing one where the script says that the run was finished before.

    Raises:
        UnopenedError: the attempt ended before it had opened its folder.
    """
    check_timeouts(timeout_seconds, step_timeout)
    with exits_noted(folder):
        return _to_end(start, folder, timeout_seconds, step_timeout)


def _to_end(
    start: Callable[[IO[bytes]], Sequence[Started]],
    folder: Path,
    timeout_seconds: float | None,
    step_timeout: float | None,
) -> Record:
    ranks, kills, log = Ranks(folder), oom_kills(), RunLog(folder)
    hangs = HangDetector(folder, step_timeout, ranks.have_opened_the_run)
    verdict, began = None, time.monotonic()
    with open(log.path, "ab") as output, following(folder) as tick:
        processes = start(output)
        try:
            while verdict is None:
                time.sleep(POLL_SECONDS)
                tick()
                statuses = [process.poll() for process in processes]
                verdict = judge(
                    launcher_status=next(filter(None, statuses), None if None in statuses else 0),
                    since_start=time.monotonic() - began,
                    timeout_seconds=timeout_seconds,
                    hang=hangs.look(),
                )
            ranks.note_exits()
            if verdict is hangs.found:
                # The ranks themselves are asked to end, since what started them may not pass a signal on. Those that
                # wait then write what they measured.
                pids = {rank.beat.pid for rank in hangs.ranks.values()}
                hanging = [process for process in descendants(os.getpid()) if process.pid in pids]
                hangs.save_stacks(lambda: ask_for_stacks(hanging))
                end(lambda: hanging, WRITE_SECONDS)
        finally:
            ended = _end(processes, GRACE_SECONDS)
            log.read(ended=True)
    status = None if verdict.status else next(filter(None, [*statuses, *ended]), 0)
    if status is not None:
        last = "".join(f"; its last message: {line}" for line in log.tail()[-1:])
        how = f"killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}{last}"
        verdict = Ending(None, how)
    if ranks.have_opened_the_run():
        ranks.pods = (None,) * read_config(folder).world_size
        if len(ranks.pods) == len(processes) == 1 and not ranks.are_watched() and statuses[0] is not None:
            # The process that was started here is the only rank.
            seen = RankExit(
                rank=0, host=host(), pid=processes[0].pid, status=statuses[0], ended_unix_seconds=time.time()
            )
            ranks.note_exit(seen, log.tail())
    elif status == 0:
        print("\n".join(log.tail()[-1:]), file=sys.stderr)
        if not (folder / RECORD).is_file():
            raise UserError(f"{folder}: the command succeeded but left no run record there")
        record = read_record(folder)
        if record.status == "ok":
            return record
        # The record is an earlier attempt's.
        verdict = Ending(None, "ended with status 0 before it had opened the run")
    killed = None if not status else oom_kills_since(kills)
    return record_run(
        ranks, verdict, log, out_of_memory=[None] if killed else [], uncounted=[None] if kills is None else []
    )


def start_child(argv: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, in a group of its own; it writes stdout and stderr to `output`."""
    return start_bound(argv, stdout=output, stderr=subprocess.STDOUT)


def _end(processes: Sequence[Started], grace_seconds: float) -> list[int]:
    """End processes by SIGTERM, and what is left of their groups by SIGKILL; returns their exit statuses."""
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
