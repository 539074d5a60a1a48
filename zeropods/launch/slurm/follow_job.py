"""A job followed to its end: its log shown, its states told, ended when this process is asked to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zeropods.errors import UserError
from zeropods.launch.slurm.controller import SlurmError, cancel, look, node_names
from zeropods.launch.slurm.job import Job, verdict_of
from zeropods.launch.slurm.job_log import JobLog
from zeropods.launch.stacks import save_stacks
from zeropods.launch.standstill import Standstill
from zeropods.launch.verdict import Verdict, overdue

POLL_SECONDS = 0.5
"""Between two looks at the log; SLURM is asked less often the longer the job takes."""
LONGEST_SECONDS = 5.0
PATIENCE_SECONDS = 900.0
"""A controller may be away for so long, for a restart; the job goes on without it."""

HOPELESS = ("BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionTimeLimit")
"""Reasons of a job that waits for nothing that comes by itself (squeue(1))."""


class Follower:
    """Follows one job."""

    def __init__(
        self,
        number: int,
        log: JobLog,
        tell: Callable[[str], object],
        timeout_seconds: float | None,
        standstill: Standstill,
    ) -> None:
        """
        Args:
            tell: gets a line when the job's state changes.
            timeout_seconds: a job that has run for longer is cancelled; waiting does not count.
            standstill: watches the ranks' beats; a job that stands still is cancelled.
        """
        self.number = number
        self._log = log
        self._tell = tell
        self._timeout_seconds = timeout_seconds
        self._standstill = standstill
        self._began = self._heard = time.monotonic()
        self._told = ""
        self._running_since: float | None = None
        self._wish: Verdict | None = None

    def to_its_end(self, signals: Sequence[str], tick: Callable[[], object]) -> Verdict:
        """Wait until the job is over for good.

        Args:
            signals: names of signals that came; the first one cancels the job.
            tick: called some times a second.
        """
        asked = 0.0
        while True:
            now = time.monotonic()
            if self._must_end(signals) or now - asked >= min(LONGEST_SECONDS, (now - self._began) / 20):
                asked = now
                job, known = self._look()
                if known and (job is None or job.has_ended):
                    break
            self._log.read()
            tick()
            time.sleep(POLL_SECONDS)
        self._log.read()
        tick()
        return self._wish or self._of_slurm(job)

    def _look(self) -> tuple[Job | None, bool]:
        """The job, and whether SLURM answered at all."""
        try:
            job = look(self.number)
        except SlurmError as error:
            silent = time.monotonic() - self._heard
            if silent > PATIENCE_SECONDS:
                remedy = f"the job may still run: squeue --jobs {self.number}; the same launch follows it again"
                raise UserError(f"SLURM has not answered for {silent:.0f} s ({error}); {remedy}") from None
            return None, False
        self._heard = time.monotonic()
        if job is not None:
            self._note(job)
        return job, True

    def _note(self, job: Job) -> None:
        if job.nodes and not self._log.nodes:
            self._log.nodes = node_names(job.nodes)
        if job.state == "PENDING":
            # The next attempt may be on other nodes.
            self._log.nodes = ()
        if job.state == "RUNNING" and self._running_since is None:
            self._running_since = time.monotonic()
        if job.state == "PENDING" and job.reason in HOPELESS:
            self._end(Verdict("failed", f"job {job.number} cannot start as it was asked for: {job.reason}"))
        self._tell_once(job)

    def _tell_once(self, job: Job) -> None:
        why = f" ({job.reason})" if job.reason else ""
        where = f" on {job.nodes}" if job.nodes and job.state == "RUNNING" else ""
        line = f"job {job.number}: {job.state}{where}{why}{', again' if job.restarts else ''}"
        if self._told != line:
            self._told = line
            self._tell(line)

    def _must_end(self, signals: Sequence[str]) -> bool:
        """Cancel the job where it must end; whether it was cancelled just now."""
        if self._wish is not None:
            return False
        if signals:
            self._end(Verdict("interrupted", signals[0]))
        elif self._timeout_seconds is not None and self._seconds() > self._timeout_seconds:
            self._end(Verdict("timeout", overdue(self._timeout_seconds)))
        elif self._seconds() and (still := self._standstill.look()) is not None:
            save_stacks(self._standstill.folder, self._standstill.beats(), lambda: None, lambda process: False)
            self._end(still)
        return self._wish is not None

    def _end(self, why: Verdict) -> None:
        if self._wish is None:
            self._wish = why
            self._tell(f"job {self.number}: cancelled: {why.reason}")
            cancel(self.number)

    def _seconds(self) -> float:
        return 0.0 if self._running_since is None else time.monotonic() - self._running_since

    def _of_slurm(self, job: Job | None) -> Verdict:
        """The ranks' own word counts where SLURM has forgotten the job."""
        return Verdict(None, f"SLURM has forgotten job {self.number}") if job is None else verdict_of(job)
