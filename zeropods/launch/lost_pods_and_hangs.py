"""Decide whether a run is over: one of its pods counts as lost, its launcher has ended, it hangs,
or its time is up.

Hang detection uses the heartbeats of the ranks (`measure/heartbeat.py`) and finds the rank that
holds up the others.
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

LOST_SECONDS = 7.0
"""Seconds without an answer after which a pod counts as lost."""
GONE_SECONDS = 3.0
"""The same for a pod whose launcher's session is gone too; longer than the time between two
answers."""
REPORT_SECONDS = 5.0
"""Seconds that the ranks of the other pods have to report how they end, after the launcher said
that the ranks of one pod failed."""
MEASURED_SECONDS = 12.0
"""Seconds to wait for the launcher's end, which whatever the ranks left running may delay, once all
ranks have measured or ended."""
FIRST_RANK_SECONDS = 180.0
"""Seconds allowed from the launcher's start to the first rank on each pod: two DeepSpeed imports on
a busy machine."""


@dataclass(frozen=True)
class Ending:
    """The verdict on a run: why it is over."""

    status: str | None = None
    """Status of the run; None where it is left to what the ranks measured, or where all is well."""
    reason: str | None = None
    pod: str | None = None
    rank: int | None = None
    """The rank that is the cause, if one is."""
    launcher_was_killed: bool = False
    """Whether DeepSpeed's launcher was ended by a signal that this launch had not sent."""


@dataclass(frozen=True)
class PodState:
    """What is known about a run on one pod."""

    pod: Pod
    answered_at: float
    """When the pod last answered, by the monotonic clock."""
    most_processes: int = 0
    """Largest number of processes of the run in any answer so far."""
    absent_since: float | None = None
    """Since when the pod has had no process of the run any more, by the same clock; None where it
    has one, or has had none yet."""
    oom_kills: int | None = 0
    """Number of processes that the kernel has killed for lack of memory since the run was opened;
    None if it does not count them."""
    error: str | None = None
    """Why the last request got no answer, or the error that it was answered with; None where it was
    answered well."""

    @property
    def has_long_been_empty(self) -> bool:
        """Whether the pod has had no process of the run for more than `MEASURED_SECONDS`."""
        if self.absent_since is None:
            return False
        return self.answered_at - self.absent_since > MEASURED_SECONDS


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
    """The verdict on a run, judging by what a supervisor sees of it at one moment; None while it
    may go on.

    Args:
        pods: state of the run on each pod; empty where there is no lease.
        launcher_status: exit status of DeepSpeed's launcher, negative for a signal; None while it
            runs.
        signal_name: name of a signal that asks for the end, if one came.
        failed_sessions: seconds since the launcher said that a pod's session had failed, by pod.
        since_start: seconds since the launcher's start.
        timeout_seconds: how many of these seconds the run may take; None for no limit.
        since_measured: seconds since all ranks had finished measuring; 0 before that.
        hang: the verdict from the ranks' heartbeats, if the run hangs.
    """
    sessions = failed_sessions or {}
    if signal_name is not None:
        return Ending("interrupted", signal_name)
    # This comes before the launcher's end and before a hang, which a lost pod also causes.
    lost = _verdict_on_silence(pods, sessions)
    if lost is not None:
        return lost
    if launcher_status is not None:
        return _verdict_on_ended_launcher(launcher_status)
    waiting = _verdict_on_waiting_launcher(pods, since_measured)
    if waiting is not None:
        return waiting
    failed = _verdict_on_failed_session(sessions)
    if failed is not None:
        return failed
    if hang is not None:
        return hang
    if timeout_seconds is not None and since_start > timeout_seconds:
        # The time left for an attempt is shorter by the moment that its start took, hence the
        # rounding.
        return Ending("timeout", f"took longer than {round(timeout_seconds, 2):g} s")
    without_process = [state.pod.name for state in pods if state.most_processes == 0]
    if without_process and since_start > FIRST_RANK_SECONDS:
        why = f"no process of the run started within {FIRST_RANK_SECONDS:.0f} s"
        return Ending("failed", why, without_process[0])
    return None


