"""Leases of a pod and of its runs: a pod or run that is not renewed in time ends, with all of its
processes."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
from psutil import Process

from zeropods.pods.processes import (
    RUN,
    ask_for_stacks,
    child_pids,
    descendants,
    end,
    oom_kills,
    oom_kills_since,
    variable,
)

KERNEL_LEASE = "kernel"
IDLE_LEASE = "idle"
LEASES = {KERNEL_LEASE: 25.0, IDLE_LEASE: 7200.0}
"""Seconds of a cluster's lease, by kind. `kernel`: the cluster ends this long after the process
that started it, whose renewals alone prolong it, and 30 s after that process nothing is left.
`idle`: it ends this long after its last use."""
HAS_ENDED = "has ended"
"""Part of the answer to a supervisor that renews a run which has ended."""
CHECK_SECONDS = 1.0
"""Seconds between two checks of what has a lease."""
DELAY_SECONDS = 0.5
"""Seconds by which a check may come too late."""
RUN_SECONDS = 9.0
"""Seconds of a run's lease: a pod ends the run's processes when its supervisor was silent for this
long, which is more than a supervisor waits for a silent pod."""
STRANGER_SECONDS = 10.0
"""Seconds of the lease of a run that nobody has opened yet: its first renewal can come after its
first process."""
LEASE_GRACE_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL where a lease has run out."""


@dataclass
class RunState:
    """The state of a run on this pod."""

    lease_end: float
    """Time at which its lease runs out, in seconds of the monotonic clock."""
    has_ended: bool = False
    ending: int = 0
    """Number of tasks that are ending it."""
    most_processes: int = 0
    """Largest number of its processes that were seen at one time."""
    sent_sigterm: set[Process] = field(default_factory=set)
    """Processes that have been sent SIGTERM."""
    oom_kills_before: int | None = field(default_factory=oom_kills)
    """The kernel's count of processes that it has killed for lack of memory, at the time when the
    run was opened."""


