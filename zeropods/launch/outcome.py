"""What is recorded of a supervised run: the ranks' own word, or what its supervisor saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeropods.launch.output import Output
from zeropods.launch.ranks import Ranks
from zeropods.launch.verdict import Verdict
from zeropods.measure.records import compose_record, first_failure, write_record
from zeropods.measure.run_folder import locked

UNSAID = "it was killed, or ended without saying why"


def record_run(folder: Path, verdict: Verdict, output: Output, ranks: Ranks) -> dict[str, Any]:
    """Write `record.json` of a run whose ranks have ended, and return it."""
    with locked(folder):
        final = verdict if verdict.status == "pod_lost" else _of_ranks(ranks, verdict)
        lines = [] if final.status is None else output.tail(final.pod) or output.tail()
        record = compose_record(folder, status=final.status, reason=final.reason, pod=final.pod, last_lines=lines)
        write_record(folder, record)
    return record


def _of_ranks(ranks: Ranks, verdict: Verdict) -> Verdict:
    """The verdict by what the ranks measured; without a status where all of them ended well.

    Where one pod lost its ranks first, what they say is the cause, and the errors of others follow from
    it. A rank that was interrupted is never a cause: nobody but the supervisor and its agents did that.
    """
    measured, pods = ranks.measured(), ranks.pods
    found = {rank["rank"] for rank in measured}
    missing = [rank for rank in range(len(pods)) if rank not in found]
    if not missing and all(rank["status"] == "ok" for rank in measured):
        return Verdict()
    here = [rank for rank in measured if verdict.pod in (None, pods[rank["rank"]])]
    cause = first_failure([rank for rank in here if rank["status"] != "interrupted"])
    if cause is not None:
        return Verdict(cause["status"], f"rank {cause['rank']}: {cause['reason']}", pods[cause["rank"]])
    if verdict.status is not None:
        return verdict
    unsaid = [rank for rank in missing if verdict.pod in (None, pods[rank])]
    if unsaid:
        reason = f"rank {unsaid[0]} left no measurement: {verdict.reason or UNSAID}"
        return Verdict("failed", reason, pods[unsaid[0]])
    return Verdict("failed", verdict.reason or "the launcher ended before the ranks", verdict.pod)
