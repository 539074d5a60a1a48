"""`up`: from nothing to pods that are ready, or to nothing again and the reason why."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods import keeper
from zeropods.pods.arrivals import Arrivals, counting
from zeropods.pods.backends.fleet import Fleet, differences, fleet_of
from zeropods.pods.backends.network import SSH_PORT
from zeropods.pods.cluster import KEY, Cluster
from zeropods.pods.cluster_files import make_secret, write_files
from zeropods.pods.keys import make_key
from zeropods.pods.programs import require_programs
from zeropods.pods.removal import clear, sweep
from zeropods.pods.rendezvous.rendezvous import Answer, MissingPods, Registration, Rendezvous
from zeropods.pods.settings import checked_settings, positive
from zeropods.pods.signals import deferred, ending_in_order
from zeropods.pods.state import Pod, Settings, State, folder_of, locked, read_state, write_state

OTHER_SSH_PORTS = 7


def up(
    count: int,
    *,
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
        count, slots=slots, backend=backend, network=network, lease=lease, lease_seconds=lease_seconds,
        cpu=cpu, memory=memory, nvidia_gpu=nvidia_gpu,
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
        return _begin(folder, settings, port, seconds)
    except BaseException:
        with deferred():
            clear(folder)
        raise


def _begin(folder: Path, settings: Settings, port: int | None, seconds: float) -> Cluster:
    # The state comes first: it says what to clean up, should this process not come to its end.
    state = State(name=folder.name, settings=settings)
    write_state(folder, state)
    fleet = fleet_of(folder, settings)
    with deferred():
        fleet.network.open()
    public_key = make_key(folder / KEY, f"zeropods {state.name}")
    secret = make_secret(folder)
    address = fleet.network.master_address()
    answer = Answer(
        cluster=state.name, authorized_key=public_key, lease=settings.lease, lease_seconds=settings.lease_seconds
    )
    ports = (SSH_PORT, *random.sample(range(20_000, 32_000), OTHER_SSH_PORTS))
    listener = Rendezvous(
        secret=secret, count=settings.count, answer=answer, address=address, port=port, ssh_ports=ports
    )
    with listener as rendezvous:
        env = _worker_environment(settings, f"{address}:{rendezvous.port}", secret, ports, seconds)
        try:
            with deferred():
                state = replace(state, workers=fleet.start(settings, env))
                write_state(folder, state)
            return _complete(folder, state, _gather(rendezvous, fleet, state, seconds), rendezvous.ssh_port)
        finally:
            fleet.network.settled()


def _gather(rendezvous: Rendezvous, fleet: Fleet, state: State, seconds: float) -> tuple[Registration, ...]:
    with counting(state.settings.count) as bar:
        arrivals = Arrivals(fleet, state.workers, state.settings, bar)
        try:
            return rendezvous.gather(seconds, arrivals)
        except MissingPods as error:
            registered = frozenset(pod.worker for pod in error.registered)
            missing = arrivals.missing(registered) or str(error)
            raise UserError(
                f"cluster {state.name}: {len(registered)} of {state.settings.count} pods after {seconds:g} s: {missing}"
            ) from None


def _complete(folder: Path, state: State, registrations: tuple[Registration, ...], ssh_port: int) -> Cluster:
    pods = tuple(_pod(number, pod) for number, pod in enumerate(registrations, start=1))
    whole = replace(state, ssh_port=ssh_port, pods=pods)
    cluster = Cluster.of(folder, whole)
    write_files(cluster)
    write_state(folder, whole)
    return cluster


def _pod(number: int, pod: Registration) -> Pod:
    return Pod(
        name=f"pod{number}",
        worker=pod.worker,
        address=pod.address,
        hostname=pod.hostname,
        slots=pod.slots,
        host_key=pod.host_key,
        control_port=pod.control_port,
    )


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


def _worker_environment(
    settings: Settings, master: str, secret: bytes, ssh_ports: tuple[int, ...], seconds: float
) -> dict[str, str]:
    slots = {} if settings.slots is None else {"ZEROPODS_SLOTS": str(settings.slots)}
    return {
        "ZEROPODS_MASTER": master,
        "ZEROPODS_SECRET": secret.hex(),
        "ZEROPODS_SSH_PORTS": ",".join(map(str, ssh_ports)),
        "ZEROPODS_REGISTER_SECONDS": f"{seconds:g}",
        **slots,
    }


def _refuse_blanks(folder: Path) -> None:
    """Pdsh cuts what it hands to ssh at blanks, and knows no quotes."""
    if len(str(folder).split()) > 1:
        raise UserError(f"{folder}: pdsh cannot use a path with blanks; set ZEROPODS_HOME to a folder without")
