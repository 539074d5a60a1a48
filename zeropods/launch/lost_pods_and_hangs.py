"""Decide whether a run is over: a pod counts as lost, its launcher has ended, it hangs, or its time is up.

Hang detection uses the heartbeats of the ranks (`measure/heartbeat.py`); it says which rank holds up the others.
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
"""Seconds without an answer after which a pod counts as lost."""
GONE_SECONDS = 3.0
"""The same for a pod whose ssh session is gone too; longer than the time between two answers."""
FAILED_SECONDS = 5.0
"""Seconds that the ranks of the other pods have to report, after pdsh said that a pod's ranks failed."""
MEASURED_SECONDS = 12.0
"""Seconds to wait for the launcher, or for what the ranks left running, once all ranks have measured or ended."""
START_SECONDS = 180.0
"""Seconds allowed from the launcher's start to the first rank on each pod: two DeepSpeed imports on a busy machine."""


@dataclass(frozen=True)
class Ending:
    """Why a supervisor ends a run. A status of None leaves the verdict to what the ranks measured."""

    status: str | None = None
    reason: str | None = None
    pod: str | None = None
    rank: int | None = None
    """The rank that began the end, where it was one."""
    launcher_was_killed: bool = False
    """Whether a signal ended DeepSpeed's launcher, which this launch had not sent."""


@dataclass(frozen=True)
class PodState:
    """What is known about a run on one pod."""

    pod: Pod
    answered_at: float
    """When the pod last answered, by the monotonic clock."""
    most: int = 0
    """Largest number of processes of the run in any answer so far."""
    absent_since: float | None = None
    """Since when the pod has had no process of the run any more, by the same clock."""
    oom_kills: int | None = 0
    """Number of processes that the kernel has killed for lack of memory since the run was opened; None if it does not
    count them."""
    error: str | None = None
    """Why the last request got no answer."""


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
    """The verdict on a run, judging by what a supervisor sees of it at one moment; None while it may go on.

    Args:
        launcher_status: exit status of DeepSpeed's launcher, negative for a signal; None while it runs.
        signal_name: name of a signal that asks for the end, if one came.
        failed_sessions: seconds since pdsh reported a failure, by pod.
        since_start: seconds since the launcher's start.
        timeout_seconds: how many of these seconds the run may take; None for no limit.
        since_measured: seconds since all ranks had finished measuring.
        hang: the verdict from the ranks' heartbeats, if the run hangs.
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
        # A pod whose ssh session is gone too counts as lost sooner.
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
        if launcher_status == 0:
            return Ending()
        return Ending(None, f"DeepSpeed's launcher {how}", launcher_was_killed=was_killed)
    if pods and all(seen.absent_since and seen.answered_at - seen.absent_since > MEASURED_SECONDS for seen in pods):
        return Ending(None, "the ranks have ended, but something they left behind keeps their ssh sessions open")
    if since_measured > MEASURED_SECONDS:
        return Ending(None, "all ranks have finished measuring, but something keeps the launcher waiting")
    failed = max(sessions, key=lambda name: sessions[name], default=None)
    if failed is not None and sessions[failed] > FAILED_SECONDS:
        why = f"its ranks or its ssh session ended {sessions[failed]:.0f} s before the others'"
        return Ending(None, why, failed)
    if hang is not None:
        return hang
    if timeout_seconds is not None and since_start > timeout_seconds:
        # The time left for an attempt is shorter by the moment that its start took, hence the rounding.
        return Ending("timeout", f"took longer than {round(timeout_seconds, 2):g} s")
    missing = [seen.pod.name for seen in pods if not seen.most]
    if missing and since_start > START_SECONDS:
        return Ending("failed", f"no process of the run started within {START_SECONDS:.0f} s", missing[0])
    return None


# Hang detection

LOOK_SECONDS = 0.5
LATE_SECONDS = 5.0
"""Pause between two checks, in seconds, after which this process must have been stopped, or its machine asleep."""
STOPPED_SECONDS = 4.0
"""Seconds without a heartbeat, due every second, after which a rank counts as stopped or its pod as unreachable."""
DEFAULT_SECONDS, LONGEST_TIMES = 600.0, 20.0
"""Step timeout if none is given: so many seconds or, if larger, so many times the longest pause between two pieces of
work so far."""
PATIENT_SECONDS, PATIENT_TIMES = 1_800.0, 10.0
"""The same while ranks load, make their first step or save, which may take long and shows no progress: so many seconds
or, if larger, so many times the step timeout."""
ANSWER_SECONDS = 3.0
"""Seconds that ranks have to write their stacks."""
WAITING = re.compile(r"^(torch/distributed|deepspeed/comm)/| (_engine_run_backward|synchronize)$")
"""Matches the places in a stack at which a rank waits for others."""
COLLECTIVE = re.compile(r"(torch/distributed|deepspeed/comm)/")
SAVE = "save"
"""Phase in which ranks seldom communicate: if all of them wait for one another for long, none of them works."""


def check_timeouts(seconds: float | None, step_seconds: float | None) -> None:
    """Refuse a timeout that ends a run at once or never, and a step timeout too short for any sign of life."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(f"--timeout {seconds:g}; expected more than 0 seconds")
    if step_seconds not in (None, 0) and not STOPPED_SECONDS < step_seconds < math.inf:
        raise UserError(
            f"--step-timeout {step_seconds:g}; expected more than {STOPPED_SECONDS:g} seconds, or 0 for none"
        )


