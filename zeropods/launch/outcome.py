"""How a run ended: who is to blame, judging by what its ranks wrote, and what is recorded about it."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from zeropods.errors import INTERRUPTED, UserError
from zeropods.launch.logs import LOG, OF_SCRIPT, SESSION_END, RunLog
from zeropods.launch.lost_pods_and_hangs import Ending
from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import (
    CONFIG,
    LOCK,
    RankMeasurement,
    Record,
    compose_record,
    first_failure,
    read_rank,
    write_record,
)
from zeropods.measure.run_folder import locked
from zeropods.programs import is_held
from zeropods.tables import GIB

LOCKED_SECONDS, POLL_SECONDS = 15.0, 0.2
"""Seconds to wait for `run.lock`, which rank 0 on a lost pod may hold until its lease ends, and between two checks."""
ENDED = ("interrupted", "ended by SIG")
"""Beginnings of the message of a script that was ended from outside."""
UNSAID = "it was killed, or ended without saying why"
NEVER_A_CAUSE = {"timeout": ("interrupted", "failed")}
"""Statuses of ranks that follow from the supervisor's verdict, by this verdict: ranks ended later miss the others."""


# What the ranks of a launch have written into its folder


class Ranks:
    """The ranks of one launch, and what they have measured since it began."""

    def __init__(self, folder: Path, pods: Sequence[str | None] = ()) -> None:
        """`pods`: the name of each rank's pod, in the order of ranks; None where it has none."""
        self.pods = tuple(pods)
        self.folder = folder
        self.before = written_at(folder / CONFIG)
        """What `written_at` gave for `config.json` when the launch began."""

    def have_opened_the_run(self) -> bool:
        """Whether rank 0 has begun an attempt, so that the contents of the folder are this launch's."""
        return written_at(self.folder / CONFIG) != self.before

    def files(self) -> list[Path]:
        """Files in which ranks have written what they measured; none before they have opened the run."""
        files = (self.folder / "ranks").glob("*.json") if self.have_opened_the_run() else ()
        return [path for path in files if path.stem.isdigit()]

    def measured(self) -> list[RankMeasurement]:
        """What each rank measured; a damaged file is left out."""
        found = []
        for path in self.files():
            with suppress(UserError):
                found.append(read_rank(path))
        return [rank for rank in found if rank.rank in range(len(self.pods))]


def written_at(path: Path) -> int | None:
    """Modification time of a file, in ns, which changes when it is rewritten; None where there is no file."""
    return path.stat().st_mtime_ns if path.is_file() else None


