"""Whether a launch is over: a pod counts as lost, its launcher has ended, it hangs, or its time is up."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zeropods.pods.leases import HAS_ENDED

if TYPE_CHECKING:
    from zeropods.pods.rendezvous import Pod


SILENT_SECONDS = 8.0
"""A pod that has not answered for so long counts as lost."""
GONE_SECONDS = 3.0
"""A pod without ssh that does not answer for so long is lost; longer than between two answers."""
FAILED_SECONDS = 5.0
"""Where pdsh says that a pod's ranks failed, the others' have so long to say what they make of it."""
MEASURED_SECONDS = 12.0
"""What the ranks have left behind when all have measured or ended, or a launcher, is waited for so long."""
START_SECONDS = 180.0
"""From the launcher's start to the first rank on each pod: two imports of DeepSpeed on a busy machine."""


@dataclass(frozen=True)
class Ending:
    """Why a supervisor ends a run. A status of None leaves it to what the ranks measured."""

    status: str | None = None
    reason: str | None = None
    pod: str | None = None


@dataclass(frozen=True)
class PodState:
    """What is known of a run on one pod."""

    pod: Pod
    answered_at: float
    """When it answered last, by the monotonic clock."""
    most: int = 0
    """Most processes of the run that any answer told of."""
    absent_since: float | None = None
    """By the same clock: since when the pod has no process of the run any more."""
    oom_kills: int = 0
    """Processes that the kernel has ended for want of memory since the run was opened."""
    error: str | None = None
    """Why the last question got no answer."""

    @property
    def silent_seconds(self) -> float:
        """Since the last answer."""
        return time.monotonic() - self.answered_at


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a supervisor sees of a run at one moment."""

    pods: Sequence[PodState] = ()
    launcher_status: int | None = None
    """Exit status of DeepSpeed's launcher, negative for a signal; None while it runs."""
    signal: str | None = None
    """The name of a signal that asks for the end, if one came."""
    failed_sessions: Mapping[str, float] = field(default_factory=dict)
    """Seconds since pdsh told of a failure, by pod."""
    since_start: float = 0.0
    """Seconds since the launcher's start."""
    timeout_seconds: float | None = None
    """How many of them the run may take; None for as many as it likes."""
    since_measured: float = 0.0
    """Seconds since all ranks had measured what there is to measure."""
    hang: Ending | None = None
    """What the ranks' heartbeats say where nothing goes on."""


def judge(state: Observation) -> Ending | None:
    """The verdict on a run, None while it may go on."""
    if state.signal is not None:
        return Ending("interrupted", state.signal)
    return _lost(state) or _launcher_ended(state) or state.hang or _late(state)


def _lost(state: Observation) -> Ending | None:
    """A pod that has been silent for too long, or that has ended the run already."""
    for seen in sorted(state.pods, key=lambda seen: -seen.silent_seconds):
        pod = f"{seen.pod.name} ({seen.pod.address})"
        if HAS_ENDED in (seen.error or ""):
            # No renewal came through for longer than the lease.
            reason = f"{pod} ended the run, because this launcher was silent for longer than its lease"
            return Ending("failed", reason, seen.pod.name)
        # Where a pod's ssh is gone too, it is lost sooner.
        if seen.silent_seconds > (GONE_SECONDS if seen.pod.name in state.failed_sessions else SILENT_SECONDS):
            why = f" ({seen.error})" if seen.error else ""
            reason = f"{pod} has not answered for {seen.silent_seconds:.0f} s{why}"
            return Ending("pod_lost", reason, seen.pod.name)
    return None


def _launcher_ended(state: Observation) -> Ending | None:
    """The launcher has ended, or waits for something that is no rank; or the ranks of one pod have failed."""
    status = state.launcher_status
    if status is not None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return Ending(None, f"DeepSpeed's launcher {how}") if status else Ending()
    absent = [seen.answered_at - seen.absent_since if seen.absent_since else 0.0 for seen in state.pods]
    if min(absent, default=0.0) > MEASURED_SECONDS:
        return Ending(None, "the ranks have ended, and something that they left keeps their ssh sessions open")
    if state.since_measured > MEASURED_SECONDS:
        return Ending(None, "all ranks have measured, and something keeps the launcher waiting")
    failed, seconds = max(state.failed_sessions.items(), key=lambda session: session[1], default=("", 0.0))
    if seconds > FAILED_SECONDS:
        return Ending(None, f"its ranks or its ssh session ended {seconds:.0f} s before the others'", failed)
    return None


def _late(state: Observation) -> Ending | None:
    """The run has had its time, or has never begun on a pod."""
    if state.timeout_seconds is not None and state.since_start > state.timeout_seconds:
        # What is left for an attempt is less by the moment that was spent on beginning it.
        return Ending("timeout", f"took longer than {round(state.timeout_seconds, 2):g} s")
    missing = next((seen.pod.name for seen in state.pods if not seen.most), None)
    if missing is not None and state.since_start > START_SECONDS:
        return Ending("failed", f"no process of the run within {START_SECONDS:.0f} s", missing)
    return None
