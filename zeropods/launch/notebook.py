"""Launches for notebooks: each returns its run, or raises a `UserError` that says why the run
failed.

A run that is already finished is returned as it is. Ctrl-C ends the run, which still writes its
record. The script's flags are given without their dashes; None leaves a flag out.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from zeropods import files
from zeropods.errors import UserError
from zeropods.launch import command
from zeropods.launch.command import plan_alone, plan_launch, shell_line
from zeropods.launch.local import run_here, run_planned
from zeropods.launch.outcome import failure, written_at
from zeropods.launch.script_call import ScriptCall, train_arguments
from zeropods.launch.supervisor import Supervision, run_launch
from zeropods.measure.record import LAUNCH_LOCK
from zeropods.measure.run_folder import locked
from zeropods.pods.cluster import Cluster, workers_of
from zeropods.pods.gpus import HIDDEN, VISIBLE, has_too_few, own_gpus
from zeropods.pods.processes import Process, descendants, ending_in_order, send
from zeropods.programs import free_port, variable_set
from zeropods.report.run import Run
from zeropods.tables import counted
from zeropods.train.checkpoints import POINTER
from zeropods.train.flags import PROJECT


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
        outputdir: the run folder.
        timeout_seconds: a run that takes longer is ended.
        step_timeout: as in `Supervision`.
        flags: the script's other flags.
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
    replace_lost: bool = False,
    min_pods: int | None = None,
    **flags: Any,
) -> Run:
    """Run a training script on the pods of a cluster.

    Args:
        pods: number of the cluster's pods to use; all if not given.
        export: names of environment variables that the ranks need with the values they have here.
        timeout_seconds, step_timeout: as in `Supervision`.
        restarts: how many times the run may restart by itself on the pods left, if a pod is lost or
            a rank is killed.
        replace_lost: whether a new CML worker is started once for each that is lost, before the run
            restarts.
        min_pods: fewest pods for a restart, 1 if not given; if given, the run may also begin on so
            few if others are dead.
        flags: the script's flags.
    """
    call = ScriptCall.of(script, train_arguments(**flags))
    # An earlier launch may have replaced some of its pods.
    cluster = cluster.now()
    planned = plan_launch(cluster, call, pods=pods, export=export)
    supervision = Supervision(
        timeout_seconds=timeout_seconds,
        step_timeout=step_timeout,
        restarts=restarts,
        replace_lost=replace_lost,
        min_pods=min_pods,
    )
    record = run_launch(planned, cluster, supervision)
    if record.status != "ok":
        raise UserError(failure(planned.folder, record))
    return Run(planned.folder)


def command_line(
    cluster: Cluster | None = None,
    script: str | Path = "textsql_train.py",
    *,
    pods: int | None = None,
    **flags: Any,
) -> str:
    """The command that `train` runs with these flags or, given a cluster, `launch`, as text to
    paste into a shell.

    A command for pods works as it is pasted, and may be edited; but nothing supervises one over
    pdsh, and no record says what a lost pod cost.
    """
    call = ScriptCall.of(script, train_arguments(**flags))
    if cluster is None:
        return shell_line([sys.executable, str(call.script), *call.arguments])
    cluster = cluster.now()
    planned = plan_launch(cluster, call, pods=pods)
    return command.launch_line(planned, cluster, cluster.hostfile)


# Several runs on this machine, one after the other


def train_series(script: str | Path, runs: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Run one of our training scripts on this machine for each set of flags, one after the other,
    and return the runs in the same order, however they ended.

    A run that is already finished is returned as it is. One that fails, by running out of memory
    for instance, leaves a record that says so, and the next one begins. Where this machine has
    fewer GPUs than a run has processes, all runs of the series train without GPUs, so that they can
    be compared, and a line on stderr says so.

    Args:
        runs: flags of the script for each run, without their dashes, including `outputdir`, and
            `slots`, the number of processes, 1 if not given. None leaves a flag out.

    Raises:
        UserError: a run could not begin; the runs before it stay.
    """
    launches = []
    for flags in runs:
        folder = Path(flags["outputdir"]).resolve()
        arguments = train_arguments(**{**flags, "outputdir": folder, "slots": None})
        call = ScriptCall.of(script, arguments)
        launches.append(plan_alone(call, flags.get("slots", 1)))
    # A finished run is recognised without starting the script, which refuses a folder with another
    # finished run.
    waiting = []
    for planned in launches:
        is_known = command.remembered(planned.folder) == command.identity(planned)
        if not is_known or command.finished_record(planned) is None:
            waiting.append(planned)
    most_processes = max((planned.world_size for planned in waiting), default=0)
    with ending_in_order(), ExitStack() as stack:
        if has_too_few(most_processes):
            gpus = counted(own_gpus(), "visible GPU")
            print(
                f"{most_processes} processes for {gpus}: these runs train without GPUs",
                file=sys.stderr,
                flush=True,
            )
            stack.enter_context(variable_set(VISIBLE, HIDDEN))
        # All folders are locked first: a series that is refused one of them begins no run.
        for planned in waiting:
            stack.enter_context(locked(planned.folder, LAUNCH_LOCK))
        for planned in waiting:
            # A port that was free at the beginning may be in use by now.
            record = run_planned(replace(planned, master_port=free_port()))
            # The next call then need not start the script to learn that the run is finished.
            if record.status == "ok":
                command.remember(planned)
    return [Run(planned.folder) for planned in launches]


