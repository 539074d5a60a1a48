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
CONSEQUENCES = {"timeout": ("interrupted", "failed")}
"""Statuses of ranks that only follow from the supervisor's verdict, by the verdict's status; for
every other one this is `interrupted`. At a timeout, ranks that are ended later than others fail,
since they miss these."""


# What the ranks of a launch have written into its folder


class Ranks:
    """The ranks of one launch, and what is known of them since it began.

    Whoever follows the launch sets `pods` and `session_statuses` as soon as they are known.
    """

    def __init__(self, folder: Path, pods: Sequence[str | None] = ()) -> None:
        """`pods`: the name of each rank's pod, in the order of ranks; None where it has none."""
        self.pods = tuple(pods)
        self.folder = folder
        self.config_before = written_at(folder / CONFIG)
        """What `written_at` returned for `config.json` when the launch began."""
        self.session_statuses: Mapping[str, int] = {}
        """Exit statuses of the launcher's sessions that failed, by pod, in the order in which they
        failed."""
        self._notes: dict[int, ExitNote] = {}
        """What was known of the ranks' processes at the last call of `note_exits`, by rank."""

    def have_opened_the_run(self) -> bool:
        """Whether rank 0 has begun an attempt, so that the contents of the folder are this
        launch's."""
        return written_at(self.folder / CONFIG) != self.config_before

    def files(self) -> list[Path]:
        """Files in which ranks have written what they measured; none before they have opened the
        run."""
        if not self.have_opened_the_run():
            return []
        files = (self.folder / "ranks").glob("*.json")
        return [path for path in files if path.stem.isdigit()]

    def measured(self) -> list[RankMeasurement]:
        """What each rank of this launch measured; a damaged file is left out."""
        measurements = []
        for path in self.files():
            with suppress(UserError):
                measurements.append(read_rank(path))
        ranks = range(len(self.pods))
        return [measured for measured in measurements if measured.rank in ranks]

    def note_exits(self) -> None:
        """Note which ranks have ended by now. Call this before the other ranks are ended, which
        would otherwise seem to have ended by themselves."""
        self._notes = read_exits(self.folder)

    def note_exit(self, seen: RankExit, last_lines: Sequence[str]) -> None:
        """Note the end of a rank that is this process's own child."""
        self._notes[seen.rank] = ExitNote(exit=seen, last_lines=list(last_lines))

    def are_watched(self) -> bool:
        """Whether the process that started a rank has left a note about it, and so will note how
        it ends."""
        return bool(self._notes or read_exits(self.folder))

    def exits(self) -> list[RankExit]:
        """How the ranks' processes ended, as far as that was seen, in the order of their ends; also
        of those that ended after `note_exits`."""
        notes = {**self._notes, **read_exits(self.folder)}
        exits = [note.exit for note in notes.values() if note.exit.ended_unix_seconds is not None]
        return sorted(exits, key=lambda seen: seen.ended_unix_seconds or 0.0)

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
                session_status=self._session_of_only_rank(pod),
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
        return self.session_statuses.get(pod)


def written_at(path: Path) -> int | None:
    """Modification time of a file in nanoseconds, by which a rewriting is noticed; None where there
    is no file."""
    return path.stat().st_mtime_ns if path.is_file() else None


def verdict_of_ranks(
    ranks: Ranks,
    verdict: Ending,
    out_of_memory: Collection[str | None] = (),
    *,
    uncounted: Collection[str | None] = (),
    is_certain: bool = False,
) -> Ending:
    """The final verdict: the supervisor's, in view of what is known of the ranks. It has no status
    if all ranks ended well, whatever came after.

    The rank that ended first for a reason of its own is the cause. Errors of ranks that lost their
    connection to it follow from it. A rank that was interrupted is never the cause where another
    one has a reason.

    Args:
        verdict: the supervisor's verdict.
        out_of_memory: pods where the kernel has killed a process for lack of memory.
        uncounted: pods where the kernel does not count such processes.
        is_certain: whether a verdict with a status stands unless all ranks ended well.
    """
    ends = ranks.ends()
    if all(end.ended_well for end in ends):
        return Ending()
    if verdict.status == "pod_lost" or (is_certain and verdict.status is not None):
        return _with_rank(verdict, ends)
    if verdict.status is None:
        return _verdict_by_cause(ranks, ends, verdict, out_of_memory, uncounted)
    consequences = CONSEQUENCES.get(verdict.status, ("interrupted",))
    # Only what a rank measured may say more than the status that the supervisor has found.
    possible_causes = []
    for end in ends:
        is_on_named_pod = verdict.pod in (None, end.pod)
        if not is_on_named_pod or end.measured is None:
            continue
        if end.measured.status not in consequences:
            possible_causes.append(end)
    cause = first_cause(possible_causes)
    if cause is None:
        return verdict
    return _verdict_on_cause(cause, ranks, out_of_memory, uncounted)


def _with_rank(verdict: Ending, ends: Sequence[RankEnd]) -> Ending:
    """A verdict that stands, with the rank that it is about: the only one of its pod or, for `oom`,
    the first that was killed. The same verdict where that rank is not known."""
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


