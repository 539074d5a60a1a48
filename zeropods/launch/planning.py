"""A launch made from what a user asks for; everything that can be known to be wrong is refused here."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from zeropods.errors import UserError
from zeropods.launch.command import Launch, check_plain
from zeropods.launch.exported import exported_variables
from zeropods.launch.flags import find_script, flag_values, run_folder_of, typed
from zeropods.pods.hostfile import Host
from zeropods.pods.this_pod import slots
from zeropods.ports import free_port

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster
    from zeropods.train.run_arguments import RunArguments

PROJECT = Path(__file__).resolve().parents[2]


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
    found = find_script(script, here, PROJECT)
    planned = Launch(
        script=found,
        arguments=tuple(arguments),
        folder=run_folder_of(arguments, here, found),
        hosts=hosts,
        master_port=free_port(),
        ssh_config=cluster.ssh_config,
        ssh_port=cluster.ssh_port,
        exported=exported_variables(export, _fixed(cluster, sum(host.slots for host in hosts))),
    )
    check_arguments(planned)
    return planned


def plan_alone(script: str | Path, arguments: Sequence[str]) -> Launch:
    """A launch on this machine alone as data, with its arguments checked; starts nothing."""
    here = Path.cwd()
    found = find_script(script, here, PROJECT)
    planned = Launch(
        script=found,
        arguments=tuple(arguments),
        folder=run_folder_of(arguments, here, found),
        hosts=(Host(socket.gethostname(), slots()),),
        master_port=free_port(),
        launcher="none",
    )
    check_arguments(planned)
    return planned


def check_arguments(planned: Launch) -> None:
    """Refuse what can be seen to be wrong before anything starts."""
    from zeropods.train.deepspeed_config import check_config, read_config
    from zeropods.train.flags import read_flags
    from zeropods.train.scripts import arguments_of

    check_plain("script", planned.script)
    if planned.folder.exists() and not planned.folder.is_dir():
        raise UserError(f"{planned.folder}: is a file; choose another --outputdir")
    flags = flag_values(planned.arguments)
    kind = arguments_of(planned.script)
    if kind is not None:
        _check_names(kind, flags)
    if flags.get("deepspeed") == "":
        raise UserError("--deepspeed: no value; expected a file like dsconfig/zero1.json")
    if "deepspeed" in flags:
        path = Path(flags["deepspeed"])
        known = typed(flags) if kind is None else read_flags(kind, planned.arguments)
        fp16_fault = None if kind is None else kind.fp16_fault
        check_config(read_config(path), path, {**known, "world_size": planned.world_size}, fp16_fault)


def _check_names(kind: type[RunArguments], flags: dict[str, str]) -> None:
    """Refuse a flag that our own script does not know; it would say so itself, after half a minute on every pod."""
    from zeropods.train.scripts import unknown_flag

    known = [field.name for field in fields(kind)]
    for name in flags:
        fault = unknown_flag(kind, name.replace("-", "_"), known)
        if fault is not None:
            raise UserError(f"--{name}: {fault}")


def check_pods(planned: Launch, cluster: Cluster) -> None:
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


def uses_offload(config: str | None) -> bool:
    """Whether a DeepSpeed configuration keeps something in main memory, for which CPU Adam is needed."""
    from zeropods.train.deepspeed_config import read_config, technique

    return config is not None and technique(read_config(Path(config)), 1).endswith("_offload")


def _fixed(cluster: Cluster, ranks: int) -> dict[str, str]:
    """What ranks need whatever the user has set: pods of one machine share its cores."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None and cluster.shared_machine:
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {**cluster.environment, **({} if threads is None else {"OMP_NUM_THREADS": threads})}
