"""`up`: from nothing to pods that are ready, or to nothing again and the reason why."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zeropods.errors import UserError
from zeropods.pods import cluster as keeper
from zeropods.pods import this_pod
from zeropods.pods.backends.fleet import (
    BACKENDS,
    NETWORKS,
    Fleet,
    choose_backend,
    choose_network,
    differences,
    fleet_of,
)
from zeropods.pods.backends.local import SSH_PORT
from zeropods.pods.backends.workers import Worker, has_ended, is_pending, status_of
from zeropods.pods.cluster import KEY, Cluster, clear, make_secret, sweep, write_files
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.processes import deferred, ending_in_order
from zeropods.pods.rendezvous import Answer, MissingPods, Registration, Rendezvous
from zeropods.pods.sshd import make_key
from zeropods.pods.state import Pod, Settings, State, folder_of, locked, read_state, write_state
from zeropods.programs import LISTENED

# Look after workers while they start: say how far they are, and stop waiting for one that never comes.

LIST_SECONDS = 1.0
"""Between two questions to the backend."""
PENDING_SECONDS = 5.0
"""A worker that is still to start is mentioned after so long."""
BAR_SECONDS = 2.0
REASONS = ("reason", "status_reason", "status_message", "message")
"""Under these names a backend may say why a worker waits."""


class Arrivals:
    """Called with the ids of the workers that have registered, some times a second."""

    def __init__(self, fleet: Fleet, workers: tuple[str, ...], settings: Settings, bar: Any) -> None:
        self._fleet = fleet
        self._workers = workers
        self._settings = settings
        self._bar = bar
        self._began = self._listed = time.monotonic()
        self._mentioned: set[str] = set()

    def __call__(self, registered: frozenset[str]) -> None:
        """`UserError` for a worker that has ended."""
        self._bar.update(len(registered) - self._bar.n)
        now = time.monotonic()
        if now - self._listed < LIST_SECONDS:
            return
        self._listed = now
        for worker in self._fleet.listed(self._workers):
            if has_ended(worker):
                raise UserError(self._ended(worker))
            if is_pending(worker) and now - self._began >= PENDING_SECONDS:
                self._mention(worker)

    def missing(self, registered: frozenset[str]) -> str:
        """Who has not registered, and what it does instead."""
        absent = [worker for worker in self._fleet.listed(self._workers) if str(worker["id"]) not in registered]
        return "; ".join(self._described(worker) for worker in absent)

    def _described(self, worker: Worker) -> str:
        if is_pending(worker):
            return f"{_shown(worker)} is {status_of(worker)}: {self._reason(worker)}"
        return f"{_shown(worker)} is {status_of(worker)}{self._last_line(worker)}"

    def _ended(self, worker: Worker) -> str:
        code = worker.get("exit_code")
        status = f"exit code {code}" if code is not None else f"status {status_of(worker)}"
        return f"{_shown(worker)} ended with {status} before the cluster was ready{self._last_line(worker)}"

    def _last_line(self, worker: Worker) -> str:
        line = self._fleet.last_line(str(worker["id"]))
        if line:
            return f"; its last line: {line}"
        return f"; see {worker['app_url']}" if worker.get("app_url") else "; it wrote nothing"

    def _reason(self, worker: Worker) -> str:
        asked = self._settings
        size = f"{asked.cpu:g} cores, {asked.memory:g} GiB and {asked.nvidia_gpu} GPUs"
        said = next((str(worker[name]) for name in REASONS if worker.get(name)), "")
        return said or f"it waits for {size}; quota or a free machine is missing"

    def _mention(self, worker: Worker) -> None:
        if worker["id"] not in self._mentioned:
            self._mentioned.add(worker["id"])
            self._bar.clear()
            print(f"{_shown(worker)} is {status_of(worker)}: {self._reason(worker)}", file=sys.stderr, flush=True)


@contextmanager
def counting(total: int) -> Iterator[Any]:
    """A bar of the pods that are there, where somebody looks at it and it takes longer than two seconds."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(
        desc="pods", unit=" pods", total=total, file=sys.stderr, delay=BAR_SECONDS, leave=False, disable=not shown
    ) as bar:
        yield bar


