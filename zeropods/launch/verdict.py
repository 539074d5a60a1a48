"""How a run ends: what its supervisor sees, as a status with a reason and a pod."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeropods.launch.heartbeat import SILENT_SECONDS, Pulse

GONE_SECONDS = 3.0
"""A pod without ssh that does not answer for so long is lost; longer than between two answers."""
FAILED_SECONDS = 5.0
"""Where pdsh says that a pod's ranks failed, the others' have so long to say what they make of it."""
ABSENT_SECONDS = 12.0
"""Ranks leave together; a pod whose ranks are gone for so long, while others stay, has lost them."""
START_SECONDS = 60.0
"""A pod whose ranks are not there so long after another's were seen will not have them."""
FIRST_SECONDS = 180.0
"""From the launcher's start to the first rank on any pod: two imports of DeepSpeed on a busy machine."""


@dataclass(frozen=True)
class Verdict:
    """Why a supervisor ends a run. A status of None leaves it to what the ranks measured."""

    status: str | None = None
    reason: str | None = None
    pod: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a supervisor sees of a run at one moment."""

    pulses: Sequence[Pulse]
    launcher_status: int | None = None
    """Of DeepSpeed's launcher, negative for a signal; None while it runs."""
    signal: str | None = None
    """The name of a signal that asks for the end, if one came."""
    failed_sessions: Mapping[str, float] = field(default_factory=dict)
    """Seconds since pdsh told of a failure, by pod."""
    done: frozenset[str] = frozenset()
    """Pods whose ranks have all ended well."""
    since_start: float = 0.0
    """Seconds since the launcher's start."""
    timeout_seconds: float | None = None
    """How many of them the run may take; None for as many as it likes."""
    since_first_rank: float = 0.0
    """Seconds since the first process of the run was seen on any pod."""
    since_measured: float = 0.0
    """Seconds since all ranks had measured what there is to measure."""
    stands_still: Verdict | None = None
    """Where the ranks' beats say that nothing goes on."""


def judge(sight: Sight) -> Verdict | None:
    """The verdict on a run, None while it may go on."""
    if sight.signal is not None:
        return Verdict("interrupted", sight.signal)
    found = _refused(sight.pulses) or _lost(sight) or _ended(sight) or _failed(sight) or _alone(sight)
    return found or sight.stands_still or _overdue(sight) or _late(sight)


def _refused(pulses: Sequence[Pulse]) -> Verdict | None:
    """A pod that has ended the run already: no heartbeat came through for longer than the lease."""
    refused = next((pulse for pulse in pulses if pulse.refused), None)
    if refused is None:
        return None
    reason = "ended the run, because this launcher was silent for longer than its lease"
    return Verdict("failed", f"{refused.pod.name} ({refused.pod.address}) {reason}", refused.pod.name)


def _lost(sight: Sight) -> Verdict | None:
    """A pod that has been silent for too long; where its ssh is gone too, for less."""
    for pulse in sorted(sight.pulses, key=lambda pulse: -pulse.silent_seconds):
        patience = GONE_SECONDS if pulse.pod.name in sight.failed_sessions else SILENT_SECONDS
        if pulse.silent_seconds > patience:
            return Verdict("pod_lost", _silent(pulse), pulse.pod.name)
    return None


def _ended(sight: Sight) -> Verdict | None:
    """The launcher has ended, or waits for something that is no rank."""
    if sight.launcher_status is not None:
        return Verdict(None, _how_it_ended(sight.launcher_status))
    seen = all(pulse.most for pulse in sight.pulses)
    absent = min(pulse.absent_seconds or 0.0 for pulse in sight.pulses)
    if seen and absent > ABSENT_SECONDS:
        return Verdict(None, "the ranks have ended, and something that they left keeps their ssh sessions open")
    if sight.since_measured > ABSENT_SECONDS:
        return Verdict(None, "all ranks have measured, and something keeps the launcher waiting")
    return None


def _failed(sight: Sight) -> Verdict | None:
    """A pod whose ranks have failed, by pdsh's word, while others still run."""
    pod, seconds = max(sight.failed_sessions.items(), key=lambda session: session[1], default=("", 0.0))
    if seconds < FAILED_SECONDS:
        return None
    return Verdict(None, f"its ranks or its ssh session ended {seconds:.0f} s before the others'", pod)


def _alone(sight: Sight) -> Verdict | None:
    """A pod that has lost its ranks while another still has some; ranks that have ended well are not lost."""
    if not any(pulse.processes for pulse in sight.pulses):
        return None
    for pulse in sight.pulses:
        gone = pulse.most and not pulse.processes and (pulse.absent_seconds or 0.0) > ABSENT_SECONDS
        if gone and pulse.pod.name not in sight.done:
            return Verdict(None, f"its ranks ended {pulse.absent_seconds:.0f} s before the others'", pulse.pod.name)
    return None


def _overdue(sight: Sight) -> Verdict | None:
    """The run has had its time."""
    if sight.timeout_seconds is None or sight.since_start <= sight.timeout_seconds:
        return None
    return Verdict("timeout", overdue(sight.timeout_seconds))


def overdue(seconds: float) -> str:
    """The reason of a run that was ended because it took too long."""
    return f"took longer than {seconds:g} s"


def _late(sight: Sight) -> Verdict | None:
    """A pod where no process of the run has been seen at all."""
    missing = next((pulse for pulse in sight.pulses if not pulse.most), None)
    if missing is None:
        return None
    if sight.since_first_rank > START_SECONDS:
        reason = f"no process of the run within {START_SECONDS:.0f} s of the first on another pod"
        return Verdict("failed", reason, missing.pod.name)
    if sight.since_first_rank == 0.0 and sight.since_start > FIRST_SECONDS:
        return Verdict("failed", f"no process of the run on any pod within {FIRST_SECONDS:.0f} s")
    return None


def _how_it_ended(status: int) -> str | None:
    if status == 0:
        return None
    if status > 0:
        return f"DeepSpeed's launcher ended with status {status}"
    return f"DeepSpeed's launcher was ended by {signal.Signals(-status).name}"


def _silent(pulse: Pulse) -> str:
    why = f" ({pulse.error})" if pulse.error else ""
    return f"{pulse.pod.name} ({pulse.pod.address}) has not answered for {pulse.silent_seconds:.0f} s{why}"
