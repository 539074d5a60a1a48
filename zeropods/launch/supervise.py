"""The supervisor of a run on several pods: starts it, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from zeropods.launch.bound import bound_argv
from zeropods.launch.ending import end_tree
from zeropods.launch.heartbeat import Heartbeat
from zeropods.launch.output import Output
from zeropods.launch.verdict import ENDED, Verdict, judge

POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL of ranks that shall stop: time to write what they measured."""
LOST_GRACE_SECONDS = 4.0
"""The same where a pod was lost: the others wait for it and seldom hear a signal."""
LEAVE_SECONDS = 10.0
"""How long pdsh may take to end after the last rank."""


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    heartbeat: Heartbeat,
    output: Callable[[IO[bytes]], Output],
    tick: Callable[[], object] = lambda: None,
) -> tuple[Verdict, Output]:
    """Run a launcher over pods whose lease `heartbeat` holds; returns how it ended and what it wrote.

    However this ends, no process of the run is left on any pod that answers, nor here; a pod that does
    not answer ends them by itself when its lease runs out. DeepSpeed's runner never gets SIGINT or
    SIGTERM: it would answer with `pkill -f` on every pod, which ends other runs too.

    Args:
        command: DeepSpeed's launcher, or pdsh itself; every process that it starts on a pod carries the mark.
        tick: called some times a second.
    """
    with _noted_signals() as signals, _runner(command, environment) as process:
        assert process.stdout is not None
        written = output(process.stdout)
        try:
            verdict = _watch(process, heartbeat, written, signals, tick)
            _stop(process, heartbeat, verdict)
        finally:
            end_tree(process.pid)
            process.wait()
            written.close()
    return verdict, written


def _watch(
    process: subprocess.Popen[bytes],
    heartbeat: Heartbeat,
    written: Output,
    signals: list[str],
    tick: Callable[[], object],
) -> Verdict:
    first_seen: float | None = None
    while True:
        pulses = heartbeat.pulses()
        if first_seen is None and any(pulse.most for pulse in pulses):
            first_seen = time.monotonic()
        verdict = judge(
            pulses,
            launcher_ended=process.poll() is not None,
            signal=signals[0] if signals else None,
            failed_sessions=written.failed_sessions(),
            others_seconds=0.0 if first_seen is None else time.monotonic() - first_seen,
        )
        if verdict is not None:
            return verdict
        tick()
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes], heartbeat: Heartbeat, verdict: Verdict) -> None:
    """End the ranks first; pdsh and the runner then end by themselves, or are killed by the caller."""
    heartbeat.stop_run(LOST_GRACE_SECONDS if verdict.status == "pod_lost" else GRACE_SECONDS)
    if verdict != ENDED and verdict.status != "pod_lost":
        # Its last lines are still on their way.
        _await(process, LEAVE_SECONDS)


def _await(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


@contextmanager
def _runner(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher in a session of its own: a terminal's Ctrl-C does not reach it. It dies with this process."""
    process = subprocess.Popen(
        bound_argv(list(command), signal.SIGKILL),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=dict(environment),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end_tree(process.pid)
            process.wait()


@contextmanager
def _noted_signals() -> Iterator[list[str]]:
    """Names of the SIGINT and SIGTERM that came; they interrupt nothing, so that cleaning up is never cut short."""
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(signal.Signals(number).name))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
