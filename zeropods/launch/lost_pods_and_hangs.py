"""Whether a run is over: a pod counts as lost, its launcher has ended, it hangs, or its time is up.

Hang detection goes by the heartbeats of its ranks (`measure/heartbeat.py`); it says which rank holds the others up.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.measure.heartbeat import Beat, read_beats
from zeropods.pods.leases import HAS_ENDED
from zeropods.pods.rendezvous import Pod

SILENT_SECONDS = 7.0
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


def judge(
    *,
    pods: Sequence[PodState] = (),
    launcher_status: int | None = None,
    signal_name: str | None = None,
    failed_sessions: Mapping[str, float] | None = None,
    since_start: float = 0.0,
    timeout_seconds: float | None = None,
    since_measured: float = 0.0,
    hang: Ending | None = None,
) -> Ending | None:
    """The verdict on a run by what a supervisor sees of it at one moment, None while it may go on.

    Args:
        launcher_status: exit status of DeepSpeed's launcher, negative for a signal; None while it runs.
        signal_name: a signal that asks for the end, if one came.
        failed_sessions: seconds since pdsh told of a failure, by pod.
        since_start: seconds since the launcher's start.
        timeout_seconds: how many of them the run may take; None for as many as it likes.
        since_measured: seconds since all ranks had measured what there is to measure.
        hang: what the ranks' heartbeats say where nothing goes on.
    """
    now, sessions = time.monotonic(), failed_sessions or {}
    if signal_name is not None:
        return Ending("interrupted", signal_name)
    for seen in sorted(pods, key=lambda each: each.answered_at):
        name, silent = seen.pod.name, now - seen.answered_at
        if HAS_ENDED in (seen.error or ""):
            # No renewal came through for longer than the lease.
            why = f"{name} ended the run, because this launcher was silent for longer than its lease"
            return Ending("failed", why, name)
        # Where a pod's ssh is gone too, it is lost sooner.
        if silent > (GONE_SECONDS if name in sessions else SILENT_SECONDS):
            return Ending(
                "pod_lost", f"{name} ({seen.error or seen.pod.address}) has not answered for {silent:.0f} s", name
            )
    if launcher_status is not None:
        was_killed = launcher_status < 0
        how = (
            f"was ended by {signal.Signals(-launcher_status).name}"
            if was_killed
            else f"ended with status {launcher_status}"
        )
        return Ending(None, f"DeepSpeed's launcher {how}") if launcher_status else Ending()
    if pods and all(seen.absent_since and seen.answered_at - seen.absent_since > MEASURED_SECONDS for seen in pods):
        return Ending(None, "the ranks have ended, and something that they left keeps their ssh sessions open")
    if since_measured > MEASURED_SECONDS:
        return Ending(None, "all ranks have measured, and something keeps the launcher waiting")
    failed = max(sessions, key=lambda name: sessions[name], default=None)
    if failed is not None and sessions[failed] > FAILED_SECONDS:
        why = f"its ranks or its ssh session ended {sessions[failed]:.0f} s before the others'"
        return Ending(None, why, failed)
    if hang is not None:
        return hang
    if timeout_seconds is not None and since_start > timeout_seconds:
        # What is left for an attempt is less by the moment that was spent on beginning it.
        return Ending("timeout", f"took longer than {round(timeout_seconds, 2):g} s")
    missing = [seen.pod.name for seen in pods if not seen.most]
    if missing and since_start > START_SECONDS:
        return Ending("failed", f"no process of the run within {START_SECONDS:.0f} s", missing[0])
    return None


# Hang detection

LOOK_SECONDS = 0.5
LATE_SECONDS = 5.0
"""A look that comes so long after the one before: this process was stopped, or its machine slept."""
STOPPED_SECONDS = 4.0
"""A rank whose heartbeat has not come for so long, where each second brings one, is stopped, or its pod is away."""
DEFAULT_SECONDS, LONGEST_TIMES = 600.0, 20.0
"""Where no time-out was given: so long, or so many times the longest pause between two pieces of work so far."""
PATIENT_SECONDS, PATIENT_TIMES = 1_800.0, 10.0
"""While ranks load, make their first step or save, which may take long and tells nothing: the larger of the two."""
ANSWER_SECONDS = 3.0
"""Ranks have so long to write their stacks."""
WAITING = re.compile(r"^(torch/distributed|deepspeed/comm)/| (_engine_run_backward|synchronize)$")
"""Places where a rank waits for others."""
COLLECTIVE = re.compile(r"(torch/distributed|deepspeed/comm)/")
SAVE = "save"
"""A phase in which ranks tell each other little: one of them works, or none does."""


def check_timeouts(seconds: float | None, step_seconds: float | None) -> None:
    """Refuse a time that ends a run at once or never, and one of a step within which no rank could say anything."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(f"--timeout {seconds:g}; expected more than 0 seconds")
    if step_seconds not in (None, 0) and not STOPPED_SECONDS < step_seconds < math.inf:
        raise UserError(
            f"--step-timeout {step_seconds:g}; expected more than {STOPPED_SECONDS:g} seconds, or 0 for none"
        )


@dataclass(frozen=True)
class Watched:
    """A rank's last heartbeat, and since when it is as it is."""

    beat: Beat
    alive_at: float
    """When the last one came."""
    moved_at: float
    """When the last piece of work was done."""
    placed_at: float
    """Since when its stack is the same."""


