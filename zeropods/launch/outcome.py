"""What is recorded of a supervised run: the ranks' own word, or what its supervisor saw."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from zeropods.errors import UserError
from zeropods.launch.heartbeat import LEASE_SECONDS
from zeropods.launch.out_of_memory import killed_for_memory
from zeropods.launch.ranks import Ranks
from zeropods.launch.verdict import Verdict
from zeropods.measure.records import compose_record, first_failure, write_record
from zeropods.measure.run_folder import LOCK, is_held, locked

PATIENCE_SECONDS, POLL_SECONDS = 5.0, 0.2
UNSAID = "it was killed, or ended without saying why"
NEVER_A_CAUSE = {"timeout": ("interrupted", "failed")}
"""By the supervisor's verdict, what ranks say because of it: those that are ended later miss the others."""


class Written(Protocol):
    """What the ranks wrote."""

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines, of one pod if it is named."""


class UnopenedError(UserError):
    """A run that ended before its ranks had opened its folder: there is nothing to record."""

    def __init__(self, folder: Path, status: str, reason: str, lines: list[str], log: str) -> None:
        super().__init__("\n".join([f"{folder}: {status}: {reason}; last lines of {log}:", *lines]))
        self.status = status
        self.reason = reason


def record_run(
    folder: Path,
    verdict: Verdict,
    output: Written,
    ranks: Ranks,
    out_of_memory: frozenset[str] = frozenset(),
    restarts: int = 0,
) -> dict[str, Any]:
    """Write `record.json` of a run whose ranks have ended, and return it.

    Rank 0 of a pod that was lost may live on until its lease runs out, and hold `run.lock` so long. What
    holds it longer is out of reach; the supervisor's own lock still keeps others out.

    Args:
        out_of_memory: pods where the kernel has ended a process for want of memory.
        restarts: how often the launch had gone on by itself.
    """
    return record_final(folder, lambda: of_ranks(ranks, verdict, out_of_memory), output, restarts)


def record_final(folder: Path, final: Callable[[], Verdict], output: Written, restarts: int = 0) -> dict[str, Any]:
    """`record_run` with a verdict that is asked for once the ranks have let go of the folder."""
    await_lock(folder, LEASE_SECONDS + PATIENCE_SECONDS)
    with nullcontext() if is_held(folder / LOCK) else locked(folder):
        said = final()
        lines = [] if said.status is None else output.tail(said.pod) or output.tail()
        record = compose_record(folder, status=said.status, reason=said.reason, pod=said.pod, last_lines=lines)
        record["restarts"] = restarts
        write_record(folder, record)
    return record


def await_lock(folder: Path, seconds: float) -> None:
    """Wait until rank 0, which has ended or will, holds a run folder no longer; at most so long."""
    deadline = time.monotonic() + seconds
    while is_held(folder / LOCK) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def of_ranks(ranks: Ranks, verdict: Verdict, out_of_memory: frozenset[str] = frozenset()) -> Verdict:
    """The verdict by what the ranks measured; without a status where all of them ended well, whatever came after.

    Where one pod lost its ranks first, what they say is the cause, and the errors of others follow from
    it. A rank that was interrupted is never a cause: nobody but the supervisor and its agents did that. A rank
    that left nothing, on a pod where the kernel has ended a process for want of memory, is that process.
    """
    measured, pods = ranks.measured(), ranks.pods
    found = {rank["rank"] for rank in measured}
    missing = [rank for rank in range(len(pods)) if rank not in found]
    if not missing and all(rank["status"] == "ok" for rank in measured):
        return Verdict()
    if verdict.status == "pod_lost":
        return verdict
    unsaid = [rank for rank in missing if verdict.pod in (None, pods[rank])]
    killed = next((rank for rank in unsaid if pods[rank] in out_of_memory), None)
    if killed is not None and verdict.status is None:
        return Verdict("oom", killed_for_memory(ranks.folder, killed), pods[killed])
    here = [rank for rank in measured if verdict.pod in (None, pods[rank["rank"]])]
    follows = NEVER_A_CAUSE.get(verdict.status or "", ("interrupted",))
    cause = first_failure([rank for rank in here if rank["status"] not in follows])
    if cause is not None:
        return Verdict(cause["status"], f"rank {cause['rank']}: {cause['reason']}", pods[cause["rank"]])
    if verdict.status is not None:
        return verdict
    if unsaid:
        reason = f"rank {unsaid[0]} left no measurement: {verdict.reason or UNSAID}"
        return Verdict("failed", reason, pods[unsaid[0]])
    return Verdict("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)