# Killing a pod of this machine in mid-run on purpose, to see that the run goes on.

FAULT = "fault.json"
"""File in the run folder that says which pod was killed, and when."""
CHECKPOINT_POLL_SECONDS = 0.05


@contextmanager
def pod_killed(cluster: Cluster, pod: str, folder: Path) -> Iterator[None]:
    """Inside the block, send SIGKILL to everything that runs on a local pod as soon as a run has a
    new complete checkpoint, and note that in the run folder.

    Nothing happens if the run is already finished, since it saves no checkpoint then.

        with pod_killed(cluster, "pod2", folder):
            launch(cluster, outputdir=folder, restarts=1, **flags)
    """
    names = [known.name for known in cluster.pods]
    if not cluster.backend_class.can_be_killed or pod not in names:
        where = f"{cluster.name}, on {cluster.backend}"
        raise UserError(f"pod {pod!r} of {where}; expected a local one: {names}")
    pointer = folder / "checkpoints" / POINTER
    block_is_over = threading.Event()
    written_before = written_at(pointer)

    def kill_after_a_checkpoint() -> None:
        while written_at(pointer) == written_before:
            if block_is_over.wait(CHECKPOINT_POLL_SECONDS):
                return
        now = time.time()
        kill_pod(cluster, pod)
        files.write_json(folder / FAULT, {"pod": pod, "killed_unix_seconds": now})

    thread = threading.Thread(target=kill_after_a_checkpoint, daemon=True)
    thread.start()
    try:
        yield
    finally:
        block_is_over.set()
        thread.join()


def kill_pod(cluster: Cluster, name: str) -> None:
    """Send SIGKILL to every process of a local pod at once, like a power cut: warden, agent, sshd,
    ranks. Nothing happens where the pod's warden has ended."""
    warden = warden_of(cluster, name)
    if warden is None:
        return
    for process in (warden, *descendants(warden.pid)):
        send(process, signal.SIGKILL)


def warden_of(cluster: Cluster, name: str) -> Process | None:
    """The warden of a local pod, which is the root of its process tree; None where it has ended."""
    worker_id = next(pod.worker for pod in cluster.pods if pod.name == name)
    records = workers_of(cluster).processes()
    record = next(record for record in records if record.id == worker_id)
    return record.find()


def left_over(folder: Path) -> int:
    """Number of processes on this machine that name a run folder on their command lines: launchers,
    ssh, ranks."""
    number = 0
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line:
            number += 1
    return number