def _verdict_on_silence(pods: Sequence[PodState], sessions: Mapping[str, float]) -> Ending | None:
    """The verdict if a pod has been silent for too long, or has ended the run because this launcher
    did not renew its lease in time; None otherwise. The pod that has been silent for longest comes
    first.

    Args:
        sessions: the failed sessions, as for `judge`.
    """
    now = time.monotonic()
    for state in sorted(pods, key=lambda state: state.answered_at):
        name = state.pod.name
        if HAS_ENDED in (state.error or ""):
            why = "because this launcher was silent for longer than its lease"
            return Ending("failed", f"{name} ended the run, {why}", name)
        silent_seconds = now - state.answered_at
        # A pod whose session is gone too counts as lost sooner.
        limit = GONE_SECONDS if name in sessions else LOST_SECONDS
        if silent_seconds > limit:
            place = state.error or state.pod.address
            why = f"{name} ({place}) has not answered for {silent_seconds:.0f} s"
            return Ending("pod_lost", why, name)
    return None


def _verdict_on_ended_launcher(status: int) -> Ending:
    """The verdict on a run whose launcher has ended with this exit status, negative for a
    signal."""
    if status == 0:
        return Ending()
    if status > 0:
        return Ending(None, f"DeepSpeed's launcher ended with status {status}")
    name = signal.Signals(-status).name
    return Ending(None, f"DeepSpeed's launcher was ended by {name}", launcher_was_killed=True)


def _verdict_on_waiting_launcher(pods: Sequence[PodState], since_measured: float) -> Ending | None:
    """The verdict if the launcher still runs, although all ranks have been done for more than
    `MEASURED_SECONDS`; None otherwise."""
    if pods and all(pod.has_long_been_empty for pod in pods):
        why = "the ranks have ended, but something they left behind keeps their output open"
        return Ending(None, why)
    if since_measured > MEASURED_SECONDS:
        why = "all ranks have finished measuring, but something keeps the launcher waiting"
        return Ending(None, why)
    return None


def _verdict_on_failed_session(sessions: Mapping[str, float]) -> Ending | None:
    """The verdict on the pod whose session failed first, once the ranks of the other pods had their
    time to report; None before that, and where no session failed.

    Args:
        sessions: the failed sessions, as for `judge`.
    """
    if not sessions:
        return None
    pod = max(sessions, key=lambda name: sessions[name])
    seconds = sessions[pod]
    if seconds <= REPORT_SECONDS:
        return None
    why = f"its ranks or the launcher's session there ended {seconds:.0f} s before the others'"
    return Ending(None, why, pod)


# Hang detection

HEARTBEAT_POLL_SECONDS = 0.5
LATE_POLL_SECONDS = 5.0
"""A longer pause than this, in seconds, between two checks means that this process was stopped, or
its machine asleep."""
STOPPED_SECONDS = 4.0
"""Seconds without a heartbeat, due every second, after which a rank counts as stopped or its pod as
unreachable."""
DEFAULT_SECONDS = 600.0
"""Smallest step timeout if none is given."""
LONGEST_TIMES = 20.0
"""Factor of a step timeout that is not given: it is so many times the longest pause between two
pieces of work so far, if that is more than the smallest one."""
PATIENT_SECONDS = 1_800.0
"""Smallest timeout while ranks load, make their first step or save, which may take long and shows
no progress."""
PATIENT_TIMES = 10.0
"""Factor of this timeout: it is so many times the step timeout, if that is more than the smallest
one."""
STACK_SECONDS = 3.0
"""Seconds that ranks have to write their stacks."""
WAITS_FOR_OTHERS = re.compile(
    r"^(torch/distributed|deepspeed/comm)/| (_engine_run_backward|synchronize)$"
)
"""Matches the places in a stack at which a rank waits for others."""
COLLECTIVE = re.compile(r"(torch/distributed|deepspeed/comm)/")
"""Matches a place in a stack that is within a collective."""
SAVE = "save"
"""Phase in which ranks seldom communicate: if all of them wait for one another for long, none of
them works."""


def check_timeouts(seconds: float | None, step_seconds: float | None) -> None:
    """Refuse a timeout that ends a run at once or never, and a step timeout too short for a rank to
    give a sign of life; `UserError` says which.

    Args:
        seconds: limit of a run; None for no limit.
        step_seconds: limit without work; None where it is to be derived, 0 for no limit.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(f"--timeout {seconds:g}; expected more than 0 seconds")
    if step_seconds not in (None, 0) and not STOPPED_SECONDS < step_seconds < math.inf:
        expected = f"more than {STOPPED_SECONDS:g} seconds, or 0 for none"
        raise UserError(f"--step-timeout {step_seconds:g}; expected {expected}")


@dataclass(frozen=True)
class Watched:
    """A rank's last heartbeat, and when it last changed."""

    beat: Beat
    alive_at: float
    """When the last heartbeat came, by the detector's clock."""
    moved_at: float
    """When the last piece of work was done, by the same clock."""
    placed_at: float
    """Since when the rank's stack has been the same and no work was done, by the same clock."""

    @property
    def is_in_collective_of_save(self) -> bool:
        """Whether the rank is saving, and waits in a collective for the other ranks."""
        if self.beat.phase != SAVE or not self.beat.stack:
            return False
        return COLLECTIVE.match(self.beat.stack[0]) is not None

    def followed_by(self, beat: Beat, now: float, away: float) -> Watched:
        """The same rank with the heartbeat that was read `now`, be it a new one or not.

        Args:
            away: seconds for which nobody read heartbeats, and which do not count as silence.
        """
        alive_at = self.alive_at + away
        moved_at = self.moved_at + away
        placed_at = self.placed_at + away
        if beat.alive != self.beat.alive:
            alive_at = now
        if beat.marks != self.beat.marks:
            moved_at = now
            placed_at = now
        if beat.stack != self.beat.stack:
            placed_at = now
        return Watched(beat, alive_at, moved_at, placed_at)


