"""A training script as a SLURM job: planned, submitted, followed, recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropods import files
from zeropods.errors import UserError
from zeropods.launch import planning
from zeropods.launch.child import check_timeout, child_environment
from zeropods.launch.command import Launch, find_script, run_folder_of
from zeropods.launch.hangs import Standstill, check_step_timeout
from zeropods.launch.local import LOG, following, train_arguments
from zeropods.launch.outcome import Ranks, UnopenedError, Verdict, of_ranks, record_final
from zeropods.launch.planning import PROJECT, check_arguments
from zeropods.launch.slurm_job import Follower, JobLog, SlurmError, look, offer, submit
from zeropods.launch.supervisor import failure, noted_signals
from zeropods.measure.record import Record, read_json
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.hostfile import Host
from zeropods.report.run import Run

# A launch as a SLURM job: sbatch's command and its environment, as data.

SBATCH_FILE = PROJECT / "slurm" / "train.sbatch"
OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_")
"""Beginnings of names that describe the job in which this process itself runs, if it does: not the new one's."""
KEPT = ("SLURM_CONF",)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job of SLURM: a launch, and what it asks the cluster for."""

    launch: Launch
    """Its hosts are placeholders: SLURM chooses the nodes."""
    partition: str | None = None
    time_limit: str | None = None
    """As sbatch takes it: minutes, `hours:minutes:seconds`, `days-hours`."""
    account: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as `--qos=high`; they come last and win."""
    cpus_per_slot: int = 4
    has_gpus: bool = True
    """Whether the cluster's nodes have GPUs, of which each slot gets one."""

    @property
    def slots(self) -> int:
        """Processes a node."""
        return self.launch.hosts[0].slots

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run` prints."""
        of_launch = {
            name: value for name, value in self.launch.to_json().items() if name not in ("hosts", "master_port")
        }
        nodes = {"pods": len(self.launch.hosts), "slots": self.slots}
        return {**of_launch, **nodes, "argv": sbatch_argv(self), "exported": job_variables(self)}


def sbatch_argv(submission: Submission) -> list[str]:
    """The command that submits the job; what it prints is the job's number."""
    launch = submission.launch
    named = {"partition": submission.partition, "time": submission.time_limit, "account": submission.account}
    return [
        *("sbatch", "--parsable"),
        f"--job-name=zeropods-{_plain(launch.folder.name)}",
        f"--nodes={len(launch.hosts)}",
        f"--cpus-per-task={submission.cpus_per_slot * submission.slots}",
        f"--gpus-per-node={submission.slots if submission.has_gpus else 0}",
        f"--output={_literal(str(launch.folder / LOG))}",
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        *submission.options,
        str(SBATCH_FILE),
        str(launch.script),
        *launch.arguments,
    ]


def job_variables(submission: Submission) -> dict[str, str]:
    """The parameters of `slurm/job.sh` that this launch sets."""
    return {
        "PROJECT": str(PROJECT),
        "PYTHON": sys.executable,
        "SLOTS": str(submission.slots),
        "MEMORY_LOG": str(submission.launch.folder / "nvidia-smi"),
    }


def job_environment(submission: Submission, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of sbatch, which becomes the job's."""
    here = {name: value for name, value in environment.items() if name in KEPT or not name.startswith(OF_A_JOB)}
    return {**here, **job_variables(submission)}


def _plain(name: str) -> str:
    return "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "-" for c in name)


def _literal(path: str) -> str:
    """A path in which sbatch replaces nothing."""
    return path.replace("%", "%%")


# A training script as a SLURM job: planned, submitted, followed, recorded.

JOB = "slurm.json"
"""In the run folder: the job that was submitted last, and what the folder said before."""


def launch_slurm(
    script: str | Path = "textsql_train.py",
    *,
    pods: int = 1,
    slots: int = 1,
    partition: str | None = None,
    time_limit: str | None = None,
    account: str | None = None,
    options: tuple[str, ...] = (),
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    **flags: Any,
) -> Run:
    """Run a training script as a SLURM job and return its run; `UserError` says why it failed.

    A run that is finished already is returned as it is. Ctrl-C cancels the job, which leaves its record.

    Args:
        pods: nodes of the job.
        slots: processes a node, each with a GPU where the cluster has them.
        partition, time_limit, account: as sbatch takes them.
        options: further options of sbatch.
        timeout_seconds: a job that has run for longer is cancelled.
        step_timeout: as `launch.run.launch` has it.
        flags: the script's flags, without their dashes; None leaves a flag out.
    """
    submission = plan_slurm(
        script, train_arguments(**flags), pods=pods, slots=slots, partition=partition, time_limit=time_limit,
        account=account, options=options,
    )  # fmt: skip
    record = run_slurm(submission, timeout_seconds=timeout_seconds, step_timeout=step_timeout)
    if record.status != "ok":
        raise UserError(failure(submission.launch.folder, record))
    return Run(submission.launch.folder)


def plan_slurm(
    script: str | Path,
    arguments: list[str],
    *,
    pods: int = 1,
    slots: int = 1,
    partition: str | None = None,
    has_gpus: bool | None = None,
    **asked: Any,
) -> Submission:
    """A job as data, with the script's arguments checked; starts nothing.

    Args:
        has_gpus: whether the partition's nodes have GPUs; SLURM is asked where it is None.
        asked: further fields of `Submission`.
    """
    here = Path.cwd()
    if min(pods, slots, asked.get("cpus_per_slot", 1)) < 1:
        raise UserError(f"{pods} nodes of {slots} slots and their CPUs; expected at least 1 of each")
    found = find_script(script, here, PROJECT)
    launch = Launch(
        script=found,
        arguments=tuple(arguments),
        folder=run_folder_of(arguments, here, found),
        hosts=tuple(Host(f"node{number}", slots) for number in range(pods)),
        # `slurm/job.sh` chooses it from the job's number.
        master_port=0,
        launcher="slurm",
    )
    check_arguments(launch)
    if has_gpus is None:
        nodes, has_gpus = offer(partition)
        if 0 < nodes < pods:
            raise UserError(f"{pods} nodes: SLURM has {nodes} of {partition or 'all partitions'}; ask for fewer")
    return Submission(launch=launch, partition=partition, has_gpus=has_gpus, **asked)


def run_slurm(
    submission: Submission,
    show: Callable[[str], object] = lambda line: None,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
) -> Record:
    """Submit the job, follow it to its end, and return the run's record.

    A job of this launch that still waits or runs, because its follower was killed, is followed instead.

    Args:
        show: gets every line that the job writes, and what becomes of it.
        timeout_seconds: a job that has run for longer is cancelled; waiting does not count.
        step_timeout: as `launch.run.launch` has it.
    """
    check_timeout(timeout_seconds)
    check_step_timeout(step_timeout)
    launch = submission.launch
    earlier = planning.record_of(launch)
    if earlier is not None:
        print(f"{launch.folder}: this run is finished; nothing to do", file=sys.stderr)
        return earlier
    with locked(launch.folder, LAUNCH_LOCK), noted_signals() as signals:
        ranks = Ranks(launch.folder, [""] * launch.world_size)
        log = JobLog(launch.folder / LOG, show)
        number = _running(launch, ranks) or _submitted(submission, ranks, show)
        standstill = Standstill(launch.folder, (), step_timeout, ranks.have_opened_the_run)
        with following(launch.folder) as tick:
            verdict = Follower(number, log, show, timeout_seconds, standstill).to_its_end(signals, tick)
        ranks.pods = tuple(node for node in log.nodes or [""] * len(launch.hosts) for _ in range(submission.slots))
        return _recorded(launch.folder, verdict, log, ranks)


def _submitted(submission: Submission, ranks: Ranks, show: Callable[[str], object]) -> int:
    folder = submission.launch.folder
    number = submit(sbatch_argv(submission), job_environment(submission, child_environment()))
    planning.remember(submission.launch)
    files.write_json(folder / JOB, {"job": number, "config_before": ranks.before})
    show(f"job {number}: submitted; its log: {folder / LOG}")
    return number


def _running(launch: Launch, ranks: Ranks) -> int | None:
    """The job of this folder that is not over yet; `UserError` where it is of another launch."""
    path = launch.folder / JOB
    if not path.is_file():
        return None
    submitted = read_json(path)
    number = submitted["job"]
    job = look(number)
    if job is None or job.has_ended:
        return None
    if planning.remembered(launch.folder) != planning.identity(launch):
        remedy = f"scancel {number}, or choose another --outputdir"
        raise SlurmError(f"{launch.folder}: job {number} runs into it with other arguments; {remedy}")
    ranks.before = submitted["config_before"]
    return number


def _recorded(folder: Path, verdict: Verdict, log: JobLog, ranks: Ranks) -> Record:
    if not ranks.have_opened_the_run():
        reason = verdict.reason or "it ended before the ranks had opened the run"
        raise UnopenedError(folder, verdict.status or "failed", reason, log.tail(), LOG)
    return record_final(folder, lambda: _final(ranks, verdict), log)


def _final(ranks: Ranks, verdict: Verdict) -> Verdict:
    """What SLURM says of the job's end counts; the ranks fail because of it, unless all were done before."""
    measured = ranks.measured()
    done = len(measured) == len(ranks.pods) and all(rank.status == "ok" for rank in measured)
    return verdict if verdict.status is not None and not done else of_ranks(ranks, verdict)
