"""`zeropods probe` from outside: a rank on each pod, or some processes of this machine, and what the first one says."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.command import PROJECT, exported_variables
from zeropods.measure.calibration import PROBE_AGAIN, MachineProbe, read_probe
from zeropods.pods.cluster import Cluster
from zeropods.pods.hostfile import own_gpus
from zeropods.pods.preflight import TIMED_OUT, Expectation, preflight, run_all
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import free_port

MOST_SECONDS = 40.0
LOCAL = 2
"""Processes of this machine, where no pods are up: on more there is less of it for each."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe(cluster: Cluster | None = None) -> MachineProbe:
    """Probe the machines of a cluster's pods, a process on each, or this one.

    Raises:
        UserError: it took too long, a process failed, or pods of this machine are more than its GPUs.
    """
    gpus = _gpus()
    hosts = [host.address for host in cluster.hosts] if cluster else ["127.0.0.1"] * min(LOCAL, len(gpus) or LOCAL)
    # As in training: threads that spin would take the cores from one another.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **exported_variables((), cluster.environment if cluster else {})}
    own: list[dict[str, str]] = [{} for _ in hosts]
    if cluster is None or cluster.shared_machine:
        if 0 < len(gpus) < len(hosts):
            remedy = "zeropods probe --alone measures it without them"
            raise UserError(f"probe: {len(hosts)} pods for {len(gpus)} GPUs of one machine; {remedy}")
        own = [{VISIBLE: gpus[number] if gpus else ""} for number in range(len(hosts))]
    port = free_port()
    commands = [_rank(number, hosts, port, {**variables, **own[number]}) for number in range(len(hosts))]
    if cluster:
        names, expected = [pod.name for pod in cluster.pods], Expectation.of_this_machine(PROJECT, master_port=port)
        preflight(cluster.hosts, expected, names=names, ssh_config=cluster.ssh_config).require()
        shells = zip(hosts, commands, strict=True)
        commands = [
            ssh_argv(cluster.ssh_config, host, ["sh", "-c", f"cd {shlex.quote(str(PROJECT))}; exec {shlex.join(argv)}"])
            for host, argv in shells
        ]
    ends = run_all(commands, MOST_SECONDS)
    bad = [number for number, end in enumerate(ends) if end.returncode != 0]
    # Those that did not end may have waited for one that did.
    failed = min(bad, key=lambda number: ends[number].returncode == TIMED_OUT, default=None)
    if failed is not None:
        end, place = ends[failed], f"probe: process {failed} on {hosts[failed]}"
        if end.returncode == TIMED_OUT:
            raise UserError(f"{place}: no end within {MOST_SECONDS:.0f} s; {PROBE_AGAIN} when less else runs there")
        last = (end.stderr.strip() or "it said nothing").splitlines()[-1]
        raise UserError(f"{place}: ended with status {end.returncode}: {last:.200}; see zeropods pods check")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        path.write_text(ends[0].stdout.strip().splitlines()[-1], encoding="utf-8")
        return read_probe(path)


def _gpus() -> list[str]:
    """GPUs of this machine that this process may use, as CUDA names them."""
    count = own_gpus()
    named = os.environ.get(VISIBLE, ",".join(map(str, range(count))))
    return list(filter(None, named.split(",")))[:count]


def _rank(number: int, hosts: Sequence[str], port: int, variables: Mapping[str, str]) -> list[str]:
    """The command of one rank."""
    group = {"RANK": number, "WORLD_SIZE": len(hosts), "MASTER_ADDR": hosts[0], "MASTER_PORT": port, **variables}
    # On a pod it outlives the ssh that began it, and would wait for the other ranks.
    limit = ["timeout", "-k", "5", f"{MOST_SECONDS + 1:.0f}"]
    settings = [f"{name}={value}" for name, value in group.items()]
    return [*limit, "env", *settings, sys.executable, "-m", "zeropods.train.probe"]