def _shown(worker: Worker) -> str:
    address = worker.get("ip_address")
    return f"worker {worker['id']} ({address})" if address else f"worker {worker['id']}"


# The course of a start: folder, key, secret, rendezvous, workers, registrations, files.

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


# The programs that a cluster cannot do without, asked for before anything is started.

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}
"""Debian's and Ubuntu's."""
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Where sshd lies, and which the PATH of an ordinary user often lacks."""


def require_programs() -> None:
    """`UserError` that names all missing programs and the packages that bring them."""
    missing = [name for name in PACKAGES if _find(name) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise UserError(f"{', '.join(missing)}: not found on PATH; apt-get install {packages}")


def _find(name: str) -> str | None:
    path = os.environ.get("PATH", os.defpath)
    return shutil.which(name, path=os.pathsep.join([path, *SYSTEM_FOLDERS]) if name == "sshd" else path)


# What is asked of `up`, checked before anything is started.

LEASES = {"kernel": 25.0, "idle": 7200.0}
"""`kernel`: the cluster ends so long after the process that started it, and is gone 30 seconds after; `idle`: so long
after its last use."""
GPU_DEVICES = Path("/dev/nvidiactl")

Number = TypeVar("Number", int, float)


def checked_settings(
    count: int | None,
    *,
    hostfile: Path | None,
    ssh_config: Path | None,
    slots: int | None,
    backend: str | None,
    network: str,
    lease: str,
    lease_seconds: float | None,
    cpu: float,
    memory: float,
    nvidia_gpu: int | None,
) -> Settings:
    """The settings with their defaults, as `up` documents them; `UserError` names the one that cannot be."""
    hosts: Sequence[Host] = ()
    if hostfile is not None:
        _refuse_beside_hostfile(slots, backend, network)
        hosts = _first(read_hostfile(hostfile), count, hostfile)
        count, chosen, network = len(hosts), "hosts", "hosts"
    elif ssh_config is not None:
        raise UserError(f"ssh configuration {ssh_config}: is for hosts of your own; give their hostfile too")
    else:
        chosen = choose_backend(backend)
        network = choose_network(network, chosen)
    if count is None:
        raise UserError("count: not given; say how many pods, or name a hostfile")
    return Settings(
        count=positive("count", count),
        slots=None if slots is None else positive("slots", slots),
        backend=chosen,
        network=network,
        lease=_lease(lease),
        lease_seconds=positive("lease_seconds", LEASES[lease] if lease_seconds is None else lease_seconds),
        cpu=positive("cpu", cpu),
        memory=positive("memory", memory),
        nvidia_gpu=_gpus() if nvidia_gpu is None else nvidia_gpu,
        hosts=tuple(host.line() for host in hosts),
        ssh_config=None if ssh_config is None else str(_readable(ssh_config)),
    )


def positive(what: str, value: Number) -> Number:
    """The value; `UserError` if it is not above zero."""
    if value <= 0:
        raise UserError(f"{what}: {value}; expected a positive number")
    return value


def _refuse_beside_hostfile(slots: int | None, backend: str | None, network: str) -> None:
    if slots is not None:
        raise UserError(f"slots {slots}: the hostfile says how many each host has; leave slots out")
    if backend is not None:
        raise UserError(f"backend {backend!r}: expected {' or '.join(BACKENDS)} without a hostfile, or none with one")
    if network != NETWORKS[0]:
        raise UserError(f"network {network!r}: hosts of your own have one; leave network out")


def _first(hosts: Sequence[Host], count: int | None, hostfile: Path) -> Sequence[Host]:
    if count is not None and positive("count", count) > len(hosts):
        raise UserError(f"count {count}: {hostfile} has {len(hosts)} hosts; add some, or ask for fewer pods")
    return hosts[:count]


def _readable(ssh_config: Path) -> Path:
    if not ssh_config.is_file():
        raise UserError(f"{ssh_config}: no such ssh configuration; name one, or leave it out for your usual one")
    return ssh_config.absolute()


def _lease(lease: str) -> str:
    if lease not in LEASES:
        raise UserError(f"lease {lease!r}: expected {' or '.join(LEASES)}")
    return lease


def _gpus() -> int:
    return this_pod.slots() if GPU_DEVICES.exists() else 0


# `up`: from nothing to pods that are ready, or to nothing again and the reason why.


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
