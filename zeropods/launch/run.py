"""A training script on several pods: checked, supervised, recorded."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch import finished
from zeropods.launch.alone import LOG
from zeropods.launch.child import check_timeout, child_environment
from zeropods.launch.command import Launch, runner_argv, runner_environment
from zeropods.launch.ending import end_marked
from zeropods.launch.exported import RUN, write_environment
from zeropods.launch.follow import following
from zeropods.launch.heartbeat import Heartbeat
from zeropods.launch.outcome import UnopenedError, record_run
from zeropods.launch.output import Output
from zeropods.launch.planning import check_pods, plan_launch
from zeropods.launch.process import train_arguments
from zeropods.launch.ranks import Ranks
from zeropods.launch.standstill import Standstill, check_step_timeout
from zeropods.launch.supervise import supervise
from zeropods.measure.run_folder import LAUNCH_LOCK, locked
from zeropods.pods.hostfile import write_hostfile
from zeropods.pods.signals import ending_in_order
from zeropods.report.run import Run

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster
    from zeropods.pods.state import Pod


def launch(
    cluster: Cluster,
    script: str | Path = "textsql_train.py",
    *,
    pods: int | None = None,
    export: Sequence[str] = (),
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    restarts: int = 0,
    min_pods: int = 1,
    **flags: Any,
) -> Run:
    """Run a training script on the pods of a cluster, and return its run.

    A run that is finished already is returned as it is. Ctrl-C ends the run, which leaves its record.
    `UserError` says why it failed.

    Args:
        pods: on how many of them; all if not given.
        export: names of environment variables that the ranks need as they are here.
        timeout_seconds: a run that takes longer, from the launcher's start, is ended.
        step_timeout: seconds without a step, or a batch of an evaluation, after which a run is ended; derived from
            those that were seen if not given; 0: never.
        restarts: how often it may go on by itself with the pods that are left, where one is lost or a rank is killed.
        min_pods: on how few.
        flags: the script's flags, without their dashes; None leaves a flag out.
    """
    from zeropods.launch.again import Restarts
    from zeropods.launch.restart import run_restarting

    planned = plan_launch(cluster, script, train_arguments(**flags), pods=pods, export=export)
    wanted = Restarts(most=restarts, min_pods=min_pods)
    record = run_restarting(
        planned, cluster, wanted, export=export, timeout_seconds=timeout_seconds, step_timeout=step_timeout
    )
    if record["status"] != "ok":
        raise UserError(failure(planned.folder, record))
    return Run(planned.folder)


def run_launch(
    planned: Launch,
    cluster: Cluster,
    show: Callable[[str], object] = lambda line: None,
    argv: Callable[[Launch, Path], list[str]] = runner_argv,
    timeout_seconds: float | None = None,
    step_timeout: float | None = None,
    look: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Run it to its end, supervised, and return its record.

    Args:
        show: gets every line that the ranks write, from another thread.
        argv: makes the launcher's command from the launch and its hostfile.
        timeout_seconds: a run that takes longer, from the launcher's start, is ended.
        step_timeout: as `launch` has it.
        look: called some times a second, for as long as nothing has ended the run.
    """
    check_timeout(timeout_seconds)
    check_step_timeout(step_timeout)
    earlier = finished.record_of(planned)
    if earlier is not None:
        print(f"{planned.folder}: this run is finished; nothing to do", file=sys.stderr)
        return earlier
    with ending_in_order():
        check_pods(planned, cluster)
        run = secrets.token_hex(8)
        marked = replace(planned, exported={**planned.exported, RUN: run})
        chosen = cluster.pods[: len(planned.hosts)]
        with locked(planned.folder, LAUNCH_LOCK), Heartbeat(chosen, cluster.secret, run) as heartbeat:
            return _supervised(marked, cluster, chosen, heartbeat, show, argv, timeout_seconds, step_timeout, look)


def _supervised(
    planned: Launch,
    cluster: Cluster,
    pods: Sequence[Pod],
    heartbeat: Heartbeat,
    show: Callable[[str], object],
    argv: Callable[[Launch, Path], list[str]],
    timeout_seconds: float | None,
    step_timeout: float | None,
    look: Callable[[], object],
) -> dict[str, Any]:
    finished.remember(planned)
    ranks = Ranks(
        planned.folder, [pod.name for pod, host in zip(pods, planned.hosts, strict=True) for _ in range(host.slots)]
    )
    hostfile, variables = planned.folder / "launch.hostfile", planned.folder / "launch.environment"
    write_hostfile(hostfile, planned.hosts)
    write_environment(variables, planned.exported)
    names = {pod.address: pod.name for pod in pods}
    with following(planned.folder) as tick:
        verdict, output = supervise(
            argv(planned, hostfile),
            runner_environment(planned, variables, child_environment()),
            heartbeat,
            ranks,
            lambda pipe: Output(pipe, planned.folder / LOG, names, show),
            lambda: (look(), tick()),
            timeout_seconds,
            Standstill(planned.folder, ranks.pods, step_timeout, ranks.have_opened_the_run),
        )
    if cluster.network == "loopback":
        end_marked(heartbeat.run)
    if not ranks.have_opened_the_run():
        lines = output.tail(verdict.pod) or output.tail()
        reason = verdict.reason or "it ended before the ranks had opened the run"
        raise UnopenedError(planned.folder, verdict.status or "failed", reason, lines, LOG)
    return record_run(planned.folder, verdict, output, ranks, heartbeat.pods_out_of_memory(), planned.restarts)


def failure(folder: Path, record: dict[str, Any]) -> str:
    """Why a run ended without success, with the last lines that it wrote."""
    pod = f"{record['pod']}: " if record.get("pod") else ""
    lines = "\n".join(record.get("last_lines") or ())
    return f"{folder}: {record['status']}: {pod}{record['reason']}; last lines of {LOG}:\n{lines}"
