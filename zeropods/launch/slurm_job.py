"""A SLURM job: what is asked of SLURM, its states, its log, followed to its end."""

from __future__ import annotations

import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.hangs import Standstill, save_stacks
from zeropods.launch.outcome import Verdict, overdue
from zeropods.launch.supervisor import LAST_LINES

# A job as `scontrol show job --oneliner` prints it, and what its state means for a run.

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


# What is asked of SLURM, through its own commands.

ANSWER_SECONDS = 60.0
"""SLURM's own commands wait some 10 to 30 s for a controller that does not answer."""
UNKNOWN_JOB = "Invalid job id"
"""What SLURM says of a job that ended MinJobAge (300 s) ago, or never was."""
NO_CLUSTER = "Could not establish a configuration source"
"""What SLURM's commands say where nobody has configured it."""


class SlurmError(UserError):
    """SLURM refused, or did not answer."""


def submit(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Submit a job and return its number; `SlurmError` with sbatch's own words where it is rejected."""
    said = _ask(argv, environment)
    # NUMBER, or NUMBER;CLUSTER.
    number = said.strip().partition(";")[0]
    if not number.isdigit():
        raise SlurmError(f"sbatch: {said!r}; expected the number of a job")
    return int(number)


def look(number: int) -> Job | None:
    """A job as it is now; None for one that SLURM does not know, or not any more."""
    try:
        return read_job(_ask(["scontrol", "--oneliner", "show", "job", str(number)]))
    except SlurmError as error:
        if UNKNOWN_JOB in str(error):
            return None
        raise


def cancel(number: int) -> None:
    """End a job: SIGTERM to its ranks, SIGKILL after SLURM's KillWait."""
    _ask(["scancel", str(number)])


def node_names(nodes: str) -> list[str]:
    """The names in a list as SLURM writes it, in the order of a job's tasks."""
    return _ask(["scontrol", "show", "hostnames", nodes]).split()


def offer(partition: str | None) -> tuple[int, bool]:
    """How many nodes a partition has, or all of them, and whether any has GPUs that jobs can ask for."""
    chosen = [] if partition is None else [f"--partition={partition}"]
    lines = _ask(["sinfo", "--noheader", "--format=%D %G", *chosen]).splitlines()
    return sum(int(line.split()[0]) for line in lines), any("gpu" in line for line in lines)


def _ask(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    program = argv[0]
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS, check=False,
            # A terminal's Ctrl-C is this process's own affair.
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        remedy = "run this where SLURM's commands are, or take --launcher pdsh"
        raise SlurmError(f"{program}: not on PATH; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{program}: no answer within {ANSWER_SECONDS:.0f} s; see scontrol ping") from None
    if done.returncode != 0:
        words = _words(program, done.stderr or done.stdout) or f"{program}: status {done.returncode}"
        remedy = "; run this where SLURM is configured (slurm.conf), or take --launcher pdsh"
        raise SlurmError(words + (remedy if NO_CLUSTER in words else ""))
    return done.stdout


def _words(program: str, said: str) -> str:
    """A command's complaint on one line; it puts its own name before each of its lines."""
    lines = [line.removeprefix(f"{program}: ").removeprefix("error: ") for line in said.splitlines() if line.strip()]
    return f"{program}: {'; '.join(lines)}" if lines else ""


# The log that a job's nodes write, read while it grows.

LABEL = re.compile(r" *(\d+): ?")
"""What `srun --label` puts before each line: the task's number, padded to the width of the largest."""


class JobLog:
    """The lines that were added since this was made; a task's number becomes its node's name."""

    def __init__(self, path: Path, show: Callable[[str], object]) -> None:
        """`show` gets every line."""
        self.nodes: Sequence[str] = ()
        """Names of the job's nodes, in the order of its tasks, once they are known."""
        self._path = path
        self._show = show
        self._offset = path.stat().st_size if path.is_file() else 0
        self._last: deque[str] = deque(maxlen=200)

    def read(self) -> None:
        """Take up the complete lines that are new."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode("utf-8", "replace").split("\n") if newline else ():
            self._last.append(self._named(line))
            # A terminal that is gone ends no run.
            with suppress(OSError):
                self._show(self._last[-1])

    def tail(self, pod: str | None = None) -> list[str]:
        """The last lines, of one node if it is named."""
        chosen = [line for line in self._last if pod is None or line.startswith(f"{pod}: ")]
        return chosen[-LAST_LINES:]

    def _named(self, line: str) -> str:
        match = LABEL.match(line)
        if match is None or int(match[1]) >= len(self.nodes):
            return line
        return f"{self.nodes[int(match[1])]}: {line[match.end() :]}"


# A job followed to its end: its log shown, its states told, ended when this process is asked to end.

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
