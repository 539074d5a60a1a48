"""How long a cluster and its runs live without being renewed. Pure: every method is told the time."""

from __future__ import annotations

from collections.abc import Iterable

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
