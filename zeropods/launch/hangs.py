"""Hang detection: whether a run stands still, which rank holds the others up, and the stacks of all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.outcome import Verdict
from zeropods.measure.heartbeat import Beat, read_beats
from zeropods.pods.processes import Process, ask_for_stacks, descendants, find_process, is_stopped, variable

# Whether a run stands still, by the beats of its ranks, and which of them holds the others up.

LOOK_SECONDS = 0.5
LATE_SECONDS = 5.0
"""A look that comes so long after the one before: this process was stopped, or its machine slept."""
STILL_SECONDS = 4.0
"""A rank whose beat has not come for so long, where each second brings one, is stopped: SIGSTOP, or its pod is away."""
DEFAULT_SECONDS, LONGEST_TIMES = 600.0, 20.0
"""Where no time-out was given: so long, or so many times the longest pause between two pieces of work so far."""
PATIENT_SECONDS, PATIENT_TIMES = 1_800.0, 10.0
"""While ranks load, make their first step or save, which may take long and tells nothing: the larger of the two."""
WAITING = re.compile(r"^(torch/distributed|deepspeed/comm)/| (_engine_run_backward|synchronize)$")
"""Places where a rank waits for others."""
COLLECTIVE = re.compile(r"(torch/distributed|deepspeed/comm)/")
SAVE = "save"
"""A phase in which ranks tell each other little: one of them works, or none does."""


def check_step_timeout(seconds: float | None) -> None:
    """Refuse a time within which no rank could say anything."""
    if seconds is not None and seconds != 0 and not STILL_SECONDS < seconds < float("inf"):
        raise UserError(f"step time-out of {seconds:g} seconds; expected more than {STILL_SECONDS:g}, or 0 for none")


@dataclass
class Seen:
    """A rank's last beat, and since when it says so."""

    beat: Beat
    alive_at: float
    moved_at: float
    placed_at: float
    """Since when its stack is the same."""

    @property
    def is_in_a_collective(self) -> bool:
        """Whether it waits for others in a save."""
        return self.beat.phase == SAVE and COLLECTIVE.match("".join(self.beat.stack[:1])) is not None


class Standstill:
    """Watches the beats of one attempt."""

    def __init__(
        self, folder: Path, pods: Sequence[str], step_timeout: float | None, opened: Callable[[], bool]
    ) -> None:
        """`Standstill` of the run in a folder.

        Args:
            pods: the name of each rank's pod; none on one machine.
            step_timeout: seconds without any piece of work on any rank; None: derived from those seen; 0: never.
            opened: whether what lies in the folder is of this attempt.
        """
        check_step_timeout(step_timeout)
        self.seen: dict[int, Seen] = {}
        self.folder = folder
        self.found: Verdict | None = None
        self._pods = pods
        self._step_timeout = step_timeout
        self._opened = opened
        self._looked: float | None = None
        self._longest = 0.0

    def look(self, now: float | None = None) -> Verdict | None:
        """The verdict on a run that stands still, None while it goes on. To be asked some times a second.

        Args:
            now: seconds of any clock; `time.monotonic` if not given.
        """
        now = time.monotonic() if now is None else now
        if self._step_timeout == 0 or (self._looked is not None and now - self._looked < LOOK_SECONDS):
            return self.found
        if self.found is None and self._opened():
            self._note(read_beats(self.folder), now)
            self.found = self._judged(now)
        self._looked = now
        return self.found

    def beats(self) -> dict[int, Beat]:
        """The last beat of every rank."""
        return {rank: seen.beat for rank, seen in self.seen.items()}

    def limit(self) -> float:
        """Seconds that a piece of work may take."""
        if self._step_timeout:
            return self._step_timeout
        return max(DEFAULT_SECONDS, LONGEST_TIMES * self._longest)

    def _note(self, beats: Mapping[int, Beat], now: float) -> None:
        away = now - (self._looked or now)
        if away > LATE_SECONDS:
            for seen in self.seen.values():
                seen.alive_at, seen.moved_at = seen.alive_at + away, seen.moved_at + away
                seen.placed_at += away
        self.seen = {rank: self._followed(self.seen.get(rank), beat, now) for rank, beat in beats.items()}

    def _followed(self, seen: Seen | None, beat: Beat, now: float) -> Seen:
        if seen is None or seen.beat.pid != beat.pid:
            return Seen(beat, now, now, now)
        moved = beat.marks != seen.beat.marks
        if moved and not seen.beat.patient:
            self._longest = max(self._longest, now - seen.moved_at)
        alive_at = now if beat.alive != seen.beat.alive else seen.alive_at
        placed_at = seen.placed_at if beat.stack == seen.beat.stack and not moved else now
        return Seen(beat, alive_at, now if moved else seen.moved_at, placed_at)

    def _judged(self, now: float) -> Verdict | None:
        limit = self.limit()
        if not self.seen:
            return None
        silent = now - min(seen.alive_at for seen in self.seen.values())
        still = now - max(seen.moved_at for seen in self.seen.values())
        patient = all(seen.beat.patient for seen in self.seen.values())
        locked = all(seen.is_in_a_collective for seen in self.seen.values())
        if locked and now - max(seen.placed_at for seen in self.seen.values()) > limit:
            # Where all wait for one another nobody works, however long a save may take.
            patient = False
        allowed = max(PATIENT_SECONDS, PATIENT_TIMES * limit) if patient else limit
        if silent <= limit and still <= allowed:
            return None
        why = f"nothing done for {still:.0f} s" if still > allowed else f"no sign of a rank for {silent:.0f} s"
        return self._verdict(f"{why} (step time-out {allowed if still > allowed else limit:.0f} s)", now)

    def _verdict(self, why: str, now: float) -> Verdict:
        stopped = [rank for rank, seen in sorted(self.seen.items()) if now - seen.alive_at > STILL_SECONDS]
        rank = stopped[0] if stopped else culprit({rank: seen.beat for rank, seen in self.seen.items()})
        does = "is stopped" if rank in stopped else "waits" if waits(self.seen[rank].beat) else "is"
        told = [f"{self._named(rank)} {does} at {self._place(rank)}"]
        other = next((each for each in sorted(self.seen) if each != rank and each not in stopped), None)
        if other is not None:
            told.append(
                f"{self._named(other)} {'waits' if waits(self.seen[other].beat) else 'is'} at {self._place(other)}"
            )
        pod = self._pods[rank] if rank < len(self._pods) else None
        return Verdict("timeout", f"{why}: {'; '.join(told)}", pod or None)

    def _named(self, rank: int) -> str:
        pod = self._pods[rank] if rank < len(self._pods) else ""
        return f"rank {rank}{f' on {pod}' if pod else ''}"

    def _place(self, rank: int) -> str:
        beat = self.seen[rank].beat
        return f"{beat.place()} (phase {beat.phase}, {beat.step} steps done)"


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


