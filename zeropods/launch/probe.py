"""`zeropods probe` from outside: a rank on each pod, or some processes of this machine, and what the first one says."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zeropods.errors import UserError
from zeropods.launch.command import PROJECT
from zeropods.measure.probe import REMEDY, MachineProbe, read_probe
from zeropods.pods.cluster import Cluster
from zeropods.pods.preflight import run_all
from zeropods.pods.ssh import ssh_argv
from zeropods.programs import free_port

MOST_SECONDS = 40.0
LOCAL = 2
"""Processes of this machine, where no pods are up: on more there is less of it for each."""


def probe(cluster: Cluster | None = None) -> MachineProbe:
    """Probe the machines of a cluster's pods, a process on each, or this one.

    Raises:
        UserError: it took too long, or a process failed.
    """
    hosts = [host.address for host in cluster.hosts] if cluster else ["127.0.0.1"] * LOCAL
    port = free_port()
    commands = [_rank(number, hosts, port) for number in range(len(hosts))]
    if cluster:
        shells = zip(hosts, commands, strict=True)
        commands = [
            ssh_argv(cluster.ssh_config, host, ["sh", "-c", f"cd {shlex.quote(str(PROJECT))}; exec {shlex.join(argv)}"])
            for host, argv in shells
        ]
    ends = run_all(commands, MOST_SECONDS)
    failed = next((number for number, end in enumerate(ends) if end.status != 0), None)
    if failed is not None:
        end, place = ends[failed], f"probe: process {failed} on {hosts[failed]}"
        if end.status is None:
            raise UserError(f"{place}: no end within {MOST_SECONDS:.0f} s; {REMEDY} when less else runs there")
        last = (end.errors.strip() or "it said nothing").splitlines()[-1]
        raise UserError(f"{place}: ended with status {end.status}: {last:.200}; see zeropods pods check")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        path.write_text(ends[0].output.strip().splitlines()[-1], encoding="utf-8")
        return read_probe(path)


def _rank(number: int, hosts: Sequence[str], port: int) -> list[str]:
    """The command of one rank."""
    # As in training: threads that spin would take the cores from one another.
    waiting = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    group = [f"RANK={number}", f"WORLD_SIZE={len(hosts)}", f"MASTER_ADDR={hosts[0]}", f"MASTER_PORT={port}"]
    return ["env", *group, f"OMP_WAIT_POLICY={waiting}", sys.executable, "-m", "zeropods.train.probe"]
