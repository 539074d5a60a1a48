"""A training script on several pods: checked, supervised, recorded."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch import finished
from zeropods.launch.child import child_environment
from zeropods.launch.command import Launch, check_plain, runner_argv, runner_environment
from zeropods.launch.exported import RUN, exported_variables, write_environment
from zeropods.launch.flags import find_script, flag_values, run_folder_of, typed
from zeropods.launch.follow import following
from zeropods.launch.heartbeat import Heartbeat
from zeropods.launch.outcome import record_run
from zeropods.launch.output import Output
from zeropods.launch.process import LOG, train_arguments
from zeropods.launch.supervise import supervise
from zeropods.measure.records import read_json
from zeropods.measure.run_folder import CONFIG, LAUNCH_LOCK, locked
from zeropods.pods.hostfile import write_hostfile
from zeropods.report.run import Run

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

PROJECT = Path(__file__).resolve().parents[2]


def launch(
    cluster: Cluster,
    script: str | Path = "textsql_train.py",
    *,
    pods: int | None = None,
    export: Sequence[str] = (),
    **flags: Any,
) -> Run:
    """Run a training script on the pods of a cluster, and return its run.

    A run that is finished already is returned as it is. Ctrl-C ends the run, which leaves its record.
    `UserError` says why it failed.

    Args:
        pods: on how many of them; all if not given.
        export: names of environment variables that the ranks need as they are here.
        flags: the script's flags, without their dashes; None leaves a flag out.
    """
    planned = plan_launch(cluster, script, train_arguments(**flags), pods=pods, export=export)
    record = run_launch(planned, cluster)
    if record["status"] != "ok":
        raise UserError(failure(planned.folder, record))
    return Run(planned.folder)


def plan_launch(
    cluster: Cluster,
    script: str | Path,
    arguments: Sequence[str],
    *,
    pods: int | None = None,
    export: Sequence[str] = (),
) -> Launch:
    """A launch over pdsh as data, with its arguments checked; starts nothing."""
    here = Path.cwd()
    hosts = cluster.hosts[:pods]
    if pods is not None and len(hosts) != pods:
        raise UserError(f"--num-pods {pods}: {cluster.name} has {len(cluster.hosts)}; bring up as many")
    check_plain("working folder", here)
    check_plain("Python", sys.executable)
    planned = Launch(
        script=find_script(script, here, PROJECT),
        arguments=tuple(arguments),
        folder=run_folder_of(arguments, here),
        hosts=hosts,
        master_port=free_port(hosts[0].address if cluster.shared_machine else ""),
        ssh_config=cluster.ssh_config,
        ssh_port=cluster.ssh_port,
        exported=exported_variables(export, _fixed(cluster, sum(host.slots for host in hosts))),
    )
    check_arguments(planned)
    return planned


def uses_offload(config: str | None) -> bool:
    """Whether a DeepSpeed configuration keeps something in main memory, for which CPU Adam is needed."""
    from zeropods.train.deepspeed_config import read_config, technique

    return config is not None and technique(read_config(Path(config)), 1).endswith("_offload")


def check_arguments(planned: Launch) -> None:
    """Refuse what can be seen to be wrong before anything starts."""
    from zeropods.train.deepspeed_config import check_config, read_config

    check_plain("script", planned.script)
    flags = flag_values(planned.arguments)
    if flags.get("deepspeed"):
        path = Path(flags["deepspeed"])
        check_config(read_config(path), path, {**typed(flags), "world_size": planned.world_size})


def run_launch(
    planned: Launch,
    cluster: Cluster,
    show: Callable[[str], object] = lambda line: None,
    argv: Callable[[Launch, Path], list[str]] = runner_argv,
) -> dict[str, Any]:
    """Run it to its end, supervised, and return its record.

    Args:
        show: gets every line that the ranks write, from another thread.
        argv: makes the launcher's command from the launch and its hostfile.
    """
    earlier = finished.record_of(planned)
    if earlier is not None:
        print(f"{planned.folder}: this run is finished; nothing to do", file=sys.stderr)
        return earlier
    _check_pods(planned, cluster)
    run = secrets.token_hex(8)
    marked = replace(planned, exported={**planned.exported, RUN: run})
    chosen = cluster.pods[: len(planned.hosts)]
    with locked(planned.folder, LAUNCH_LOCK), Heartbeat(chosen, cluster.secret, run) as heartbeat:
        return _supervised(marked, cluster, heartbeat, show, argv)


def _supervised(
    planned: Launch,
    cluster: Cluster,
    heartbeat: Heartbeat,
    show: Callable[[str], object],
    argv: Callable[[Launch, Path], list[str]],
) -> dict[str, Any]:
    before = _stamp(planned.folder)
    names = {pod.address: pod.name for pod in cluster.pods}
    with _files(planned) as (hostfile, variables), following(planned.folder) as tick:
        verdict, output = supervise(
            argv(planned, hostfile),
            runner_environment(planned, variables, child_environment()),
            heartbeat,
            lambda pipe: Output(pipe, planned.folder / LOG, names, show),
            tick,
        )
    if _stamp(planned.folder) == before:
        lines = "\n".join(output.tail(verdict.pod) or output.tail())
        reason = verdict.reason or "it ended before the ranks had opened the run"
        raise UserError(f"{planned.folder}: {verdict.status or 'failed'}: {reason}; last lines:\n{lines}")
    record = record_run(planned.folder, verdict, output, planned.hosts, names)
    finished.remember(planned)
    return record


@contextmanager
def _files(planned: Launch) -> Iterator[tuple[Path, Path]]:
    """The hostfile and the environment file that the launcher reads, for as long as it runs."""
    with TemporaryDirectory(prefix="zeropods-run-") as folder:
        hostfile, variables = Path(folder) / "hostfile", Path(folder) / "environment"
        write_hostfile(hostfile, planned.hosts)
        write_environment(variables, planned.exported)
        yield hostfile, variables


def failure(folder: Path, record: dict[str, Any]) -> str:
    """Why a run ended without success, with the last lines that it wrote."""
    pod = f"{record['pod']}: " if record.get("pod") else ""
    lines = "\n".join(record.get("last_lines") or ())
    return f"{folder}: {record['status']}: {pod}{record['reason']}; last lines:\n{lines}"


def _check_pods(planned: Launch, cluster: Cluster) -> None:
    """Refuse to start where a pod lacks something."""
    from zeropods.pods.preflight.expectation import Expectation
    from zeropods.pods.preflight.preflight import preflight, require

    config = flag_values(planned.arguments).get("deepspeed")
    expected = Expectation.of_this_machine(
        Path.cwd(),
        (str(planned.script), *([config] if config else [])),
        master_port=planned.master_port,
        offload=uses_offload(config),
        cml=cluster.backend == "cml",
    )
    names = [pod.name for pod in cluster.pods[: len(planned.hosts)]]
    require(preflight(planned.hosts, expected, names=names, ssh_config=cluster.ssh_config, port=cluster.ssh_port))


def _fixed(cluster: Cluster, ranks: int) -> dict[str, str]:
    """What ranks need whatever the user has set: pods of one machine share its cores."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None and cluster.shared_machine:
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {**cluster.environment, **({} if threads is None else {"OMP_NUM_THREADS": threads})}


def free_port(address: str) -> int:
    """A port on which nothing listens at this moment; an empty address stands for all of this machine's."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _stamp(folder: Path) -> tuple[int, Any] | None:
    """What changes when the ranks open the run."""
    path = folder / CONFIG
    return (path.stat().st_mtime_ns, read_json(path).get("attempt")) if path.is_file() else None
