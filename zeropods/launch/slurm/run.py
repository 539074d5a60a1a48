"""A training script as a SLURM job: planned, submitted, followed, recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.errors import UserError
from zeropods.launch import finished
from zeropods.launch.alone import LOG
from zeropods.launch.child import check_timeout, child_environment
from zeropods.launch.command import Launch
from zeropods.launch.flags import find_script, run_folder_of
from zeropods.launch.follow import following
from zeropods.launch.outcome import UnopenedError, of_ranks, record_final
from zeropods.launch.planning import PROJECT, check_arguments
from zeropods.launch.process import train_arguments
from zeropods.launch.ranks import Ranks
from zeropods.launch.run import failure
from zeropods.launch.slurm.controller import SlurmError, look, offer, submit
from zeropods.launch.slurm.follow_job import Follower
from zeropods.launch.slurm.job_log import JobLog
from zeropods.launch.slurm.submission import Submission, job_environment, sbatch_argv
from zeropods.launch.standstill import Standstill, check_step_timeout
from zeropods.launch.supervise import noted_signals
from zeropods.launch.verdict import Verdict
from zeropods.measure.records import read_json
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.hostfile import Host
from zeropods.report.run import Run

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
    if record["status"] != "ok":
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
) -> dict[str, Any]:
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
    earlier = finished.record_of(launch)
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
    finished.remember(submission.launch)
    atomic.write_json(folder / JOB, {"job": number, "config_before": ranks.before})
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
    if finished.remembered(launch.folder) != finished.identity(launch):
        remedy = f"scancel {number}, or choose another --outputdir"
        raise SlurmError(f"{launch.folder}: job {number} runs into it with other arguments; {remedy}")
    ranks.before = submitted["config_before"]
    return number


def _recorded(folder: Path, verdict: Verdict, log: JobLog, ranks: Ranks) -> dict[str, Any]:
    if not ranks.have_opened_the_run():
        reason = verdict.reason or "it ended before the ranks had opened the run"
        raise UnopenedError(folder, verdict.status or "failed", reason, log.tail(), LOG)
    return record_final(folder, lambda: _final(ranks, verdict), log)


def _final(ranks: Ranks, verdict: Verdict) -> Verdict:
    """What SLURM says of the job's end counts; the ranks fail because of it, unless all were done before."""
    measured = ranks.measured()
    done = len(measured) == len(ranks.pods) and all(rank["status"] == "ok" for rank in measured)
    return verdict if verdict.status is not None and not done else of_ranks(ranks, verdict)
