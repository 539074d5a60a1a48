"""The course of a start: folder, key, secret, rendezvous, workers, registrations, files."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods.arrivals import Arrivals, counting
from zeropods.pods.backends.fleet import Fleet, fleet_of
from zeropods.pods.backends.network import SSH_PORT
from zeropods.pods.cluster import KEY, Cluster
from zeropods.pods.cluster_files import make_secret, write_files
from zeropods.pods.keys import make_key
from zeropods.pods.rendezvous.rendezvous import Answer, MissingPods, Registration, Rendezvous
from zeropods.pods.signals import deferred
from zeropods.pods.state import Pod, Settings, State, write_state
from zeropods.ports import LISTENED

OTHER_SSH_PORTS = 7


def bring_up(folder: Path, settings: Settings, port: int | None, seconds: float) -> Cluster:
    """Start all pods of a cluster in its empty folder and write its files.

    What is there when it fails is the caller's to clear.

    Args:
        port: of the rendezvous; 6000 or a free one if None.
        seconds: until all pods have to be ready.
    """
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
    ports = (SSH_PORT, *random.sample(LISTENED, OTHER_SSH_PORTS))
    listener = Rendezvous(
        secret=secret, count=settings.count, answer=answer, address=address, port=port, ssh_ports=ports
    )
    with listener as rendezvous:
        env = _worker_environment(settings, f"{address}:{rendezvous.port}", secret, ports, seconds)
        try:
            with deferred():
                state = replace(state, workers=fleet.start(settings, env))
                write_state(folder, state)
            registrations = _gather(rendezvous, fleet, state, seconds)
            return _complete(folder, state, registrations, rendezvous.ssh_port, fleet)
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


def _complete(
    folder: Path, state: State, registrations: tuple[Registration, ...], ssh_port: int, fleet: Fleet
) -> Cluster:
    if state.settings.hosts:
        # Workers were started in the order of the user's hostfile; registrations come in that of their addresses.
        places = {worker: place for place, worker in enumerate(state.workers)}
        registrations = tuple(sorted(registrations, key=lambda pod: places[pod.worker]))
    pods = tuple(_pod(number, pod) for number, pod in enumerate(registrations, start=1))
    whole = replace(state, ssh_port=ssh_port, pods=pods)
    cluster = Cluster.of(folder, whole)
    write_files(cluster, fleet.network.user)
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
