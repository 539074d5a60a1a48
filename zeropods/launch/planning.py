"""A launch made from what a user asks for; everything that can be known to be wrong is refused here."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods import files
from zeropods.data.manifest import FILE as MANIFEST
from zeropods.errors import UserError
from zeropods.launch.command import (
    Launch,
    check_plain,
    exported_variables,
    find_script,
    flag_values,
    run_folder_of,
    typed_flags,
)
from zeropods.measure.record import Record, read_json, read_record
from zeropods.measure.run_folder import RECORD
from zeropods.pods.hostfile import Host
from zeropods.pods.this_pod import slots
from zeropods.programs import free_port
from zeropods.techniques import offloads_optimizer

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

PROJECT = Path(__file__).resolve().parents[2]
LAUNCH = "launch.json"
"""In the run folder: what was launched last."""


def plan_launch(
    cluster: Cluster,
    script: str | Path,
    arguments: Sequence[str],
    *,
    pods: int | None = None,
    export: Sequence[str] = (),
) -> Launch:
    """A launch over pdsh as data, with its arguments checked; starts nothing.

    Args:
        pods: on how many of the cluster's; all if not given.
        export: names of environment variables that the ranks need as they are here.
    """
    hosts = cluster.hosts[:pods]
    if pods is not None and len(hosts) != pods:
        raise UserError(f"--num-pods {pods}: {cluster.name} has {len(cluster.hosts)}; bring up as many")
    check_plain("working folder", Path.cwd())
    check_plain("Python", sys.executable)
    fixed = dict(cluster.environment)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None and cluster.shared_machine:
        # Pods of one machine share its cores.
        threads = str(max(1, len(os.sched_getaffinity(0)) // sum(host.slots for host in hosts)))
    if threads is not None:
        fixed["OMP_NUM_THREADS"] = threads
    over_ssh = {"ssh_config": cluster.ssh_config, "ssh_port": cluster.ssh_port, "export": tuple(export)}
    return plan_on(hosts, script, arguments, exported=exported_variables(export, fixed), **over_ssh)


def plan_alone(script: str | Path, arguments: Sequence[str], processes: int | None = None) -> Launch:
    """A launch on this machine alone as data, with its arguments checked; starts nothing.

    Args:
        processes: each slot of this machine has one if not given.
    """
    return plan_on((Host(socket.gethostname(), processes or slots()),), script, arguments, launcher="none")


def plan_on(hosts: tuple[Host, ...], script: str | Path, arguments: Sequence[str], **more: Any) -> Launch:
    """A launch on these hosts as data, with its arguments checked; `more`: further fields of `Launch`."""
    found = find_script(script, Path.cwd(), PROJECT)
    planned = Launch(
        script=found,
        arguments=tuple(arguments),
        folder=run_folder_of(arguments, Path.cwd(), found),
        hosts=hosts,
        master_port=free_port(),
        **more,
    )
    check_arguments(planned)
    return planned


def check_arguments(planned: Launch) -> None:
    """Refuse what can be seen to be wrong before anything starts.

    A script of ours would refuse its flags itself, after half a minute on every pod.
    """
    from zeropods.train.arguments import arguments_of
    from zeropods.train.deepspeed import check_config, read_config

    check_plain("script", planned.script)
    if planned.folder.exists() and not planned.folder.is_dir():
        raise UserError(f"{planned.folder}: is a file; choose another --outputdir")
    flags, kind = flag_values(planned.arguments), arguments_of(planned.script)
    typed = typed_flags(planned.script, planned.arguments)
    if flags.get("deepspeed") == "":
        raise UserError("--deepspeed: no value; expected a file like dsconfig/zero1.json")
    if "deepspeed" in flags:
        path = Path(flags["deepspeed"])
        known = {**typed, "world_size": planned.world_size}
        check_config(read_config(path), path, known, None if kind is None else kind.fp16_fault)


def check_pods(planned: Launch, cluster: Cluster) -> None:
    """Refuse to start where a pod lacks something."""
    from zeropods.pods.checks import Expectation
    from zeropods.pods.preflight import preflight, require
    from zeropods.train.deepspeed import read_config

    config = flag_values(planned.arguments).get("deepspeed")
    expected = Expectation.of_this_machine(
        Path.cwd(),
        (str(planned.script), *([config] if config else [])),
        master_port=planned.master_port,
        # What lies in main memory is stepped by CPU Adam, which has to be compiled.
        offload=config is not None and offloads_optimizer(read_config(Path(config))),
        cml=cluster.backend == "cml",
    )
    names = [pod.name for pod in cluster.pods[: len(planned.hosts)]]
    require(preflight(planned.hosts, expected, names=names, ssh_config=cluster.ssh_config, port=cluster.ssh_port))


# Whether a launch has been run to its end before: known without starting anything


def record_of(launch: Launch) -> Record | None:
    """The record of this very launch if it is finished; `UserError` if another finished run is there."""
    if not (launch.folder / RECORD).is_file():
        return None
    record = read_record(launch.folder)
    if record.status != "ok":
        return None
    before = remembered(launch.folder)
    if before == identity(launch):
        return record
    other = "that was not launched over pods" if before is None else "with other arguments or data"
    raise UserError(f"{launch.folder}: holds a finished run on {record.pods} pods {other}; choose another --outputdir")


def remember(launch: Launch) -> None:
    """Keep what was launched beside its record."""
    files.write_json(launch.folder / LAUNCH, identity(launch))


def remembered(folder: Path) -> dict[str, Any] | None:
    """The identity of what was launched last into a run folder; None where nothing was."""
    path = folder / LAUNCH
    return read_json(path) if path.is_file() else None


def identity(launch: Launch) -> dict[str, Any]:
    """What makes two launches the same run: not the port, nor the lease, nor what it has gone on with by itself."""
    launch = launch.asked or launch
    flags = flag_values(launch.arguments)
    config = Path(flags.get("deepspeed", ""))
    manifest = Path(flags.get("dataset_path", flags.get("data", ""))) / MANIFEST
    return {
        "script": str(launch.script),
        "arguments": list(launch.arguments),
        "pods": [host.slots for host in launch.hosts],
        "deepspeed": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
        "dataset": read_json(manifest).get("content_key") if manifest.is_file() else None,
    }
