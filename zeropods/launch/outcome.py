"""How a run ended: who is to blame, judging by what its ranks wrote, and what is recorded about
it."""

from __future__ import annotations

import csv
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from zeropods.errors import INTERRUPTED, UserError
from zeropods.launch.causes import RankEnd, first_cause
from zeropods.launch.logs import LAUNCH_LOG, OF_SCRIPT, SESSION_END, RunLog
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.measure.exits import ExitNote, read_exits
from zeropods.measure.heartbeat import Beat, read_beats
from zeropods.measure.record import (
    CONFIG,
    LOCK,
    UNSAID,
    RankExit,
    RankMeasurement,
    Record,
    compose_record,
    read_rank,
    write_record,
)
from zeropods.measure.run_folder import locked
from zeropods.programs import is_held
from zeropods.report.to_mlflow import report_end
from zeropods.tables import GIB

LOCKED_SECONDS = 120.0
"""Seconds to wait for `run.lock`, which rank 0 on a lost pod may hold until its lease ends.

A file server gives the locks of a machine that is gone free when that machine's lease with it runs
out: after 90 s, as Linux's NFSv4 server is usually set.
"""
LOCK_POLL_SECONDS = 0.2
ENDED_FROM_OUTSIDE = ("interrupted", "ended by SIG")
"""Beginnings of the message of a script that was ended from outside."""
NEVER_A_CAUSE = {"timeout": ("interrupted", "failed")}
"""Statuses of ranks that follow from the supervisor's verdict, by this verdict: ranks ended later
miss the others."""


# What the ranks of a launch have written into its folder


class Ranks:
    """The ranks of one launch, and what is known of them since it began."""

    def __init__(self, folder: Path, pods: Sequence[str | None] = ()) -> None:
        """`pods`: the name of each rank's pod, in the order of ranks; None where it has none."""
        self.pods = tuple(pods)
        self.folder = folder
        self.before = written_at(folder / CONFIG)
        """What `written_at` gave for `config.json` when the launch began."""
        self.sessions: Mapping[str, int] = {}
        """Exit statuses of the launcher's sessions that failed, by pod, in the order in which they
        failed."""
        self._notes: dict[int, ExitNote] = {}

    def have_opened_the_run(self) -> bool:
        """Whether rank 0 has begun an attempt, so that the contents of the folder are this
        launch's."""
        return written_at(self.folder / CONFIG) != self.before

    def files(self) -> list[Path]:
        """Files in which ranks have written what they measured; none before they have opened the
        run."""
        if not self.have_opened_the_run():
            return []
        files = (self.folder / "ranks").glob("*.json")
        return [path for path in files if path.stem.isdigit()]

    def measured(self) -> list[RankMeasurement]:
        """What each rank measured; a damaged file is left out."""
        measurements = []
        for path in self.files():
            with suppress(UserError):
                measurements.append(read_rank(path))
        return [rank for rank in measurements if rank.rank in range(len(self.pods))]

    def note_exits(self) -> None:
        """Note which ranks have ended by now. Call it before the others are ended: they are not to
        blame for that."""
        self._notes = read_exits(self.folder)

    def note_exit(self, seen: RankExit, last_lines: Sequence[str]) -> None:
        """Note the end of a rank that is this process's own child."""
        self._notes[seen.rank] = ExitNote(exit=seen, last_lines=list(last_lines))

    def are_watched(self) -> bool:
        """Whether the end of any rank is noted when it comes."""
        return bool(self._notes or read_exits(self.folder))

    def exits(self) -> list[RankExit]:
        """How the ranks' processes ended, as far as it was seen, in the order of their ends."""
        notes = {**self._notes, **read_exits(self.folder)}
        ended = [note.exit for note in notes.values() if note.exit.ended_unix_seconds is not None]
        return sorted(ended, key=lambda seen: seen.ended_unix_seconds or 0.0)

    def last_lines(self, rank: int | None) -> list[str]:
        """The last lines that a rank wrote; none where its output was not watched."""
        if rank is None:
            return []
        note = read_exits(self.folder).get(rank) or self._notes.get(rank)
        return [] if note is None else note.last_lines

    def ends(self) -> list[RankEnd]:
        """What is known of the end of each rank, up to the last call of `note_exits`."""
        measured = {rank.rank: rank for rank in self.measured()}
        beats = read_beats(self.folder) if self.have_opened_the_run() else {}
        steps = [rank.step for rank in measured.values()]
        steps += [beat.step for beat in beats.values()]
        steps_done = max(steps, default=0)
        ends = []
        for rank, pod in enumerate(self.pods):
            end = RankEnd(
                rank=rank,
                pod=pod,
                measured=measured.get(rank),
                note=self._notes.get(rank),
                beat=self._of_this_attempt(beats.get(rank)),
                steps_done=steps_done,
                session=self._session_of_only_rank(pod),
            )
            ends.append(end)
        return ends

    def _of_this_attempt(self, beat: Beat | None) -> Beat | None:
        """A heartbeat, unless it is known to be an earlier attempt's."""
        if beat is None:
            return None
        note = self._notes.get(beat.rank)
        if note is not None and note.exit.pid != beat.pid:
            return None
        return beat

    def _session_of_only_rank(self, pod: str | None) -> int | None:
        """Exit status of the launcher's session on a pod, if that failed and the pod has only one
        rank."""
        if pod is None or self.pods.count(pod) > 1:
            return None
        return self.sessions.get(pod)


