"""`up`: from nothing to pods that are ready, or to nothing again and the reason why."""

from __future__ import annotations

import os
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods import keeper
from zeropods.pods.backends.fleet import differences
from zeropods.pods.bring_up import bring_up
from zeropods.pods.cluster import Cluster
from zeropods.pods.programs import require_programs
from zeropods.pods.removal import clear, sweep
from zeropods.pods.settings import checked_settings, positive
from zeropods.pods.signals import deferred, ending_in_order
from zeropods.pods.state import Settings, folder_of, locked, read_state


def up(
    count: int | None = None,
    *,
    hostfile: str | Path | None = None,
    ssh_config: str | Path | None = None,
    slots: int | None = None,
    backend: str | None = None,
    name: str | None = None,
    network: str = "loopback",
    port: int | None = None,
    seconds: float = 120.0,
    lease: str = "kernel",
    lease_seconds: float | None = None,
    cpu: float = 4,
    memory: float = 32,
    nvidia_gpu: int | None = None,
) -> Cluster:
    """Start pods and wait until all of them are ready; a cluster that is up as asked for is returned as it is.

    Whatever goes wrong, Ctrl-C included, nothing that was started is left.

    Args:
        count: of pods; all hosts of the hostfile, if there is one and this is not given.
        hostfile: of hosts of your own, which your ssh reaches without a question and which have this project and
            this Python at the same place. The pods are in its order.
        ssh_config: by which ssh reaches them; your usual one if not given.
        slots: processes of a pod; its GPUs, at least 1, if not given.
        backend: `local` or `cml`; inside a CML session `cml`, else `local`, if not given.
        name: of the cluster; one of this process if not given.
        network: of local pods: `loopback`, or `namespaces`, which need root.
        port: of the rendezvous; 6000 or a free one if not given.
        seconds: until all pods have to be ready.
        lease: `kernel` or `idle`, see `settings.LEASES`.
        lease_seconds: its length; the lease's own if not given.
        cpu: cores of each CML worker; `memory`: GiB; `nvidia_gpu`: GPUs, as many as here if not given.

    Raises:
        UserError: a program is missing, a worker ended or never started, or the name is taken.
    """
    settings = checked_settings(
        count, hostfile=None if hostfile is None else Path(hostfile),
        ssh_config=None if ssh_config is None else Path(ssh_config), slots=slots, backend=backend, network=network,
        lease=lease, lease_seconds=lease_seconds, cpu=cpu, memory=memory, nvidia_gpu=nvidia_gpu,
    )  # fmt: skip
    folder = folder_of(name or f"kernel-{os.getpid()}")
    positive("seconds", seconds)
    _refuse_blanks(folder)
    require_programs()
    sweep()
    with ending_in_order(), locked(folder):
        standing = _standing(folder, settings)
        cluster = standing or _make(folder, settings, port, seconds)
    if lease == "kernel":
        keeper.hold(cluster, end_at_exit=standing is None)
    return cluster


def _make(folder: Path, settings: Settings, port: int | None, seconds: float) -> Cluster:
    clear(folder)
    try:
        return bring_up(folder, settings, port, seconds)
    except BaseException:
        with deferred():
            clear(folder)
        raise


def _standing(folder: Path, settings: Settings) -> Cluster | None:
    """The cluster of this name if it is as asked for; None if all of it that may be there can be cleared."""
    state = read_state(folder)
    if state is None or not state.pods:
        return None
    cluster = Cluster.of(folder, state)
    pods = cluster.statuses()
    there = [pod for pod in pods if pod["status"] == "ready"]
    changed = differences(state.settings, settings)
    if len(there) == len(pods) and not changed:
        return cluster
    used = [pod["pod"] for pod in there if pod["runs"]]
    if there and (changed or used):
        why = f"with other settings ({changed})" if changed else f"in part, with a run on {', '.join(used)}"
        raise UserError(f"cluster {state.name}: is up {why}; zeropods pods down --name {state.name}, or another name")
    return None


def _refuse_blanks(folder: Path) -> None:
    """Pdsh cuts what it hands to ssh at blanks, and knows no quotes."""
    if len(str(folder).split()) > 1:
        raise UserError(f"{folder}: pdsh cannot use a path with blanks; set ZEROPODS_HOME to a folder without")