@dataclass(frozen=True)
class Watched:
    """A rank's last heartbeat, and when it last changed."""

    beat: Beat
    alive_at: float
    """When the last heartbeat came."""
    moved_at: float
    """When the last piece of work was done."""
    placed_at: float
    """Since when the rank's stack has been the same."""


class HangDetector:
    """Watches the heartbeats of one attempt of a run."""

    def __init__(
        self, folder: Path, step_timeout: float | None, opened: Callable[[], bool], pods: Sequence[str] = ()
    ) -> None:
        """Watch the run in a folder.

        Args:
            step_timeout: seconds without work on any rank that mean a hang; None: derived from those seen; 0: never.
            opened: tells whether the contents of the folder are from this attempt.
            pods: names of the ranks' pods, in the order of ranks; empty on one machine.
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
        """The verdict on a run that hangs; None while it goes on. Call this several times per second.

        Args:
            now: time in seconds on any clock; `time.monotonic` if not given.
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
        """Save the stacks of all ranks in `stacks/N.txt`: what they write once `ask` signals them, else the last known.

        A full disk does not keep a run from ending.
        """
        ask()
        time.sleep(ANSWER_SECONDS)
        with suppress(OSError):
            for rank, watched in self.ranks.items():
                file = self.folder / "stacks" / f"{rank}.txt"
                if not (file.is_file() and file.stat().st_size):
                    how = "is stopped" if rank in self._stopped else "does not answer"
                    who = f"rank {rank}, process {watched.beat.pid}: {how}"
                    first = f"{who}; its main thread at its last heartbeat, innermost first:"
                    file.parent.mkdir(exist_ok=True)
                    # Append: the rank has the file open, and what it writes late, or over a network, must not be lost.
                    with open(file, "a", encoding="utf-8") as text:
                        text.write("\n".join([first, *(f"  {place}" for place in watched.beat.stack)]) + "\n")

    def _note(self, now: float, away: float) -> None:
        """Read the heartbeats; `away` is the number of seconds without a check, which do not count."""
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
            # Where all ranks wait for one another, none of them works, however long a save may take.
            patient = False
        allowed = max(PATIENT_SECONDS, PATIENT_TIMES * limit) if patient else limit
        if silent <= limit and still <= allowed:
            return None
        self._stopped = [rank for rank, w in sorted(self.ranks.items()) if now - w.alive_at > STOPPED_SECONDS]
        why = f"no heartbeat from a rank for {silent:.0f} s (step timeout {limit:.0f} s)"
        if still > allowed:
            why = f"no progress for {still:.0f} s (step timeout {allowed:.0f} s)"
        blamed = self._stopped[0] if self._stopped else culprit({rank: w.beat for rank, w in self.ranks.items()})
        others = [rank for rank in sorted(self.ranks) if rank != blamed and rank not in self._stopped]
        told = []
        for rank in (blamed, *others[:1]):
            beat, where = self.ranks[rank].beat, f" on {self._pods[rank]}" if self._pods.get(rank) else ""
            does = "is stopped" if rank in self._stopped else "waits" if waits(beat) else "is"
            told.append(f"rank {rank}{where} {does} at {beat.place()} (phase {beat.phase}, {beat.step} steps done)")
        return Ending("timeout", f"{why}: {'; '.join(told)}", self._pods.get(blamed), blamed)


def waits(beat: Beat) -> bool:
    """Whether a rank waits for others, judging by its stack."""
    return any(WAITING.search(place) for place in beat.stack[:6])


def culprit(beats: Mapping[int, Beat]) -> int:
    """The rank that holds up a run whose ranks are all alive.

    It is one that waits for no other while others wait; else one that is behind; else one at a place with few others.
    """
    ranks = sorted(beats)
    busy = [rank for rank in ranks if not waits(beats[rank])]
    if busy and len(busy) < len(ranks):
        return busy[0]
    places = Counter(beats[rank].place() for rank in ranks)
    # Where all ranks have done the same number of steps, the place decides.
    return min(ranks, key=lambda rank: (beats[rank].step, places[beats[rank].place()], rank))
