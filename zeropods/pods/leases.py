"""Leases of a cluster and of its runs, and the processes that end with them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from zeropods.pods.processes import Process, Tree, arguments, ask_for_stacks, child_pids, is_there, send, variable

# How long a cluster and its runs live without being renewed. Pure: every method is told the time.

KERNEL, IDLE = "kernel", "idle"
STRANGER_SECONDS = 10.0
"""Processes of a run that nobody opened may live so long: its first renewal can come after its first process."""


HAS_ENDED = "has ended"
"""In what a supervisor is told that renews a run after its end."""


class RunEndedError(Exception):
    """The run has ended on this pod, for ever."""


class ClusterLease:
    """The pod's own lease: `kernel` is prolonged by renewals only, `idle` by any use.

    Times are seconds of a monotonic clock.
    """

    def __init__(self, kind: str, seconds: float, now: float) -> None:
        self.kind = kind
        self.seconds = seconds
        self._renewed = now
        self._used = now

    def renew(self, now: float) -> None:
        """The master asked for more time."""
        self._renewed = self._used = now

    def use(self, now: float) -> None:
        """Somebody is using the pod: a request, an ssh session, an open run."""
        self._used = now

    def seconds_left(self, now: float) -> float:
        """0 or less when the lease has run out."""
        return (self._renewed if self.kind == KERNEL else self._used) + self.seconds - now

    def idle_seconds(self, now: float) -> float:
        """Since the last use."""
        return now - self._used


class RunLeases:
    """Which runs are open, until when, and which have ended."""

    def __init__(self) -> None:
        self._ends_at: dict[str, float] = {}
        self._ended: set[str] = set()
        self._strangers_since: dict[str, float] = {}

    @property
    def open(self) -> frozenset[str]:
        """Runs that were renewed and have not ended."""
        return frozenset(self._ends_at)

    def renew(self, run: str, seconds: float, now: float) -> None:
        """Open a run or prolong it; `RunEndedError` once it has ended.

        A lease that has run out may still be renewed until `condemned` has found it.
        """
        if run in self._ended:
            raise RunEndedError(run)
        self._ends_at[run] = now + seconds

    def end(self, run: str) -> None:
        """End a run, known or not: it cannot be opened any more."""
        self._ends_at.pop(run, None)
        self._ended.add(run)

    def condemned(self, present: Iterable[str], now: float) -> set[str]:
        """Runs whose processes have to go; from now on they have ended.

        Those whose lease ran out; of those `present` (they have processes), the ended ones and the
        ones that were not opened within `STRANGER_SECONDS` of being seen first.
        """
        present = set(present)
        unknown = present - self._ended - self.open
        self._strangers_since = {run: self._strangers_since.get(run, now) for run in unknown}
        out = {run for run, end in self._ends_at.items() if end <= now}
        out |= {run for run, since in self._strangers_since.items() if now - since >= STRANGER_SECONDS}
        for run in out:
            self.end(run)
        return out | (present & self._ended)

    def seconds_to_next_end(self, now: float) -> float | None:
        """None where no run is open."""
        return min(self._ends_at.values()) - now if self._ends_at else None


# What runs on a pod at one moment: processes of each run, ssh sessions, and what was left behind.

RUN_VARIABLE = "ZEROPODS_RUN"
"""Marks the processes of a run: its launcher exports it on every pod."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh", "busybox"})
DEEPSPEED_LAUNCHERS = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py")


@dataclass(frozen=True, kw_only=True)
class Census:
    """Living descendants of an agent, sorted."""

    runs: dict[str, tuple[Process, ...]]
    """Those that carry a run's mark in their environment, and all that is below them."""
    leading: dict[str, tuple[Process, ...]]
    """Of each run: what is above its processes, up to sshd's session, and leads to nothing else."""
    sessions: int
    """Connections of the agent's sshd."""
    orphans: frozenset[Process]
    """Children of the agent without a mark, besides its sshd."""


def take_census(agent: int, sshd: int | None) -> Census:
    """Sort what is below `agent`, whose ssh daemon is `sshd`.

    /proc is read once, and hardly at all where nothing runs: an idle pod is asked often.
    """
    if _is_quiet(agent, sshd):
        return Census(runs={}, leading={}, sessions=0, orphans=frozenset())
    tree = Tree.read()
    run_of = dict(_marked(tree, agent))
    runs: dict[str, list[Process]] = {}
    for process in tree.below(agent):
        if process.pid in run_of and not process.zombie:
            runs.setdefault(run_of[process.pid], []).append(process)
    sessions = [] if sshd is None else [process for process in tree.children(sshd) if not process.zombie]
    strays = (child for child in tree.children(agent) if child.pid != sshd and child.pid not in run_of)
    return Census(
        runs={run: tuple(members) for run, members in runs.items()},
        leading={run: tuple(_leading(tree, members, {agent, sshd})) for run, members in runs.items()},
        sessions=len(sessions),
        orphans=frozenset(child for child in strays if not child.zombie),
    )


