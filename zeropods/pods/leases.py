"""Leases of a pod and of its runs: a pod or run that is not renewed in time ends, with all of its processes."""

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

KERNEL, IDLE = "kernel", "idle"
LEASES = {KERNEL: 25.0, IDLE: 7200.0}
"""Seconds of a cluster's lease, by kind. `kernel`: the cluster ends this long after the process that started it, whose
renewals alone prolong it, and 30 s after that process nothing is left. `idle`: it ends this long after its last use."""
HAS_ENDED = "has ended"
"""Part of the answer to a supervisor that renews a run which has ended."""
CHECK_SECONDS = 1.0
LATE_SECONDS = 0.5
RUN_SECONDS = 9.0
"""Seconds of a run's lease: a pod ends the run's processes when its supervisor was silent for this long, which is more
than a supervisor waits for a silent pod."""
STRANGER_SECONDS = 10.0
"""Seconds of the lease of a run that nobody has opened yet: its first renewal can come after its first process."""
GRACE_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL where a lease has run out."""


@dataclass
class RunState:
    """The state of a run on this pod."""

    until: float
    """Time at which its lease runs out, in seconds of the monotonic clock."""
    has_ended: bool = False
    ending: int = 0
    """Number of tasks that are ending it."""
    seen: int = 0
    """Largest number of processes that were seen at one time."""
    asked: set[Process] = field(default_factory=set)
    """Processes that have been sent SIGTERM."""
    oom_kills_before: int | None = field(default_factory=oom_kills)
    """The kernel's count of processes that it has killed for lack of memory, at the time when the run was opened."""


class Leases:
    """The pod's own lease and those of its runs; everything below this process belongs to the pod.

    Args:
        daemons: returns the pids of the pod's ssh daemon and of the server that forks its ranks, if they are running.
        end: ends the pod; it is called with the reason.
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
        """Renew the pod's own lease: its master asks for more time or, if the lease is `idle`, the pod is used."""
        self._until = time.monotonic() + self._seconds

    def use(self) -> None:
        """Renew an `idle` lease, since the pod is in use: by a request, an ssh session or an open run."""
        if self._kind == IDLE:
            self.renew()

    def renew_run(self, name: str, seconds: float) -> dict[str, object]:
        """Open a run or prolong its lease, and return what is seen of it; once it has ended, return that as an error.

        A lease that has run out can still be renewed until a check notices it.
        """
        run = self._run(name, seconds)
        if run.has_ended:
            return {"error": f"run {name} {HAS_ENDED}"}
        run.until = time.monotonic() + seconds
        members = self._look()[0].get(name, ())
        return {"processes": len(members), "seen": run.seen, "oom_kills": oom_kills_since(run.oom_kills_before)}

    def ask_for_stacks(self, name: str) -> None:
        """Ask a run's ranks for the stacks of their threads."""
        ask_for_stacks(self._look()[0].get(name, ()))

    async def end_run(self, name: str, grace_seconds: float) -> dict[str, object]:
        """End a run for good: SIGTERM, later SIGKILL; return how many of its processes are left, and its OOM kills."""
        run = self._run(name, 0.0)
        run.has_ended = True
        run.ending += 1
        try:
            left = await asyncio.to_thread(
                end, lambda: pod_processes(self._daemons())[0].get(name, ()), grace_seconds, run.asked
            )
        finally:
            run.ending -= 1
        return {"left": left, "oom_kills": oom_kills_since(run.oom_kills_before)}

    def status(self) -> dict[str, object]:
        """Runs that are open or have processes, with their process counts, and the seconds left of the pod's lease."""
        found, _ = self._look()
        names = sorted({name for name, run in self._runs.items() if not run.has_ended} | found.keys())
        left = None if self._until == math.inf else round(self._until - time.monotonic(), 3)
        return {"runs": {name: len(found.get(name, ())) for name in names}, "lease_seconds_left": left}

    async def watch(self) -> None:
        """Check every second, for ever, and begin to end what no longer has a lease."""
        while True:
            due = time.monotonic() + CHECK_SECONDS
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() > due + LATE_SECONDS:
                # This process was held up: renewals that came in time may still be waiting to be read.
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
        """What `pod_processes` finds now; it is noted for each run, and an unknown run gets a short lease."""
        found, sessions = pod_processes(self._daemons())
        for name, members in found.items():
            run = self._run(name, STRANGER_SECONDS)
            run.seen = max(run.seen, len(members))
        return found, sessions

    def _run(self, name: str, seconds: float) -> RunState:
        return self._runs.setdefault(name, RunState(time.monotonic() + seconds))


def pod_processes(daemons: Sequence[int]) -> tuple[dict[str, list[Process]], int]:
    """The processes that live below this one, the agent; the first of `daemons` is its ssh daemon.

    Returns:
        The processes of each run, which are those with its mark in their environment and all that are below them; and
        the number of connections of sshd.
    """
    agent = os.getpid()
    # Only daemons with nothing below them: an idle pod checks every second, and need not read a process tree for it.
    if daemons and sorted(child_pids(agent)) == sorted(daemons) and not any(map(child_pids, daemons)):
        return {}, 0
    run_of: dict[int, str] = {}
    runs: dict[str, list[Process]] = {}
    sessions = 0
    for process in descendants(agent):
        with suppress(psutil.Error), process.oneshot():
            parent = process.ppid()
            # The nearest mark counts: the process's own, or that of a process above it.
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
