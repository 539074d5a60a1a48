"""A pod's clock: it sleeps while there is nothing to watch, and says when and why the pod has to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from zeropods.pods.agent.census import Census
from zeropods.pods.agent.leases import KERNEL, ClusterLease
from zeropods.pods.agent.runs import Runs

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