def written_at(path: Path) -> int | None:
    """Modification time of a file, in ns, which changes when it is rewritten; None where there is
    no file."""
    return path.stat().st_mtime_ns if path.is_file() else None


def verdict_of_ranks(
    ranks: Ranks,
    verdict: Ending,
    out_of_memory: Collection[str | None] = (),
    *,
    uncounted: Collection[str | None] = (),
    is_certain: bool = False,
) -> Ending:
    """The verdict in view of what is known of the ranks; without a status if all ended well,
    whatever came after.

    The rank that ended first for a reason of its own is the cause. Errors of ranks that lost their
    connection to it follow from it. A rank that was interrupted is never the cause where another
    one has a reason.

    Args:
        out_of_memory: pods where the kernel has killed a process for lack of memory.
        uncounted: pods where the kernel does not count such processes.
        is_certain: whether a verdict with a status stands, whatever is said by ranks that did not
            end well.
    """
    ends = ranks.ends()
    if all(end.ended_well for end in ends):
        return Ending()
    if verdict.status == "pod_lost" or (is_certain and verdict.status is not None):
        return _with_rank(verdict, ends)
    if verdict.status is None:
        return _cause(ranks, ends, verdict, out_of_memory, uncounted)
    follows = NEVER_A_CAUSE.get(verdict.status, ("interrupted",))
    measured = []
    for end in ends:
        is_about = verdict.pod in (None, end.pod)
        if is_about and end.measured is not None and end.measured.status not in follows:
            measured.append(end)
    cause = first_cause(measured)
    if cause is None:
        return verdict
    return _blamed(cause, ranks, out_of_memory, uncounted)


def _with_rank(verdict: Ending, ends: Sequence[RankEnd]) -> Ending:
    """A verdict that stands, with the rank that it is about: the only one of its pod, or one that
    the kernel killed."""
    if verdict.rank is not None:
        return verdict
    if verdict.status == "oom":
        killed = first_cause([end for end in ends if end.exit_status == -signal.SIGKILL])
        if killed is None:
            return verdict
        return replace(verdict, pod=killed.pod, rank=killed.rank)
    on_pod = [end for end in ends if end.pod == verdict.pod]
    if verdict.pod is not None and len(on_pod) == 1:
        return replace(verdict, rank=on_pod[0].rank)
    return verdict


def _cause(
    ranks: Ranks,
    ends: Sequence[RankEnd],
    verdict: Ending,
    out_of_memory: Collection[str | None],
    uncounted: Collection[str | None],
) -> Ending:
    """The cause of an end for which the supervisor has no reason of its own, only what the launcher
    came to."""
    is_watched = any(end.note is not None for end in ends)
    if not is_watched and verdict.pod is not None:
        # Where one pod lost its ranks first, what they say is the cause.
        ends = [end for end in ends if end.pod == verdict.pod]
    ends = _in_order_of_sessions(ends, ranks.sessions)
    unknown = [end for end in ends if end.is_unknown]
    for end in unknown:
        if end.pod in out_of_memory:
            return Ending("oom", killed_for_memory(ranks.folder, end.rank), end.pod, end.rank)
    cause = first_cause(ends)
    if cause is not None:
        return _blamed(cause, ranks, out_of_memory, uncounted)
    if not unknown:
        return _nobody_s_own_cause(ends, verdict)
    first = unknown[0]
    how = verdict.reason or UNSAID
    if first.session is not None:
        how = first.described()
    why = f"rank {first.rank} left no measurement: {how}"
    return Ending("failed", why, first.pod, first.rank)