class HangDetector:
    """Watches the heartbeats of one attempt of a run."""

    def __init__(
        self,
        folder: Path,
        step_timeout: float | None,
        opened: Callable[[], bool],
        pods: Sequence[str] = (),
    ) -> None:
        """Watch the run in a folder.

        Args:
            step_timeout: seconds without work on any rank that mean a hang; None: derived from the
                pauses so far; 0: nothing is ever a hang.
            opened: tells whether the contents of the folder are from this attempt.
            pods: names of the ranks' pods, in the order of ranks; empty on one machine.
        """
        self.folder = folder
        self.verdict: Ending | None = None
        """Why the run must end, once it was found to hang; it stays."""
        self.ranks: dict[int, Watched] = {}
        """The ranks that had a heartbeat at the last reading."""
        self._stopped: list[int] = []
        """Ranks of a hanging run that give no sign of life."""
        self._pods = dict(enumerate(pods))
        self._step_timeout = step_timeout
        self._opened = opened
        self._checked_at: float | None = None
        """Monotonic seconds of the last check."""
        self._longest_pause = 0.0
        """Most seconds that a rank was seen to take for a piece of work."""

    def check(self, now: float | None = None) -> Ending | None:
        """Read the heartbeats, unless that was done a moment ago, and return the verdict if the run
        hangs; None while it goes on.

        Call this several times per second: a pause of more than `LATE_POLL_SECONDS` counts as no
        time at all.

        Args:
            now: time in seconds on any clock; `time.monotonic` if not given.
        """
        if now is None:
            now = time.monotonic()
        was_just_checked = (
            self._checked_at is not None and now - self._checked_at < HEARTBEAT_POLL_SECONDS
        )
        if self._step_timeout == 0 or was_just_checked:
            return self.verdict
        if self.verdict is None and self._opened():
            last_check = self._checked_at or now
            away = now - last_check
            if away <= LATE_POLL_SECONDS:
                away = 0.0
            self._read_beats(now, away)
            if self.ranks:
                self.verdict = self._verdict_on_ranks(now)
        self._checked_at = now
        return self.verdict

    def limit(self) -> float:
        """Seconds that a piece of work may take: the step timeout, as given or as derived."""
        # A step timeout of 0 never gets here.
        return self._step_timeout or max(DEFAULT_SECONDS, LONGEST_TIMES * self._longest_pause)

    def save_stacks(self, ask: Callable[[], object]) -> None:
        """Save the stacks of all ranks in `stacks/N.txt`, within `STACK_SECONDS`: what the ranks
        write themselves or, of those that write nothing, the stacks of their last heartbeats.

        Args:
            ask: sends the ranks the signal that asks for their stacks.
        """
        ask()
        time.sleep(STACK_SECONDS)
        # A full disk does not keep a run from ending.
        with suppress(OSError):
            for rank, watched in self.ranks.items():
                file = self.folder / "stacks" / f"{rank}.txt"
                is_written = file.is_file() and file.stat().st_size > 0
                if not is_written:
                    self._save_last_known_stack(rank, watched.beat, file)

    def _save_last_known_stack(self, rank: int, beat: Beat, file: Path) -> None:
        """Write the stack of a rank's last heartbeat; `OSError` where that is impossible."""
        how = "is stopped" if rank in self._stopped else "does not answer"
        lines = [
            f"rank {rank}, process {beat.pid}: {how}; its main thread at its last heartbeat, "
            "innermost first:"
        ]
        for place in beat.stack:
            lines.append(f"  {place}")
        file.parent.mkdir(exist_ok=True)
        # Append: the rank has the file open, and what it writes late, or over a network, must not
        # be lost.
        with open(file, "a", encoding="utf-8") as text:
            text.write("\n".join(lines) + "\n")

    def _read_beats(self, now: float, away: float) -> None:
        """Read the heartbeats into `ranks`, and keep the longest pause between two pieces of work.

        Args:
            away: seconds for which nobody read heartbeats, and which do not count.
        """
        known = self.ranks
        self.ranks = {}
        for rank, beat in read_beats(self.folder).items():
            before = known.get(rank)
            # Another process has begun this rank anew.
            if before is None or before.beat.pid != beat.pid:
                self.ranks[rank] = Watched(beat, now, now, now)
                continue
            has_moved = beat.marks != before.beat.marks
            # Pauses of loading, saving and the like say nothing about a step.
            if has_moved and not before.beat.patient:
                pause = now - before.moved_at - away
                self._longest_pause = max(self._longest_pause, pause)
            self.ranks[rank] = before.followed_by(beat, now, away)

    def _verdict_on_ranks(self, now: float) -> Ending | None:
        """The verdict on the ranks by their last heartbeats, of which there is at least one: None
        unless some rank is silent for too long, or no rank does any work for too long."""
        limit = self.limit()
        still_limit = self._limit_without_work(now, limit)
        ranks = self.ranks.values()
        silent_seconds = now - min(rank.alive_at for rank in ranks)
        still_seconds = now - max(rank.moved_at for rank in ranks)
        if silent_seconds <= limit and still_seconds <= still_limit:
            return None
        why = f"no heartbeat from a rank for {silent_seconds:.0f} s (step timeout {limit:.0f} s)"
        if still_seconds > still_limit:
            why = f"no progress for {still_seconds:.0f} s (step timeout {still_limit:.0f} s)"
        return self._verdict_that_it_hangs(now, why)

    def _limit_without_work(self, now: float, limit: float) -> float:
        """Seconds that may pass without a piece of work on any rank: `limit`, or more while all
        ranks do what takes long and shows no progress."""
        ranks = self.ranks.values()
        if not all(rank.beat.patient for rank in ranks):
            return limit
        same_place_seconds = now - max(rank.placed_at for rank in ranks)
        all_wait = all(rank.is_in_collective_of_save for rank in ranks)
        if all_wait and same_place_seconds > limit:
            # Where all ranks wait for one another, none of them works, however long a save may
            # take.
            return limit
        return max(PATIENT_SECONDS, PATIENT_TIMES * limit)

    def _verdict_that_it_hangs(self, now: float, why: str) -> Ending:
        """The verdict with the rank that holds up the run, and one of those that wait for it. The
        ranks without a sign of life are kept in `_stopped`."""
        numbers = sorted(self.ranks)
        self._stopped = []
        for rank in numbers:
            if now - self.ranks[rank].alive_at > STOPPED_SECONDS:
                self._stopped.append(rank)
        if self._stopped:
            blamed = self._stopped[0]
        else:
            blamed = culprit({rank: watched.beat for rank, watched in self.ranks.items()})
        shown = [blamed]
        for rank in numbers:
            if rank != blamed and rank not in self._stopped:
                shown.append(rank)
                break
        places = "; ".join(self._place_of(rank) for rank in shown)
        return Ending("timeout", f"{why}: {places}", self._pods.get(blamed), blamed)

    def _place_of(self, rank: int) -> str:
        """Where a rank of a hanging run is, as text for a person."""
        beat = self.ranks[rank].beat
        if rank in self._stopped:
            does = "is stopped"
        elif waits(beat):
            does = "waits"
        else:
            does = "is"
        pod = self._pods.get(rank)
        where = f" on {pod}" if pod else ""
        done = f"phase {beat.phase}, {beat.step} steps done"
        return f"rank {rank}{where} {does} at {beat.place()} ({done})"


def waits(beat: Beat) -> bool:
    """Whether a rank waits for others, judging by its stack."""
    return any(WAITS_FOR_OTHERS.search(place) for place in beat.stack[:6])


def culprit(beats: Mapping[int, Beat]) -> int:
    """The rank that holds up a run whose ranks are all alive.

    It is one that waits for no other while others wait; else the one with the fewest steps; else
    one at the place in the code with the fewest ranks.
    """
    ranks = sorted(beats)
    busy = [rank for rank in ranks if not waits(beats[rank])]
    if busy and len(busy) < len(ranks):
        return busy[0]
    ranks_at = Counter(beats[rank].place() for rank in ranks)

    def progress(rank: int) -> tuple[int, int, int]:
        # Where ranks have done the same number of steps, the place decides.
        beat = beats[rank]
        return beat.step, ranks_at[beat.place()], rank

    return min(ranks, key=progress)
