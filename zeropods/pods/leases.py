"""Leases of a pod and of its runs: what is not renewed in time ends, with all of its processes."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from psutil import Process

from zeropods.pods.processes import RUN, ask_for_stacks, child_pids, descendants, end, oom_kills, variable

KERNEL, IDLE = "kernel", "idle"
LEASES = {KERNEL: 25.0, IDLE: 7200.0}
"""Seconds of a cluster's lease. `kernel`: the cluster ends so long after the process that started it, whose renewals
alone prolong it, and is gone 30 seconds after; `idle`: so long after its last use."""
HAS_ENDED = "has ended"
"""In what a supervisor is told that renews a run after its end."""
CHECK_SECONDS = 1.0
LATE_SECONDS = 0.5
RUN_SECONDS = 9.0
"""The lease of a run: a pod ends its processes when its supervisor was silent for so long; longer than a supervisor
waits for a silent pod."""
STRANGER_SECONDS = 10.0
"""The lease of a run that nobody has opened yet: its first renewal can come after its first process."""
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL, where a lease has run out."""


@dataclass
class RunState:
    """A run on this pod."""

    until: float
    """When its lease runs out, by the monotonic clock."""
    has_ended: bool = False
    ending: int = 0
    """Number of tasks that are ending it."""
    seen: int = 0
    """Most processes that were seen at a time."""
    asked: set[Process] = field(default_factory=set)
    """Processes that got SIGTERM."""
    oom_kills_before: int = field(default_factory=oom_kills)
    """The kernel's count of processes that it has ended for want of memory, when the run was opened."""


class Leases:
    """The pod's own lease and those of its runs; everything below this process is the pod's.

    Args:
        daemons: tells the pids of the pod's ssh daemon and of the server that forks its ranks, as far as they run.
        end: ends the pod; is told why.
    """

    def __init__(self, daemons: Callable[[], Sequence[int]], end: Callable[[str], object]) -> None:
        self._daemons, self._end = daemons, end
        self._kind, self._seconds, self._until = "", math.inf, math.inf
        self._runs: dict[str, RunState] = {}
        self._tasks: set[asyncio.Task[dict[str, object]]] = set()

    def open(self, kind: str, seconds: float) -> None:
        """Begin the pod's own lease, of kind `kernel` or `idle`."""
        self._kind, self._seconds = kind, seconds
        self.renew()

    def renew(self) -> None:
        """The master asked for more time."""
        self._until = time.monotonic() + self._seconds

    def use(self) -> None:
        """Somebody uses the pod: a request, an ssh session, an open run."""
        if self._kind == IDLE:
            self.renew()

    def renew_run(self, name: str, seconds: float) -> dict[str, object]:
        """Open or prolong a run and tell what is seen of it; once it has ended, that.

        A lease that has run out may still be renewed until a check has found it.
        """
        run = self._run(name, seconds)
        if run.has_ended:
            return {"error": f"run {name} {HAS_ENDED}"}
        run.until = time.monotonic() + seconds
        members = self._look()[0].get(name, ())
        return {"processes": len(members), "seen": run.seen, "oom_kills": oom_kills() - run.oom_kills_before}

    def ask_for_stacks(self, name: str) -> None:
        """Ask a run's ranks for the stacks of their threads."""
        ask_for_stacks(self._look()[0].get(name, ()))

    async def end_run(self, name: str, grace_seconds: float) -> dict[str, object]:
        """End a run for ever: SIGTERM, later SIGKILL; tells how many of its processes are left after all."""
        run = self._run(name, 0.0)
        run.has_ended = True
        run.ending += 1
        try:
            left = await asyncio.to_thread(
                end, lambda: pod_processes(self._daemons())[0].get(name, ()), grace_seconds, run.asked
            )
        finally:
            run.ending -= 1
        return {"left": left, "oom_kills": oom_kills() - run.oom_kills_before}

    def status(self) -> dict[str, object]:
        """Open runs and those that have processes with their number, and how long the lease lasts."""
        found, _ = self._look()
        names = sorted({name for name, run in self._runs.items() if not run.has_ended} | found.keys())
        left = None if self._until == math.inf else round(self._until - time.monotonic(), 3)
        return {"runs": {name: len(found.get(name, ())) for name in names}, "lease_seconds_left": left}

    async def watch(self) -> None:
        """Check each second, for ever, and begin to end what has no lease any more."""
        while True:
            due = time.monotonic() + CHECK_SECONDS
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() > due + LATE_SECONDS:
                # This process was held up: renewals may have come in time and wait to be read.
                await asyncio.sleep(LATE_SECONDS)
            found, sessions = self._look()
            for name, run in self._runs.items():
                run.has_ended = run.has_ended or run.until <= time.monotonic()
                if run.has_ended and not run.ending and name in found:
                    task = asyncio.create_task(self.end_run(name, GRACE_SECONDS))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            if sessions or any(run.ending or not run.has_ended for run in self._runs.values()):
                self.use()
            if self._until <= time.monotonic():
                neglect = "renewed" if self._kind == KERNEL else "used"
                self._end(f"its {self._kind} lease was not {neglect} for {self._seconds:g} s")

    def _look(self) -> tuple[dict[str, list[Process]], int]:
        """What `pod_processes` finds now; that is noted of each run, and an unknown one gets a short lease."""
        found, sessions = pod_processes(self._daemons())
        for name, members in found.items():
            run = self._run(name, STRANGER_SECONDS)
            run.seen = max(run.seen, len(members))
        return found, sessions

    def _run(self, name: str, seconds: float) -> RunState:
        return self._runs.setdefault(name, RunState(time.monotonic() + seconds))


def pod_processes(daemons: Sequence[int]) -> tuple[dict[str, list[Process]], int]:
    """What lives below this process, the agent; the first of `daemons` is its ssh daemon.

    Returns:
        By run, the processes with its mark in their environment and all that is below them; and the number of
        connections of sshd.
    """
    agent = os.getpid()
    # Daemons with nothing below them: an idle pod looks each second, and reads no tree for it.
    if daemons and sorted(child_pids(agent)) == sorted(daemons) and not any(map(child_pids, daemons)):
        return {}, 0
    run_of: dict[int, str] = {}
    runs: dict[str, list[Process]] = {}
    sessions = 0
    for process in descendants(agent):
        with suppress(psutil.Error), process.oneshot():
            parent = process.ppid()
            # The nearest mark counts, its own or that of a process above it.
            run = variable(process, RUN) or run_of.get(parent)
            if run is not None:
                run_of[process.pid] = run
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if run is not None:
                runs.setdefault(run, []).append(process)
            elif parent in daemons[:1]:
                sessions += 1
    return runs, sessions