def _in_order_of_sessions(ends: Sequence[RankEnd], sessions: Mapping[str, int]) -> list[RankEnd]:
    """Those whose pods' sessions failed first come first, those whose sessions did not fail
    come last."""
    positions = {pod: position for position, pod in enumerate(sessions)}
    return sorted(ends, key=lambda end: positions.get(end.pod or "", len(positions)))


def _nobody_s_own_cause(ends: Sequence[RankEnd], verdict: Ending) -> Ending:
    """The verdict where something is known of every rank, and none of them ended for a reason of
    its own.

    Args:
        ends: of all ranks, in the order in which their pods' sessions failed.
    """
    if verdict.launcher_was_killed:
        # The ranks ended because it did.
        return Ending("failed", verdict.reason or UNSAID, verdict.pod)
    interrupted = [end for end in ends if end.was_interrupted]
    if interrupted:
        first = min(interrupted, key=lambda end: end.ended_at)
        reason = "SIGTERM" if first.measured is None else first.measured.reason
        why = f"rank {first.rank} was asked to end, and not by this launch: {reason}"
        return Ending("failed", why, first.pod, first.rank)
    for end in ends:
        if end.note is not None and end.exit_status is None and end.session is not None:
            why = f"what had started rank {end.rank} ended before it: {end.described()}"
            return Ending("failed", why, end.pod, end.rank)
    if any(end.lost_others for end in ends):
        why = "ranks lost their connections to one another, and none ended for a reason of its own"
        return Ending("failed", f"{why}; is the network between their pods sound?", verdict.pod)
    return Ending("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)


def _blamed(
    cause: RankEnd,
    ranks: Ranks,
    out_of_memory: Collection[str | None],
    uncounted: Collection[str | None],
) -> Ending:
    """The verdict that a rank is the cause, by what it measured or, if it left nothing, by how its
    process ended."""
    if cause.measured is not None:
        place = f"rank {cause.rank}: " if len(ranks.pods) > 1 else ""
        why = f"{place}{cause.measured.reason}"
        return Ending(cause.measured.status, why, cause.pod, cause.rank)
    if cause.exit_status == -signal.SIGKILL and cause.pod in out_of_memory:
        why = killed_for_memory(ranks.folder, cause.rank)
        return Ending("oom", why, cause.pod, cause.rank)
    how = cause.described(memory_is_counted=cause.pod not in uncounted)
    why = f"rank {cause.rank} left no measurement: {how}"
    return Ending("failed", why, cause.pod, cause.rank)


def killed_for_memory(folder: Path, rank: int) -> str:
    """The reason to record if the kernel killed a rank: phase, steps done and the sampled peak of
    the rank's memory."""
    reason = f"rank {rank}: killed by the kernel, out of memory"
    beat = read_beats(folder).get(rank)
    if beat is None:
        return reason
    reason += f": phase {beat.phase}, {beat.step} steps done"
    samples = _resident_bytes(folder, beat)
    if samples:
        reason += f", peak resident {max(samples) / GIB:.2f} GiB"
    return reason


def _resident_bytes(folder: Path, beat: Beat) -> list[float]:
    """The sampled resident memory of the rank that has left a heartbeat, in bytes."""
    rows: list[dict[str, str]] = []
    path = folder / "memory" / f"{beat.rank}.csv"
    with suppress(OSError), open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    samples = []
    for row in rows:
        sampled_at = row.get("unix_seconds")
        resident = row.get("resident_bytes")
        # The last line may have been cut off, and lines of earlier attempts are older.
        if sampled_at and resident and float(sampled_at) >= beat.began_unix_seconds - 1.0:
            samples.append(float(resident))
    return samples


# The record of a supervised run


class UnopenedError(UserError):
    """A run that ended before its ranks had opened its folder, so that nothing was measured."""

    steps = 0

    def __init__(
        self,
        folder: Path,
        verdict: Ending,
        lines: Sequence[str],
        exits: Sequence[RankExit] = (),
    ) -> None:
        self.status = verdict.status or "failed"
        self.reason = verdict.reason or "it ended before the ranks had opened the run"
        self.pod = verdict.pod
        self.rank = verdict.rank
        self.exits = list(exits)
        self.last_lines = list(lines)
        message = f"{folder}: {self.status}: {with_pod(self.pod, self.reason)}"
        refusal = _refusal(lines)
        if self.status == "interrupted":
            self.exit_status = INTERRUPTED
        elif refusal is not None and verdict.status is None:
            # The launcher saw nothing but an end, so the script's own words say why.
            message = refusal
        elif lines:
            message = "\n".join([f"{message}; last lines of {LAUNCH_LOG}:", *lines])
        super().__init__(message)


def with_pod(pod: str | None, reason: str) -> str:
    """A reason with the pod's name before it, unless it begins with that anyway."""
    if pod is None or reason.startswith(pod):
        return reason
    return f"{pod}: {reason}"


def _refusal(lines: Sequence[str]) -> str | None:
    """Why one of our scripts refused to train; None where the last of these lines does not come
    from one that did."""
    lines_of_ranks = [line for line in reversed(lines) if not SESSION_END.match(line)]
    if not lines_of_ranks or not OF_SCRIPT.match(lines_of_ranks[0]):
        return None
    refusals = []
    for line in lines_of_ranks:
        match = OF_SCRIPT.match(line)
        if match is not None:
            refusals.append(match[1])
    # Ranks that were ended because another one refused also say so.
    for refusal in refusals:
        if not refusal.startswith(ENDED_FROM_OUTSIDE):
            return refusal
    return refusals[0]


def record_run(
    ranks: Ranks,
    verdict: Ending,
    log: RunLog,
    *,
    out_of_memory: Collection[str | None] = (),
    uncounted: Collection[str | None] = (),
    is_certain: bool = False,
    restarts: int = 0,
) -> Record:
    """Write `record.json` of a run whose ranks have ended, and return it; `UnopenedError` where
    they never began.

    Args:
        verdict: the supervisor's verdict, which `verdict_of_ranks` takes into account.
        restarts: number of times that the launch had restarted by itself.

    Raises:
        UserError: the record cannot be written; the message says what it would have said.
    """
    folder = ranks.folder
    ranks.sessions = log.sessions
    exits = ranks.exits()
    if not ranks.have_opened_the_run():
        raise _unopened(ranks, verdict, log, exits, uncounted)
    with _lock_once_it_is_free(folder):
        ending = verdict_of_ranks(
            ranks, verdict, out_of_memory, uncounted=uncounted, is_certain=is_certain
        )
        last_lines = []
        if ending.status is not None:
            last_lines = ranks.last_lines(ending.rank) or log.tail(ending.pod)
        record = compose_record(
            folder,
            status=ending.status,
            reason=ending.reason,
            pod=ending.pod,
            rank=ending.rank,
            last_lines=last_lines,
            exits=exits,
            restarts=restarts,
        )
        try:
            write_record(folder, record)
        except OSError as error:
            remedy = f"{error.filename}: {error.strerror}; free some room"
            raise UserError(f"{failure(folder, record)}\n{remedy}") from None
    report_end(folder)
    return record


def _lock_once_it_is_free(folder: Path) -> AbstractContextManager[None]:
    """The lock of a run folder, or nothing if it does not become free.

    A process that holds the folder longer than a lease is out of reach; the supervisor's own lock
    keeps others out.
    """
    deadline = time.monotonic() + LOCKED_SECONDS
    while is_held(folder / LOCK) and time.monotonic() < deadline:
        time.sleep(LOCK_POLL_SECONDS)
    if is_held(folder / LOCK):
        return nullcontext()
    return locked(folder)


def _unopened(
    ranks: Ranks,
    verdict: Ending,
    log: RunLog,
    exits: list[RankExit],
    uncounted: Collection[str | None],
) -> UnopenedError:
    """The error that says why a run ended before its ranks had opened its folder."""
    cause = first_cause(ranks.ends())
    if verdict.status is None and cause is not None:
        how = cause.described(memory_is_counted=cause.pod not in uncounted)
        why = f"rank {cause.rank} ended before it had opened the run: {how}"
        verdict = Ending(None, why, cause.pod, cause.rank)
    last_lines = ranks.last_lines(verdict.rank) or log.tail(verdict.pod)
    return UnopenedError(ranks.folder, verdict, last_lines, exits)


def failure(folder: Path, record: Record) -> str:
    """Why a run ended without success, with the last lines that it wrote."""
    pod = f"{record.pod}: " if record.pod else ""
    lines = "\n".join(record.last_lines)
    return f"{folder}: {record.status}: {pod}{record.reason}; last lines of {LAUNCH_LOG}:\n{lines}"