def _verdict_by_cause(
    ranks: Ranks,
    ends: Sequence[RankEnd],
    verdict: Ending,
    out_of_memory: Collection[str | None],
    uncounted: Collection[str | None],
) -> Ending:
    """The verdict, with the rank that is the cause, on an end for which the supervisor has no
    status of its own, only what it saw of the launcher.

    Args:
        ends: of all ranks.
        verdict: the supervisor's, without a status.
    """
    is_watched = any(end.note is not None for end in ends)
    if not is_watched and verdict.pod is not None:
        # Where one pod lost its ranks first, what they say is the cause.
        ends = [end for end in ends if end.pod == verdict.pod]
    ends = _in_order_of_sessions(ends, ranks.session_statuses)
    unknown = [end for end in ends if end.is_unknown]
    # A rank that left nothing on a pod where the kernel has killed a process is taken to be that
    # process. It comes before all others: their errors follow, and its own time is not known.
    for end in unknown:
        if end.pod in out_of_memory:
            return Ending("oom", killed_for_memory(ranks.folder, end.rank), end.pod, end.rank)
    cause = first_cause(ends)
    if cause is not None:
        return _verdict_on_cause(cause, ranks, out_of_memory, uncounted)
    if not unknown:
        return _verdict_without_cause(ends, verdict)
    first = unknown[0]
    how = verdict.reason or UNSAID
    if first.session_status is not None:
        how = first.described()
    why = f"rank {first.rank} left no measurement: {how}"
    return Ending("failed", why, first.pod, first.rank)


def _in_order_of_sessions(ends: Sequence[RankEnd], sessions: Mapping[str, int]) -> list[RankEnd]:
    """The ends of ranks in the order in which their pods' sessions failed; those of pods whose
    sessions did not fail come last."""
    positions = {pod: position for position, pod in enumerate(sessions)}
    return sorted(ends, key=lambda end: positions.get(end.pod or "", len(positions)))


def _verdict_without_cause(ends: Sequence[RankEnd], verdict: Ending) -> Ending:
    """The verdict where something is known of every rank, and none of them ended for a reason of
    its own.

    Args:
        ends: of all ranks, in the order in which their pods' sessions failed.
        verdict: the supervisor's, without a status.
    """
    if verdict.launcher_was_killed:
        # The ranks ended because the launcher did.
        return Ending("failed", verdict.reason or UNSAID, verdict.pod)
    interrupted = [end for end in ends if end.was_interrupted]
    if interrupted:
        first = min(interrupted, key=lambda end: end.ended_at)
        reason = "SIGTERM" if first.measured is None else first.measured.reason
        why = f"rank {first.rank} was asked to end, and not by this launch: {reason}"
        return Ending("failed", why, first.pod, first.rank)
    for end in ends:
        ran_until_verdict = end.note is not None and end.exit_status is None
        if ran_until_verdict and end.session_status is not None:
            why = f"what had started rank {end.rank} ended before it: {end.described()}"
            return Ending("failed", why, end.pod, end.rank)
    if any(end.lost_others for end in ends):
        why = "ranks lost their connections to one another, and none ended for a reason of its own"
        return Ending("failed", f"{why}; is the network between their pods sound?", verdict.pod)
    return Ending("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)


def _verdict_on_cause(
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
    """The reason to record if the kernel killed a rank for lack of memory: with the rank's phase,
    its steps done and the sampled peak of its memory, as far as they are known."""
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
    """The samples of a rank's resident memory, in bytes, since the attempt to which its heartbeat
    belongs; none where there is no file of them."""
    rows: list[dict[str, str]] = []
    path = folder / "memory" / f"{beat.rank}.csv"
    with suppress(OSError), open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    samples = []
    for row in rows:
        sampled_at = row.get("unix_seconds")
        resident = row.get("resident_bytes")
        # The last line may have been cut off, and lines of earlier attempts are older. The second
        # is a margin, since the times of samples are rounded.
        if sampled_at and resident and float(sampled_at) >= beat.began_unix_seconds - 1.0:
            samples.append(float(resident))
    return samples


# The record of a supervised run


class UnopenedError(UserError):
    """A run that ended before its ranks had opened its folder, so that nothing was measured.

    It has those fields of a `Record` that are known nevertheless.
    """

    steps = 0

    def __init__(
        self,
        folder: Path,
        verdict: Ending,
        lines: Sequence[str],
        exits: Sequence[RankExit] = (),
    ) -> None:
        """`lines`: the last ones that were written; they are shown, or explain the end."""
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
    """Why one of our scripts refused to train; None where the last line that is a rank's is no
    message of such a script."""
    newest_first = [line for line in reversed(lines) if not SESSION_END.match(line)]
    if not newest_first or not OF_SCRIPT.match(newest_first[0]):
        return None
    messages = []
    for line in newest_first:
        match = OF_SCRIPT.match(line)
        if match is not None:
            messages.append(match[1])
    # Ranks that were ended because another one refused write a message too, which is no refusal.
    for message in messages:
        if not message.startswith(ENDED_FROM_OUTSIDE):
            return message
    return messages[0]


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
    """Write `record.json` of a run whose ranks have ended, report the end to MLflow, and return the
    record.

    Args:
        ranks: gets the exit statuses of the log's sessions.
        verdict: the supervisor's verdict.
        out_of_memory, uncounted, is_certain: as for `verdict_of_ranks`.
        restarts: number of times that the launch had restarted by itself.

    Raises:
        UnopenedError: the ranks had not opened the run.
        UserError: the record cannot be written; the message says what the record would have said.
    """
    folder = ranks.folder
    ranks.session_statuses = log.session_statuses
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
    """Wait for the lock of a run folder; returns a context manager that takes it, or one that takes
    nothing if the lock does not become free within `LOCKED_SECONDS`.

    A process that holds the folder for so long is out of reach, on a lost pod. The record is then
    written without the lock, since the supervisor's own lock keeps other launches out.
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
