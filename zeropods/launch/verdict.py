"""How a run ends: what its supervisor sees, as a status with a reason and a pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeropods.launch.heartbeat import SILENT_SECONDS, Pulse

GONE_SECONDS = 3.0
"""A pod without ssh that does not answer for so long is lost; longer than between two answers."""
FAILED_SECONDS = 5.0
"""Where pdsh says that a pod's ranks failed, the others' have so long to say what they make of it."""
ABSENT_SECONDS = 12.0
"""Ranks leave together; a pod whose ranks are gone for so long, while others stay, has lost them."""
START_SECONDS = 60.0
"""A pod whose ranks are not there so long after another's were seen will not have them."""


@dataclass(frozen=True)
class Verdict:
    """Why a supervisor ends a run. A status of None leaves it to what the ranks measured."""

    status: str | None = None
    reason: str | None = None
    pod: str | None = None


ENDED = Verdict()
"""The launcher has ended by itself."""


def judge(
    pulses: Sequence[Pulse],
    *,
    launcher_ended: bool = False,
    signal: str | None = None,
    failed_sessions: Mapping[str, float] | None = None,
    others_seconds: float = 0.0,
) -> Verdict | None:
    """The verdict on a run, None while it may go on.

    Args:
        signal: the name of a signal that asks for the end, if one came.
        failed_sessions: seconds since pdsh told of a failure, by pod.
        others_seconds: since the first process of the run was seen on any pod.
    """
    if signal is not None:
        return Verdict("interrupted", signal)
    lost = _lost(pulses, failed_sessions or {})
    if lost is not None:
        return Verdict("pod_lost", _silent(lost), lost.pod.name)
    if launcher_ended:
        return ENDED
    return _failed(failed_sessions or {}) or _left_alone(pulses) or _never_there(pulses, others_seconds)


def _lost(pulses: Sequence[Pulse], failed_sessions: Mapping[str, float]) -> Pulse | None:
    """A pod that has been silent for too long; where its ssh is gone too, for less."""
    for pulse in sorted(pulses, key=lambda pulse: -pulse.silent_seconds):
        patience = GONE_SECONDS if pulse.pod.name in failed_sessions else SILENT_SECONDS
        if pulse.silent_seconds > patience:
            return pulse
    return None


def _failed(sessions: Mapping[str, float]) -> Verdict | None:
    """A pod whose ranks have failed, by pdsh's word, while others still run."""
    pod, seconds = max(sessions.items(), key=lambda session: session[1], default=("", 0.0))
    if seconds < FAILED_SECONDS:
        return None
    return Verdict(None, f"its ranks ended {seconds:.0f} s before the others'", pod)


def _left_alone(pulses: Sequence[Pulse]) -> Verdict | None:
    """A pod that has lost its ranks while another still has some."""
    if not any(pulse.processes for pulse in pulses):
        return None
    for pulse in pulses:
        if pulse.most and not pulse.processes and (pulse.absent_seconds or 0.0) > ABSENT_SECONDS:
            return Verdict(None, f"its ranks ended {pulse.absent_seconds:.0f} s before the others'", pulse.pod.name)
    return None


def _never_there(pulses: Sequence[Pulse], others_seconds: float) -> Verdict | None:
    missing = next((pulse for pulse in pulses if not pulse.most), None)
    if missing is None or others_seconds < START_SECONDS:
        return None
    reason = f"no process of the run within {START_SECONDS:.0f} s of the first on another pod"
    return Verdict("failed", reason, missing.pod.name)


def _silent(pulse: Pulse) -> str:
    why = f" ({pulse.error})" if pulse.error else ""
    return f"{pulse.pod.name} ({pulse.pod.address}) has not answered for {pulse.silent_seconds:.0f} s{why}"
