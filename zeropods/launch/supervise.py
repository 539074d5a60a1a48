"""The supervisor of a run on several pods: starts it, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from zeropods.launch.bound import bound_argv
from zeropods.launch.child import has_ended
from zeropods.launch.ending import end_tree
from zeropods.launch.heartbeat import Heartbeat
from zeropods.launch.output import Output
from zeropods.launch.ranks import Ranks
from zeropods.launch.sighting import Sighting
from zeropods.launch.stacks import carries, save_stacks
from zeropods.launch.standstill import Standstill
from zeropods.launch.verdict import Verdict, judge

POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0
"""From SIGTERM to SIGKILL of ranks that shall stop: time to write what they measured."""
LOST_GRACE_SECONDS = 4.0
"""The same where a pod was lost: the others wait for it and seldom hear a signal."""
LEAVE_SECONDS = 5.0
"""How long pdsh may take to end after the last rank."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    heartbeat: Heartbeat,
    ranks: Ranks,
    output: Callable[[IO[bytes]], Output],
    tick: Callable[[], object] = lambda: None,
    timeout_seconds: float | None = None,
    standstill: Standstill | None = None,
) -> tuple[Verdict, Output]:
    """Run a launcher over pods whose lease `heartbeat` holds; returns how it ended and what it wrote.

    However this ends, no process of the run is left on any pod that answers, nor here; a pod that does
    not answer ends them by itself when its lease runs out. DeepSpeed's runner never gets SIGINT or
    SIGTERM: it would answer with `pkill -f` on every pod, which ends other runs too.

    Args:
        command: DeepSpeed's launcher, or pdsh itself; every process that it starts on a pod carries the mark.
        tick: called some times a second.
        timeout_seconds: from the launcher's start; a run that takes longer is ended.
        standstill: watches the ranks' beats; a run that stands still is ended, and the stacks of its ranks are kept.
    """
    with noted_signals() as signals, _runner(command, environment) as process:
        assert process.stdout is not None
        written = output(process.stdout)
        verdict = None
        try:
            sighting = Sighting(process, heartbeat, ranks, written, signals, timeout_seconds, standstill)
            verdict = _watch(sighting, tick)
            if standstill is not None and verdict is standstill.found:
                save_stacks(standstill.folder, standstill.beats(), heartbeat.ask_for_stacks, carries(heartbeat.run))
        finally:
            unanswered = _stop(process, heartbeat, verdict)
            end_tree(process.pid)
            process.wait()
            written.close()
    return _by_agents(verdict, unanswered), written


def _watch(sighting: Sighting, tick: Callable[[], object]) -> Verdict:
    while True:
        verdict = judge(sighting.now())
        if verdict is not None:
            return verdict
        # A terminal that is gone ends no run by itself; SIGHUP does.
        with suppress(OSError):
            tick()
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes], heartbeat: Heartbeat, verdict: Verdict | None) -> dict[str, str]:
    """End the ranks first; pdsh and the runner then end by themselves, or are killed by the caller.

    Returns:
        why, by the name of each pod whose agent did not say that nothing is left.
    """
    lost = verdict is not None and verdict.status == "pod_lost"
    unanswered = heartbeat.stop_run(LOST_GRACE_SECONDS if lost else GRACE_SECONDS)
    if not lost:
        # Its last lines are still on their way.
        deadline = time.monotonic() + LEAVE_SECONDS
        while not has_ended(process) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    return unanswered


def _by_agents(verdict: Verdict, unanswered: dict[str, str]) -> Verdict:
    """Where the launcher ended badly and an agent is gone, the pod was lost: it ended, or was brought down."""
    if verdict.status is not None or verdict.reason is None or not unanswered:
        return verdict
    pod, why = next(iter(unanswered.items()))
    return Verdict("pod_lost", f"{pod} has ended: {why}", pod)


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
        if process.returncode is None:
            end_tree(process.pid)
            process.wait()


@contextmanager
def noted_signals() -> Iterator[list[str]]:
    """Names of the SIGINT, SIGTERM and SIGHUP that came; they interrupt nothing, so that no clean-up is cut short."""
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(signal.Signals(number).name))
        for number in SIGNALS
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
