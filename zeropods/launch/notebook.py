"""Launches as a notebook calls them: each returns its run, or raises `UserError` that says why it failed.

A run that is finished already is returned as it is. Ctrl-C ends the run, which leaves its record. The script's flags
are given without their dashes; None leaves a flag out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch.command import train_arguments
from zeropods.launch.local import run_here
from zeropods.launch.outcome import failure
from zeropods.launch.planning import PROJECT, plan_launch
from zeropods.launch.restart import Restarts
from zeropods.launch.slurm import plan_slurm, run_slurm
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.measure.record import Record
from zeropods.report.run import Run

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster


def train(
    script: str | Path = PROJECT / "textsql_train.py",
    *,
    outputdir: str | Path,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    **flags: Any,
) -> Run:
    """Run a training script on this pod, in one process of its own.

    Args:
        timeout_seconds: a run that takes longer is ended.
        step_timeout: as `Supervision` has it.
    """
    folder = Path(outputdir).resolve()
    argv = [sys.executable, str(script), *train_arguments(outputdir=folder, **flags)]
    run_here(argv, folder, timeout_seconds, step_timeout)
    return Run(folder)


def launch(
    cluster: Cluster,
    script: str | Path = "textsql_train.py",
    *,
    pods: int | None = None,
    export: tuple[str, ...] = (),
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
    min_pods: int = 1,
    **flags: Any,
) -> Run:
    """Run a training script on the pods of a cluster.

    Args:
        pods: on how many of them; all if not given.
        export: names of environment variables that the ranks need as they are here.
        timeout_seconds, step_timeout: as `Supervision` has them.
        restarts: how often it may go on by itself with the pods that are left, where one is lost or a rank is killed.
        min_pods: on how few.
    """
    planned = plan_launch(cluster, script, train_arguments(**flags), pods=pods, export=export)
    supervision = Supervision(timeout_seconds=timeout_seconds, step_timeout=step_timeout)
    record = run_launch(planned, cluster, Restarts(most=restarts, min_pods=min_pods), supervision)
    return _run(planned.folder, record)


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
    """Run a training script as a SLURM job.

    Args:
        pods: nodes of the job.
        slots: processes per node, each with a GPU where the cluster has them.
        partition, time_limit, account: as sbatch takes them.
        options: further options of sbatch.
        timeout_seconds: a job that has run for longer is cancelled.
        step_timeout: as `Supervision` has it.
    """
    submission = plan_slurm(
        script, train_arguments(**flags), pods=pods, slots=slots, partition=partition, time_limit=time_limit,
        account=account, options=options,
    )  # fmt: skip
    record = run_slurm(submission, Supervision(timeout_seconds=timeout_seconds, step_timeout=step_timeout))
    return _run(submission.launch.folder, record)


def _run(folder: Path, record: Record) -> Run:
    if record.status != "ok":
        raise UserError(failure(folder, record))
    return Run(folder)
