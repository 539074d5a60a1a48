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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.measure.heartbeat import Beat, read_beats
from zeropods.pods.leases import HAS_ENDED

if TYPE_CHECKING:
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

    def once_ended(self, unanswered: Mapping[str, str]) -> Ending:
        """The verdict once the run is ended; `unanswered` says why, by the name of each pod whose agent gave no answer.

        Where the launcher ended badly and an agent is gone, its pod is lost: it has ended, or was brought down.
        """
        if self.status is not None or self.reason is None or not unanswered:
            return self
        pod, why = next(iter(unanswered.items()))
        return Ending("pod_lost", f"{pod} has ended, its agent does not answer ({why})", pod)


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
        if HAS_ENDED in (seen.error or ""):
            # No renewal came through for longer than the lease.
            reason = f"{seen.pod.name} ended the run, because this launcher was silent for longer than its lease"
            return Ending("failed", reason, seen.pod.name)
        # Where a pod's ssh is gone too, it is lost sooner.
        if seen.silent_seconds > (GONE_SECONDS if seen.pod.name in state.failed_sessions else SILENT_SECONDS):
            pod = f"{seen.pod.name} ({seen.error or seen.pod.address})"
            reason = f"{pod} has not answered for {seen.silent_seconds:.0f} s"
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
ANSWER_SECONDS, PAUSE_SECONDS = 3.0, 0.1
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
        self.stopped: list[int] = []
        """Ranks of a hanging run that give no sign of life."""
        self._ranks: dict[int, Watched] = {}
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
            self._note(read_beats(self.folder), now, away if away > LATE_SECONDS else 0.0)
            self.found = self._judged(now) if self._ranks else None
        self._looked = now
        return self.found

    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of every rank."""
        return {rank: watched.beat for rank, watched in self._ranks.items()}

    def limit(self) -> float:
        """Seconds that a piece of work may take."""
        return self._step_timeout or max(DEFAULT_SECONDS, LONGEST_TIMES * self._longest)

    def save_stacks(self, ask: Callable[[], object]) -> None:
        """Keep the stacks of all ranks in `stacks/N.txt`: what they write when `ask` sends a signal, or what is known.

        A disk that takes no more keeps no run from ending.
        """
        ask()
        files = {rank: self.folder / "stacks" / f"{rank}.txt" for rank in self._ranks}
        deadline = time.monotonic() + ANSWER_SECONDS
        while (left := [r for r, file in files.items() if not _is_written(file)]) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        with suppress(OSError):
            for rank in left:
                files[rank].parent.mkdir(exist_ok=True)
                with open(files[rank], "a", encoding="utf-8") as file:
                    file.write(self._last_known(rank))

    def _note(self, beats: Mapping[int, Beat], now: float, away: float) -> None:
        """Take up the heartbeats; `away`: seconds in which nobody looked, which do not count."""
        known, self._ranks = self._ranks, {}
        for rank, beat in beats.items():
            was = known.get(rank)
            if was is None or was.beat.pid != beat.pid:
                self._ranks[rank] = Watched(beat, now, now, now)
                continue
            alive_at, moved_at, placed_at = was.alive_at + away, was.moved_at + away, was.placed_at + away
            moved = beat.marks != was.beat.marks
            if moved and not was.beat.patient:
                self._longest = max(self._longest, now - moved_at)
            self._ranks[rank] = replace(
                was,
                beat=beat,
                alive_at=now if beat.alive != was.beat.alive else alive_at,
                moved_at=now if moved else moved_at,
                placed_at=now if moved or beat.stack != was.beat.stack else placed_at,
            )

    def _judged(self, now: float) -> Ending | None:
        limit, ranks = self.limit(), self._ranks.values()
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
        self.stopped = [rank for rank, w in sorted(self._ranks.items()) if now - w.alive_at > STOPPED_SECONDS]
        if still > allowed:
            return self._verdict(f"nothing done for {still:.0f} s (step time-out {allowed:.0f} s)")
        return self._verdict(f"no sign of a rank for {silent:.0f} s (step time-out {limit:.0f} s)")

    def _verdict(self, why: str) -> Ending:
        rank = self.stopped[0] if self.stopped else culprit(self.beats())
        others = [each for each in sorted(self._ranks) if each != rank and each not in self.stopped]
        told = "; ".join(self._told(each) for each in (rank, *others[:1]))
        return Ending("timeout", f"{why}: {told}", self._pods.get(rank))

    def _told(self, rank: int) -> str:
        beat, pod = self._ranks[rank].beat, self._pods.get(rank)
        does = "is stopped" if rank in self.stopped else "waits" if waits(beat) else "is"
        where = f" on {pod}" if pod else ""
        return f"rank {rank}{where} {does} at {beat.place()} (phase {beat.phase}, {beat.step} steps done)"

    def _last_known(self, rank: int) -> str:
        beat, how = self._ranks[rank].beat, "is stopped" if rank in self.stopped else "does not answer"
        first = f"rank {rank}, process {beat.pid}: {how}; its main thread when it last gave a sign, innermost first:"
        return "\n".join([first, *(f"  {place}" for place in beat.stack)]) + "\n"


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
    behind = min(ranks, key=lambda rank: beats[rank].step)
    if any(beats[rank].step != beats[behind].step for rank in ranks):
        return behind
    places = Counter(beats[rank].place() for rank in ranks)
    return min(ranks, key=lambda rank: (places[beats[rank].place()], rank))


def _is_written(path: Path) -> bool:
    """Whether a dump is there and has come to its end: the main thread's comes last."""
    with suppress(OSError):
        size = path.stat().st_size
        time.sleep(PAUSE_SECONDS / 2)
        return 0 < size == path.stat().st_size
    return False
