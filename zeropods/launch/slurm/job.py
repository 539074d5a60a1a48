"""A job as `scontrol show job --oneliner` prints it, and what its state means for a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zeropods.errors import UserError
from zeropods.launch.verdict import Verdict

ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
"""States of a job that does not come back (squeue(1)); a requeued one is PENDING."""
STATUSES = {
    "BOOT_FAIL": "pod_lost",
    "CANCELLED": "interrupted",
    "DEADLINE": "timeout",
    "NODE_FAIL": "pod_lost",
    "OUT_OF_MEMORY": "oom",
    "PREEMPTED": "interrupted",
    "TIMEOUT": "timeout",
}
"""A run's status by the job's state, where SLURM knows better than the ranks."""
SAVED = 75
"""EX_TEMPFAIL: the ranks were asked to save, and have; `slurm/job.sh` has not requeued the job."""
FIELD = re.compile(r"(?:^| )([A-Z][\w/:]*)=(\S*)")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What SLURM knows of a job at one moment."""

    number: int
    state: str
    reason: str | None
    """Why it waits, or why it ended."""
    exit_status: int
    """Of the batch script."""
    restarts: int
    nodes: str | None
    """A list as SLURM writes it, such as `pod[1-2]`; None while it has none."""
    time_limit: str | None

    @property
    def has_ended(self) -> bool:
        """Whether it is over for good."""
        return self.state in ENDED


def read_job(text: str) -> Job:
    """The job that scontrol's line tells of; `UserError` where it is no such line."""
    fields: dict[str, str] = {}
    for name, value in FIELD.findall(text):
        fields.setdefault(name, value)
    try:
        return Job(
            number=int(fields["JobId"]),
            state=fields["JobState"],
            reason=_given(fields["Reason"]),
            exit_status=int(fields["ExitCode"].partition(":")[0]),
            restarts=int(fields["Restarts"]),
            nodes=_given(fields["NodeList"]),
            time_limit=_given(fields["TimeLimit"]),
        )
    except (KeyError, ValueError):
        raise UserError(f"scontrol show job: {text[:200]!r}; expected a line with JobId, JobState, Reason...") from None


def verdict_of(job: Job) -> Verdict:
    """Why a job's run ended. Without a status, the ranks know better."""
    if job.state == "COMPLETED":
        return Verdict()
    of_job = f"SLURM's job {job.number}"
    if job.state == "TIMEOUT":
        return Verdict("timeout", f"{of_job}: TIMEOUT: its time limit was {job.time_limit}")
    why = f" ({job.reason})" if job.reason else ""
    if job.state in STATUSES:
        return Verdict(STATUSES[job.state], f"{of_job}: {job.state}{why}")
    if job.exit_status == SAVED:
        return Verdict("interrupted", f"{of_job}: saved when it was asked to, and was not requeued")
    return Verdict(None, f"{of_job}: {job.state} with status {job.exit_status}")


def _given(value: str) -> str | None:
    return None if value in ("", "(null)", "None", "N/A") else value