def takes_sigterm(process: Process) -> bool:
    """Whether a process of a run is asked to end before it is killed.

    Not asked: shells and sshd, which would cut the output of their children off, and DeepSpeed's
    launcher, which answers by ending its ranks over 30 s; they end by themselves after the ranks.
    """
    if process.name in SHELLS or process.name.startswith("sshd"):
        return False
    return not any(argument.endswith(DEEPSPEED_LAUNCHERS) for argument in arguments(process))


def _marked(tree: Tree, agent: int) -> Iterator[tuple[int, str]]:
    """(pid, run) of every descendant with a mark of its own or above it; the nearest counts."""
    inherited: dict[int, str] = {}
    for process in tree.below(agent):
        run = variable(process, RUN_VARIABLE) or inherited.get(process.parent)
        if run is not None:
            inherited[process.pid] = run
            yield process.pid, run


def _leading(tree: Tree, members: Iterable[Process], tops: set[int | None]) -> list[Process]:
    """Processes above `members`, below `tops`, whose descendants all are of the run or lead to it; lowest first."""
    known = {process.pid for process in members}
    found: list[Process] = []
    waiting = list(members)
    for process in waiting:
        above = tree.table.get(process.parent)
        if above is None or above.pid in known or above.pid in tops:
            continue
        if all(child.pid in known or child.zombie for child in tree.children(above.pid)):
            known.add(above.pid)
            found.append(above)
            waiting.append(above)
    return found


def _is_quiet(agent: int, sshd: int | None) -> bool:
    """Whether an agent of one thread has nothing below it but an sshd without sessions; False where unsure."""
    return sshd is not None and child_pids(agent) == [sshd] and child_pids(sshd) == []


# Runs of a pod: leases, the processes that were seen, and their end.

LEASE_GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL, where a lease has run out."""
PAUSE_SECONDS = 0.1
KILL_SECONDS = 20.0
"""SIGKILL is repeated so long; what is left then hangs in the kernel."""
FLUSH_SECONDS = 1.0
"""An ssh session passes on the last words of its run, which has ended, for at most so long."""
WATCHED_SECONDS = 30.0
"""A late process of an ended run is looked for each second for so long."""
EMPTY_READINGS = 2
"""A process may be missed while its parent ends: none is left where two readings in a row say so."""


@dataclass
class Sighting:
    """What was seen of a run's processes."""

    most: int = 0
    last: float | None = None


class Runs:
    """All runs below this process.

    Args:
        sshd: tells the pid of the pod's ssh daemon.
    """

    def __init__(self, sshd: Callable[[], int | None]) -> None:
        self.leases = RunLeases()
        self._sshd = sshd
        self._sightings: dict[str, Sighting] = {}
        self._ending: dict[str, asyncio.Task[int]] = {}
        self._kill_at: dict[str, float] = {}
        self._left_behind: frozenset[Process] = frozenset()
        self._watched_until = 0.0

    def look(self) -> Census:
        """Take a census and remember what was seen."""
        census = take_census(os.getpid(), self._sshd())
        for run, members in census.runs.items():
            sighting = self._sightings.setdefault(run, Sighting())
            sighting.most = max(sighting.most, len(members))
            sighting.last = time.monotonic()
        return census

    def renew(self, run: str, seconds: float) -> dict[str, object]:
        """Open or prolong a run and tell what is seen of it; `RunEndedError` once it has ended."""
        self.leases.renew(run, seconds, time.monotonic())
        members = self.look().runs.get(run, ())
        sighting = self._sightings.get(run, Sighting())
        since = None if sighting.last is None else round(time.monotonic() - sighting.last, 3)
        return {"run": run, "processes": len(members), "seen": sighting.most, "last_seen_seconds": since}

    def ask_for_stacks(self, run: str) -> int:
        """Ask a run's ranks for the stacks of their threads; returns how many were asked."""
        return ask_for_stacks(self.look().runs.get(run, ()))

    async def stop(self, run: str, grace_seconds: float) -> int:
        """End a run for ever; returns how many of its processes are left, after all was tried."""
        return await asyncio.shield(self._begin_end(run, grace_seconds))

    def check(self) -> Census:
        """Begin to end what has no right to be there any more."""
        census = self.look()
        now = time.monotonic()
        for run in self.leases.condemned(census.runs, now):
            self._begin_end(run, LEASE_GRACE_SECONDS)
        self._end_left_behind(census)
        self._sightings = {
            run: sighting
            for run, sighting in self._sightings.items()
            if run in self.leases.open or run in census.runs or run in self._ending
        }
        return census

    def is_busy(self) -> bool:
        """Whether there are runs to check each second."""
        return bool(self.leases.open or self._ending or time.monotonic() < self._watched_until)

    def _begin_end(self, run: str, grace_seconds: float) -> asyncio.Task[int]:
        self.leases.end(run)
        kill_at = time.monotonic() + grace_seconds
        self._watched_until = kill_at + WATCHED_SECONDS
        self._kill_at[run] = min(kill_at, self._kill_at.get(run, kill_at))
        if run not in self._ending:
            self._ending[run] = asyncio.create_task(self._end(run))
        return self._ending[run]

    async def _end(self, run: str) -> int:
        try:
            left, leading = await self._end_members(run)
            await self._end_leading(leading)
            return left
        finally:
            del self._ending[run], self._kill_at[run]

    async def _end_members(self, run: str) -> tuple[int, set[Process]]:
        """SIGTERM, later SIGKILL, to the run's processes; returns how many are left, and what led to them."""
        asked: set[Process] = set()
        leading: set[Process] = set()
        empty = 0
        while True:
            census = self.look()
            members = census.runs.get(run, ())
            leading.update(census.leading.get(run, ()))
            empty = 0 if members else empty + 1
            overdue = time.monotonic() - self._kill_at[run]
            if empty == EMPTY_READINGS or overdue > KILL_SECONDS:
                return len(members), leading
            if overdue >= 0:
                send_all(members, signal.SIGKILL)
            else:
                asking = [process for process in members if process not in asked and takes_sigterm(process)]
                send_all(asking, signal.SIGTERM)
                asked.update(asking)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _end_leading(self, leading: set[Process]) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        while leading and time.monotonic() < deadline:
            await asyncio.sleep(PAUSE_SECONDS)
            leading = {process for process in leading if is_there(process)}
        send_all(leading, signal.SIGKILL)

    def _end_left_behind(self, census: Census) -> None:
        """End orphans that two checks have seen, where there is no session and no run that they could belong to."""
        alone = not (census.sessions or self.leases.open or self._ending)
        found = census.orphans if alone else frozenset()
        send_all(found & self._left_behind, signal.SIGKILL)
        self._left_behind = found