class HangDetector:
    """Watches the heartbeats of one attempt of a run."""

    def __init__(
        self, folder: Path, step_timeout: float | None, opened: Callable[[], bool], pods: Sequence[str] = ()
    ) -> None:
        """Watch the run in a folder.

        Args:
            step_timeout: seconds without any piece of work on any rank; None: derived from those seen; 0: never.
            opened: whether what lies in the folder is of this attempt.
            pods: the name of each rank's pod; none on one machine.
        """
        self.folder = folder
        self.found: Ending | None = None
        self.ranks: dict[int, Watched] = {}
        self._stopped: list[int] = []
        """Ranks of a hanging run that give no sign of life."""
        self._pods = dict(enumerate(pods))
        self._step_timeout = step_timeout
        self._opened = opened
        self._looked: float | None = None
        self._longest = 0.0

    def look(self, now: float | None = None) -> Ending | None:
        """The verdict on a run that hangs, None while it goes on. To be asked some times per second.

        Args:
            now: seconds of any clock; `time.monotonic` if not given.
        """
        now = time.monotonic() if now is None else now
        if self._step_timeout == 0 or (self._looked is not None and now - self._looked < LOOK_SECONDS):
            return self.found
        if self.found is None and self._opened():
            away = now - (self._looked or now)
            self._note(now, away if away > LATE_SECONDS else 0.0)
            self.found = self._judged(now) if self.ranks else None
        self._looked = now
        return self.found

    def limit(self) -> float:
        """Seconds that a piece of work may take."""
        return self._step_timeout or max(DEFAULT_SECONDS, LONGEST_TIMES * self._longest)

    def save_stacks(self, ask: Callable[[], object]) -> None:
        """Keep the stacks of all ranks in `stacks/N.txt`: what they write when `ask` sends a signal, or what is known.

        A disk that takes no more keeps no run from ending.
        """
        ask()
        time.sleep(ANSWER_SECONDS)
        with suppress(OSError):
            for rank, watched in self.ranks.items():
                file = self.folder / "stacks" / f"{rank}.txt"
                if not (file.is_file() and file.stat().st_size):
                    how = "is stopped" if rank in self._stopped else "does not answer"
                    who = f"rank {rank}, process {watched.beat.pid}: {how}"
                    first = f"{who}; its main thread when it last gave a sign, innermost first:"
                    file.parent.mkdir(exist_ok=True)
                    # Appended: the rank has the file open, and what it writes late, or over a network, has to stay.
                    with open(file, "a", encoding="utf-8") as text:
                        text.write("\n".join([first, *(f"  {place}" for place in watched.beat.stack)]) + "\n")

    def _note(self, now: float, away: float) -> None:
        """Take up the heartbeats; `away`: seconds in which nobody looked, which do not count."""
        known, self.ranks = self.ranks, {}
        for rank, beat in read_beats(self.folder).items():
            was = known.get(rank)
            if was is None or was.beat.pid != beat.pid:
                self.ranks[rank] = Watched(beat, now, now, now)
                continue
            moved = beat.marks != was.beat.marks
            if moved and not was.beat.patient:
                self._longest = max(self._longest, now - was.moved_at - away)
            self.ranks[rank] = Watched(
                beat,
                alive_at=now if beat.alive != was.beat.alive else was.alive_at + away,
                moved_at=now if moved else was.moved_at + away,
                placed_at=now if moved or beat.stack != was.beat.stack else was.placed_at + away,
            )

    def _judged(self, now: float) -> Ending | None:
        limit, ranks = self.limit(), self.ranks.values()
        silent = now - min(rank.alive_at for rank in ranks)
        still = now - max(rank.moved_at for rank in ranks)
        patient = all(rank.beat.patient for rank in ranks)
        locked = all(r.beat.phase == SAVE and COLLECTIVE.match("".join(r.beat.stack[:1])) for r in ranks)
        if locked and now - max(rank.placed_at for rank in ranks) > limit:
            # Where all wait for one another nobody works, however long a save may take.
            patient = False
        allowed = max(PATIENT_SECONDS, PATIENT_TIMES * limit) if patient else limit
        if silent <= limit and still <= allowed:
            return None
        self._stopped = [rank for rank, w in sorted(self.ranks.items()) if now - w.alive_at > STOPPED_SECONDS]
        why = f"no sign of a rank for {silent:.0f} s (step time-out {limit:.0f} s)"
        if still > allowed:
            why = f"nothing done for {still:.0f} s (step time-out {allowed:.0f} s)"
        blamed = self._stopped[0] if self._stopped else culprit({rank: w.beat for rank, w in self.ranks.items()})
        others = [rank for rank in sorted(self.ranks) if rank != blamed and rank not in self._stopped]
        told = []
        for rank in (blamed, *others[:1]):
            beat, where = self.ranks[rank].beat, f" on {self._pods[rank]}" if self._pods.get(rank) else ""
            does = "is stopped" if rank in self._stopped else "waits" if waits(beat) else "is"
            told.append(f"rank {rank}{where} {does} at {beat.place()} (phase {beat.phase}, {beat.step} steps done)")
        return Ending("timeout", f"{why}: {'; '.join(told)}", self._pods.get(blamed))


def waits(beat: Beat) -> bool:
    """Whether a rank waits for others, as far as its stack tells."""
    return any(WAITING.search(place) for place in beat.stack[:6])


def culprit(beats: Mapping[int, Beat]) -> int:
    """Who holds up a run whose ranks all live.

    One that waits for nobody while others do; else one that is behind; else one that is where few others are.
    """
    ranks = sorted(beats)
    busy = [rank for rank in ranks if not waits(beats[rank])]
    if busy and len(busy) < len(ranks):
        return busy[0]
    places = Counter(beats[rank].place() for rank in ranks)
    # Where all have done as many steps, the place tells.
    return min(ranks, key=lambda rank: (beats[rank].step, places[beats[rank].place()], rank))
