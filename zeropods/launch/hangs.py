"""Hang detection: whether a run hangs, by the heartbeats of its ranks, which rank holds the others up, and all stacks.

Each rank writes its heartbeat by `measure/heartbeat.py`.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.outcome import Ending
from zeropods.measure.heartbeat import Beat, read_beats

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