class Leases:
    """The pod's own lease and those of its runs; everything below this process belongs to the pod.

    Args:
        daemons: returns the pids of the pod's ssh daemon and of the server that forks its ranks, if
            they are running.
        end: ends the pod; it is called with the reason.
    """

    def __init__(self, daemons: Callable[[], Sequence[int]], end: Callable[[str], object]) -> None:
        self._daemons = daemons
        self._end = end
        self._kind = ""
        self._seconds = math.inf
        self._lease_end = math.inf
        """When the pod's own lease runs out, by the monotonic clock; never, until it is opened."""
        self._runs: dict[str, RunState] = {}
        self._tasks: set[asyncio.Task[dict[str, object]]] = set()
        """Tasks that end runs, kept here since the event loop does not keep them alive."""

    def open(self, kind: str, seconds: float) -> None:
        """Begin the pod's own lease, of kind `kernel` or `idle`."""
        self._kind = kind
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Renew the pod's own lease: its master asks for more time or, if the lease is `idle`, the
        pod is used."""
        self._lease_end = time.monotonic() + self._seconds

    def use(self) -> None:
        """Renew an `idle` lease, since the pod is in use: by a request, an ssh session or an open
        run."""
        if self._kind == IDLE_LEASE:
            self.renew()

    def renew_run(self, name: str, seconds: float) -> dict[str, object]:
        """Open a run, or prolong its lease to `seconds` from now.

        A lease that has run out can still be renewed until a check notices it.

        Returns:
            `processes`, the number of its processes now; `seen`, the most at one time; and
            `oom_kills`, those since it was opened, None where the kernel does not count them. Once
            the run has ended, an `error` alone.
        """
        run = self._state_of(name, seconds)
        if run.has_ended:
            return {"error": f"run {name} {HAS_ENDED}"}
        run.lease_end = time.monotonic() + seconds
        processes = self._note_processes().runs.get(name, ())
        return {
            "processes": len(processes),
            "seen": run.most_processes,
            "oom_kills": oom_kills_since(run.oom_kills_before),
        }

    def ask_for_stacks(self, name: str) -> None:
        """Ask a run's ranks for the stacks of their threads."""
        ask_for_stacks(self._note_processes().runs.get(name, ()))

    async def end_run(self, name: str, grace_seconds: float) -> dict[str, object]:
        """End a run for good, so that it cannot be renewed: SIGTERM to its processes, and SIGKILL
        to those that are left `grace_seconds` later.

        Returns:
            `left`, the number of processes that hang in the kernel; and `oom_kills`, as
            `renew_run` does.
        """
        run = self._state_of(name, 0.0)
        run.has_ended = True
        run.ending += 1

        def processes() -> Sequence[Process]:
            return pod_processes(self._daemons()).runs.get(name, ())

        try:
            left = await asyncio.to_thread(end, processes, grace_seconds, run.sent_sigterm)
        finally:
            run.ending -= 1
        return {"left": left, "oom_kills": oom_kills_since(run.oom_kills_before)}

    def status(self) -> dict[str, object]:
        """The state of the pod.

        Returns:
            `runs`, the number of processes of each run that is open or has processes, by its name;
            and `lease_seconds_left`, the seconds until the pod's own lease runs out, None where it
            has none yet.
        """
        processes_of_runs = self._note_processes().runs
        open_runs = {name for name, run in self._runs.items() if not run.has_ended}
        counts = {}
        for name in sorted(open_runs | processes_of_runs.keys()):
            counts[name] = len(processes_of_runs.get(name, ()))
        seconds_left = None
        if self._lease_end != math.inf:
            seconds_left = round(self._lease_end - time.monotonic(), 3)
        return {"runs": counts, "lease_seconds_left": seconds_left}

    async def watch(self) -> None:
        """Check every second, for ever, and begin to end what no longer has a lease."""
        while True:
            due = time.monotonic() + CHECK_SECONDS
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() > due + DELAY_SECONDS:
                # This process was held up: renewals that came in time may still be waiting to be
                # read.
                await asyncio.sleep(DELAY_SECONDS)
            self._check()

    def _check(self) -> None:
        """Begin to end runs without a lease, and the pod where it has none; count an open run or
        session as a use of the pod."""
        processes_of_runs, sessions = self._note_processes()
        for name, run in self._runs.items():
            if run.lease_end <= time.monotonic():
                run.has_ended = True
            # Its lease has just run out, or processes have come since it was ended.
            if run.has_ended and not run.ending and name in processes_of_runs:
                task = asyncio.create_task(self.end_run(name, LEASE_GRACE_SECONDS))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        is_any_run_open = any(run.ending or not run.has_ended for run in self._runs.values())
        if sessions or is_any_run_open:
            self.use()
        if self._lease_end <= time.monotonic():
            missed = "renewed" if self._kind == KERNEL_LEASE else "used"
            self._end(f"its {self._kind} lease was not {missed} for {self._seconds:g} s")

    def _note_processes(self) -> PodProcesses:
        """Look at what lives on the pod and return it. The most processes of each run at one time
        are noted, and a run that nobody has opened yet is opened with a short lease."""
        living = pod_processes(self._daemons())
        for name, processes in living.runs.items():
            run = self._state_of(name, STRANGER_SECONDS)
            run.most_processes = max(run.most_processes, len(processes))
        return living

    def _state_of(self, name: str, seconds: float) -> RunState:
        """The state of a run. One that is not known is opened with a lease of so many seconds; one
        that is known keeps its lease."""
        if name not in self._runs:
            self._runs[name] = RunState(time.monotonic() + seconds)
        return self._runs[name]


class PodProcesses(NamedTuple):
    """The processes that live below an agent."""

    runs: dict[str, list[Process]]
    """The processes of each run, which are those with its mark in their environment and all that
    are below them."""
    sessions: int
    """Number of connections of sshd."""


def pod_processes(daemons: Sequence[int]) -> PodProcesses:
    """The processes of each run that live below this one, the agent, and the number of sshd's
    connections outside of runs.

    Args:
        daemons: pids of the agent's own daemons: its sshd, if it has one, and the server that
            forks ranks, if it has started one.
    """
    agent = os.getpid()
    # Without daemons this does not count: on a kernel that tells no children, none would be found
    # where none are expected, and each pod would look idle.
    if daemons and _is_idle(agent, daemons):
        return PodProcesses({}, 0)
    run_of: dict[int, str] = {}
    runs: dict[str, list[Process]] = {}
    sessions = 0
    for process in descendants(agent):
        # A process that has ended meanwhile is left out.
        with suppress(psutil.Error), process.oneshot():
            parent = process.ppid()
            # A mark is the variable `RUN`. The nearest one counts, the process's own or that of a
            # process above it; parents come first.
            run = variable(process, RUN) or run_of.get(parent)
            if run is not None:
                run_of[process.pid] = run
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if run is not None:
                runs.setdefault(run, []).append(process)
            elif parent in daemons and process.name().startswith("sshd"):
                sessions += 1
    return PodProcesses(runs, sessions)


def _is_idle(agent: int, daemons: Sequence[int]) -> bool:
    """Whether nothing lives below an agent but its daemons, and nothing below these.

    This spares an idle pod reading its process tree every second. False too where the kernel does
    not tell a process's children.
    """
    if sorted(child_pids(agent)) != sorted(daemons):
        return False
    return not any(map(child_pids, daemons))
