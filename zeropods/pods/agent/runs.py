"""Runs of a pod: leases, the processes that were seen, and their end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zeropods.pods.agent.census import Census, take_census, takes_sigterm
from zeropods.pods.agent.leases import RunLeases
from zeropods.pods.agent.stacks import ask_for_stacks
from zeropods.pods.processes import Process, is_there, send

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