def verdict_of_ranks(
    ranks: Ranks, verdict: Ending, out_of_memory: frozenset[str | None] = frozenset(), *, is_certain: bool = False
) -> Ending:
    """The verdict in view of what the ranks measured; without a status if all of them ended well, whatever came after.

    Where one pod lost its ranks first, what they say is the cause, and the errors of others follow from
    it. A rank that was interrupted is never the cause: only the supervisor and its agents interrupt ranks. A rank that
    left nothing, on a pod where the kernel has killed a process for lack of memory, is taken to be that process.

    Args:
        out_of_memory: pods where the kernel has killed a process for lack of memory.
        is_certain: whether a verdict with a status stands, whatever is said by ranks that did not end well.
    """
    measured, pods = ranks.measured(), ranks.pods
    missing = sorted(set(range(len(pods))) - {rank.rank for rank in measured})
    if not missing and all(rank.status == "ok" for rank in measured):
        return Ending()
    if verdict.status == "pod_lost" or (is_certain and verdict.status is not None):
        return verdict
    unsaid = [rank for rank in missing if verdict.pod in (None, pods[rank])]
    killed = next((rank for rank in unsaid if pods[rank] in out_of_memory), None)
    if killed is not None and verdict.status is None:
        return Ending("oom", killed_for_memory(ranks.folder, killed), pods[killed])
    follows = NEVER_A_CAUSE.get(verdict.status or "", ("interrupted",))
    here = [rank for rank in measured if verdict.pod in (None, pods[rank.rank]) and rank.status not in follows]
    cause = first_failure(here)
    if cause is not None:
        place = f"rank {cause.rank}: " if len(pods) > 1 else ""
        return Ending(cause.status, f"{place}{cause.reason}", pods[cause.rank])
    if verdict.status is not None:
        return verdict
    if unsaid:
        reason = f"rank {unsaid[0]} left no measurement: {verdict.reason or UNSAID}"
        return Ending("failed", reason, pods[unsaid[0]])
    return Ending("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)


def killed_for_memory(folder: Path, rank: int) -> str:
    """The reason to record if the kernel killed a rank: phase, steps done and the sampled peak of the rank's memory."""
    reason, beat = f"rank {rank}: killed by the kernel, out of memory", read_beats(folder).get(rank)
    if beat is None:
        return reason
    rows, values = list[dict[str, str]](), list[float]()
    with suppress(OSError), open(folder / "memory" / f"{rank}.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        at, value = row.get("unix_seconds"), row.get("resident_bytes")
        # The last line may have been cut off, and lines of earlier attempts are older.
        if at and value and float(at) >= beat.began_unix_seconds - 1.0:
            values.append(float(value))
    peak = f", peak resident {max(values) / GIB:.2f} GiB" if values else ""
    return f"{reason}: phase {beat.phase}, {beat.step} steps done{peak}"


# The record of a supervised run


class UnopenedError(UserError):
    """A run that ended before its ranks had opened its folder: there is nothing to record."""

    steps = 0

    def __init__(self, folder: Path, verdict: Ending, lines: Sequence[str]) -> None:
        self.status, self.pod = verdict.status or "failed", verdict.pod
        self.reason = verdict.reason or "it ended before the ranks had opened the run"
        line = f"{folder}: {self.status}: {self.reason}"
        if self.status == "interrupted":
            self.exit_status = INTERRUPTED
            super().__init__(line)
            return
        told = [OF_SCRIPT.match(each) for each in reversed(lines) if not SESSION_END.match(each)]
        if told and told[0] and verdict.status is None:
            # Ranks that were ended because another one refused also say so.
            said = [found[1] for found in told if found]
            super().__init__(next((each for each in said if not each.startswith(ENDED)), said[0]))
        else:
            super().__init__("\n".join([f"{line}; last lines of {LOG}:", *lines]) if lines else line)


def record_run(
    ranks: Ranks,
    verdict: Ending,
    log: RunLog,
    *,
    out_of_memory: frozenset[str | None] = frozenset(),
    is_certain: bool = False,
    restarts: int = 0,
) -> Record:
    """Write `record.json` of a run whose ranks have ended, and return it; `UnopenedError` where they never began.

    A process that holds the folder longer than a lease is out of reach; the supervisor's own lock keeps others out.

    Args:
        verdict: the supervisor's verdict, which `verdict_of_ranks` takes into account.
        restarts: number of times that the launch had restarted by itself.
    """
    folder = ranks.folder
    if not ranks.have_opened_the_run():
        raise UnopenedError(folder, verdict, log.tail(verdict.pod))
    deadline = time.monotonic() + LOCKED_SECONDS
    while is_held(folder / LOCK) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    with nullcontext() if is_held(folder / LOCK) else locked(folder):
        said = verdict_of_ranks(ranks, verdict, out_of_memory, is_certain=is_certain)
        lines = [] if said.status is None else log.tail(said.pod)
        record = compose_record(
            folder, status=said.status, reason=said.reason, pod=said.pod, last_lines=lines, restarts=restarts
        )
        write_record(folder, record)
    return record


def failure(folder: Path, record: Record) -> str:
    """Why a run ended without success, with the last lines that it wrote."""
    pod = f"{record.pod}: " if record.pod else ""
    lines = "\n".join(record.last_lines)
    return f"{folder}: {record.status}: {pod}{record.reason}; last lines of {LOG}:\n{lines}"