# The stacks of all ranks of a run that stands still, in `stacks/N.txt` of its folder.

ANSWER_SECONDS = 3.0
PAUSE_SECONDS = 0.1
PY_SPY_SECONDS = 10.0


def save_stacks(
    folder: Path, beats: Mapping[int, Beat], ask: Callable[[], object], ours: Callable[[Process], bool]
) -> None:
    """Ask the ranks for their stacks, and write down for those that do not answer what is known otherwise.

    Args:
        ask: lets every rank get the signal.
        ours: whether a process of this machine is of this run.
    """
    ask()
    deadline = time.monotonic() + ANSWER_SECONDS
    while (left := _unanswered(folder, beats)) and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    # A disk that takes no more keeps no run from ending.
    with suppress(OSError):
        for rank in left:
            _file(folder, rank).parent.mkdir(exist_ok=True)
            with open(_file(folder, rank), "a", encoding="utf-8") as file:
                file.write(_known_otherwise(beats[rank], ours))


def ask_below(pid: int) -> None:
    """Ask the processes below one of this machine."""
    ask_for_stacks(descendants(pid))


def carries(run: str) -> Callable[[Process], bool]:
    """Whether a process carries a run's mark."""
    from zeropods.launch.command import RUN

    return lambda process: variable(process, RUN) == run


def _unanswered(folder: Path, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not _is_written(_file(folder, rank))]


def _is_written(path: Path) -> bool:
    """Whether a dump is there and has come to its end: the main thread's comes last."""
    with suppress(OSError):
        size = path.stat().st_size
        time.sleep(PAUSE_SECONDS / 2)
        return 0 < size == path.stat().st_size
    return False


def _known_otherwise(beat: Beat, ours: Callable[[Process], bool]) -> str:
    process = find_process(beat.pid)
    here = process is not None and ours(process)
    how = "is stopped" if here and process is not None and is_stopped(process) else "does not answer"
    spied = _spied(beat.pid) if here else ""
    lines = [f"rank {beat.rank}, process {beat.pid}: {how}; its main thread when it last gave a sign, innermost first:"]
    return "\n".join([*lines, *(f"  {place}" for place in beat.stack), spied]).rstrip() + "\n"


def _spied(pid: int) -> str:
    """What py-spy sees of a process of this machine; nothing where it is not installed, or may not look."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.TimeoutExpired):
        seen = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
        return f"\npy-spy:\n{seen.stdout}" if seen.returncode == 0 else ""
    return ""


def _file(folder: Path, rank: int) -> Path:
    return folder / "stacks" / f"{rank}.txt"