def send_all(processes: Iterable[Process], signum: signal.Signals) -> None:
    """Send a signal to each of them that still is there."""
    for process in processes:
        send(process, signum)


# A pod's clock: it sleeps while there is nothing to watch, and says when and why the pod has to end.

BUSY_SECONDS = 1.0
"""From check to check while a run is open, a session is there, or something was left behind."""
QUIET_SECONDS = 10.0
"""From look to look while sshd is all that there is."""
LATE_SECONDS = 0.5


@dataclass(frozen=True)
class Ending:
    """Why a pod ends, and its exit status."""

    reason: str
    status: int


class Lifetime:
    """Leases and runs of one pod.

    Args:
        sshd: tells the pid of the pod's ssh daemon.
    """

    def __init__(self, sshd: Callable[[], int | None]) -> None:
        self.runs = Runs(sshd)
        self.lease: ClusterLease | None = None
        """None until the master has said how long it is."""
        self._sshd = sshd
        self._ending: Ending | None = None
        self._wake = asyncio.Event()
        self._sees_something = False

    async def run(self) -> Ending:
        """Lifetime until the pod has to end."""
        while self._ending is None:
            await self._sleep()
            if self._ending is None:
                self._check()
        return self._ending

    def end(self, reason: str, status: int) -> None:
        """Let the pod end; the first reason counts."""
        self._ending = self._ending or Ending(reason, status)
        self._wake.set()

    def notice(self) -> None:
        """Something is there to be watched: check soon, and each second from now on."""
        if not self._sees_something:
            self._sees_something = True
            self._wake.set()

    def status(self) -> dict[str, object]:
        """Runs and the number of their processes, sessions, lease."""
        census = self.runs.look()
        if _shows(census):
            self.notice()
        now = time.monotonic()
        names = sorted(self.runs.leases.open | census.runs.keys())
        return {
            "runs": {run: len(census.runs.get(run, ())) for run in names},
            "sessions": census.sessions,
            "idle_seconds": None if self.lease is None else round(self.lease.idle_seconds(now), 3),
            "lease_seconds_left": None if self.lease is None else round(self.lease.seconds_left(now), 3),
        }

    async def _sleep(self) -> None:
        due = time.monotonic() + self._pause()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(due - time.monotonic(), 0))
        self._wake.clear()
        if time.monotonic() > due + LATE_SECONDS:
            # This process was held up: renewals may have come in time and wait to be read.
            await asyncio.sleep(LATE_SECONDS)

    def _pause(self) -> float:
        now = time.monotonic()
        pauses = [BUSY_SECONDS if self._sees_something or self.runs.is_busy() else QUIET_SECONDS]
        if self.lease is not None:
            pauses.append(self.lease.seconds_left(now))
        next_end = self.runs.leases.seconds_to_next_end(now)
        if next_end is not None:
            pauses.append(next_end)
        return max(min(pauses), 0.0)

    def _check(self) -> None:
        census = self.runs.check()
        self._sees_something = _shows(census)
        if self.lease is None:
            return
        now = time.monotonic()
        if census.sessions or self.runs.leases.open:
            self.lease.use(now)
        if self.lease.seconds_left(now) <= 0:
            neglect = "renewed" if self.lease.kind == KERNEL else "used"
            self.end(f"its {self.lease.kind} lease was not {neglect} for {self.lease.seconds:g} s", 0)


def _shows(census: Census) -> bool:
    return bool(census.runs or census.sessions or census.orphans)
