"""`up`: from nothing to pods that are ready, or to nothing again and the reason why."""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zeropods.errors import UserError
from zeropods.pods import this_pod
from zeropods.pods.backends.cml import is_session, require_module
from zeropods.pods.backends.local import SSH_PORT, LocalWorkers, Worker
from zeropods.pods.cluster import BACKENDS, KEY, SECRET, Cluster, clear, hold, sweep, workers_of, write_files
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.processes import deferred, ending_in_order
from zeropods.pods.rendezvous import Answer, MissingPods, Registration, Rendezvous
from zeropods.pods.sshd import make_key
from zeropods.pods.state import Pod, Settings, State, folder_of, locked, read_state, write_state
from zeropods.programs import LISTENED, find_program, in_kernel

if TYPE_CHECKING:
    from tqdm import tqdm

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}
"""The programs that a cluster cannot do without, and Debian's and Ubuntu's packages that bring them."""
LEASES = {"kernel": 25.0, "idle": 7200.0}
"""`kernel`: the cluster ends so long after the process that started it, and is gone 30 seconds after; `idle`: so long
after its last use."""
GPU_DEVICES = Path("/dev/nvidiactl")
OTHER_SSH_PORTS = 7
LIST_SECONDS = 1.0
"""Time between two questions to the backend."""
PENDING_SECONDS = 5.0
"""A worker that has still to start is named on stderr after that time."""
BAR_SECONDS = 2.0
"""A bar of the pods that are there is shown after that time."""

Number = TypeVar("Number", int, float)


def up(
    count: int | None = None,
    *,
    hostfile: str | Path | None = None,
    ssh_config: str | Path | None = None,
    slots: int | None = None,
    backend: str | None = None,
    name: str | None = None,
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
        slots: processes per pod; its GPUs, at least 1, if not given.
        backend: `local` or `cml`; inside a CML session `cml`, else `local`, if not given.
        name: of the cluster; one of this process if not given.
        port: of the rendezvous; 6000 or a free one if not given.
        seconds: until all pods have to be ready.
        lease: `kernel` or `idle`, see `LEASES`.
        lease_seconds: its length; the lease's own if not given.
        cpu: cores of each CML worker; `memory`: GiB; `nvidia_gpu`: GPUs, as many as here if not given.

    Raises:
        UserError: a program is missing, a worker ended or never started, or the name is taken.
    """
    hosts = _own_hosts(hostfile, ssh_config, count, slots, backend)
    if hosts:
        count, backend = len(hosts), "hosts"
    if count is None:
        raise UserError("count: not given; say how many pods, or name a hostfile")
    if lease not in LEASES:
        raise UserError(f"lease {lease!r}: expected {' or '.join(LEASES)}")
    settings = Settings(
        count=positive("count", count),
        slots=None if slots is None else positive("slots", slots),
        backend=_chosen(backend, own=bool(hosts)),
        lease=lease,
        lease_seconds=positive("lease_seconds", LEASES[lease] if lease_seconds is None else lease_seconds),
        cpu=positive("cpu", cpu),
        memory=positive("memory", memory),
        nvidia_gpu=_gpus() if nvidia_gpu is None else nvidia_gpu,
        hosts=tuple(host.line() for host in hosts),
        ssh_config=None if ssh_config is None else str(_readable(Path(ssh_config))),
    )
    folder = folder_of(name or f"kernel-{os.getpid()}")
    positive("seconds", seconds)
    if len(str(folder).split()) > 1:
        raise UserError(f"{folder}: pdsh cannot use a path with blanks; set ZEROPODS_HOME to a folder without")
    require_programs()
    sweep()
    with ending_in_order(), locked(folder):
        standing = _standing(folder, settings)
        cluster = standing or _make(folder, settings, port, seconds)
    if lease == "kernel":
        hold(cluster, end_at_exit=standing is None)
    return cluster


def positive(what: str, value: Number) -> Number:
    """The value; `UserError` if it is not above zero."""
    if value <= 0:
        raise UserError(f"{what}: {value}; expected a positive number")
    return value


def require_programs() -> None:
    """`UserError` that names all missing programs and the packages that bring them."""
    missing = [name for name in PACKAGES if find_program(name) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise UserError(f"{', '.join(missing)}: not found on PATH; apt-get install {packages}")


def _chosen(backend: str | None, *, own: bool) -> str:
    """The backend that was asked for, else CML inside a CML session; `UserError` where it is not to be had."""
    if backend is None:
        return "cml" if is_session() else "local"
    if backend not in BACKENDS or (backend == "hosts") != own:
        raise UserError(f"backend {backend!r}: expected local or cml")
    if backend == "cml":
        require_module()
    return backend


def _own_hosts(
    hostfile: str | Path | None,
    ssh_config: str | Path | None,
    count: int | None,
    slots: int | None,
    backend: str | None,
) -> Sequence[Host]:
    """The hosts of the user's hostfile; none where none was named. `UserError` for what contradicts it."""
    if hostfile is None:
        if ssh_config is not None:
            raise UserError(f"ssh configuration {ssh_config}: is for hosts of your own; give their hostfile too")
        return ()
    if slots is not None:
        raise UserError(f"slots {slots}: the hostfile says how many each host has; leave slots out")
    if backend is not None:
        raise UserError(f"backend {backend!r}: expected local or cml without a hostfile, or none with one")
    hosts = read_hostfile(Path(hostfile))
    if count is not None and positive("count", count) > len(hosts):
        raise UserError(f"count {count}: {hostfile} has {len(hosts)} hosts; add some, or ask for fewer pods")
    return hosts[:count]


def _readable(ssh_config: Path) -> Path:
    if not ssh_config.is_file():
        raise UserError(f"{ssh_config}: no such ssh configuration; name one, or leave it out for your usual one")
    return ssh_config.absolute()


def _gpus() -> int:
    return this_pod.slots() if GPU_DEVICES.exists() else 0


def _standing(folder: Path, settings: Settings) -> Cluster | None:
    """The cluster of this name if it is as asked for; None if all of it that may be there can be cleared."""
    state = read_state(folder)
    if state is None or not state.pods:
        return None
    cluster = Cluster.of(folder, state)
    pods = cluster.statuses()
    there = [pod for pod in pods if pod.is_ready]
    before, after = asdict(state.settings), asdict(settings)
    changed = ", ".join(f"{key} {before[key]} -> {after[key]}" for key in after if before[key] != after[key])
    if len(there) == len(pods) and not changed:
        return cluster
    used = [pod.pod for pod in there if pod.runs]
    if there and (changed or used):
        why = f"with other settings ({changed})" if changed else f"in part, with a run on {', '.join(used)}"
        raise UserError(f"cluster {state.name}: is up {why}; zeropods pods down --name {state.name}, or another name")
    return None


# The course of a start: folder, key, secret, rendezvous, workers, registrations, files.


def _make(folder: Path, settings: Settings, port: int | None, seconds: float) -> Cluster:
    clear(folder)
    try:
        return _bring_up(folder, settings, port, seconds)
    except BaseException:
        with deferred():
            clear(folder)
        raise


def _bring_up(folder: Path, settings: Settings, port: int | None, seconds: float) -> Cluster:
    """Start all pods of a cluster in its empty folder and write its files."""
    # The state comes first: it says what to clean up, should this process not come to its end.
    state = State(name=folder.name, settings=settings)
    write_state(folder, state)
    workers = workers_of(folder, settings)
    public_key = make_key(folder / KEY, f"zeropods {state.name}")
    secret = _make_secret(folder)
    address = workers.master_address()
    answer = Answer(
        cluster=state.name, authorized_key=public_key, lease=settings.lease, lease_seconds=settings.lease_seconds
    )
    ports = (SSH_PORT, *random.sample(LISTENED, OTHER_SSH_PORTS))
    listener = Rendezvous(
        secret=secret, count=settings.count, answer=answer, address=address, port=port, ssh_ports=ports
    )
    with listener as rendezvous:
        env = {
            "ZEROPODS_MASTER": f"{address}:{rendezvous.port}",
            "ZEROPODS_SECRET": secret.hex(),
            "ZEROPODS_SSH_PORTS": ",".join(map(str, ports)),
            "ZEROPODS_REGISTER_SECONDS": f"{seconds:g}",
            **({} if settings.slots is None else {"ZEROPODS_SLOTS": str(settings.slots)}),
        }
        with deferred():
            state = replace(state, workers=workers.start(env))
            write_state(folder, state)
        registrations = _gather(rendezvous, workers, state, seconds)
        state = replace(state, ssh_port=rendezvous.ssh_port, pods=_pods(state, registrations))
        cluster = Cluster.of(folder, state)
        write_files(cluster, workers.user)
        write_state(folder, state)
        return cluster


def _make_secret(folder: Path) -> bytes:
    """A new secret of 32 random bytes, kept in a file that only its owner can read."""
    secret = secrets.token_bytes(32)
    with os.fdopen(os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secret.hex()}\n")
    return secret


def _pods(state: State, registrations: Sequence[Registration]) -> tuple[Pod, ...]:
    """The pods in the order of the user's hostfile, where there is one; else of their addresses."""
    if state.settings.hosts:
        registrations = sorted(registrations, key=lambda pod: state.workers.index(pod.worker))
    return tuple(
        Pod(
            name=f"pod{number}",
            worker=pod.worker,
            address=pod.address,
            hostname=pod.hostname,
            slots=pod.slots,
            host_key=pod.host_key,
            control_port=pod.control_port,
        )
        for number, pod in enumerate(registrations, start=1)
    )


def _gather(rendezvous: Rendezvous, workers: LocalWorkers, state: State, seconds: float) -> tuple[Registration, ...]:
    """Wait until all pods have registered; `UserError` names a worker that has ended, or those that are missing."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() or in_kernel()
    bar = tqdm(
        desc="pods", unit=" pods", total=state.settings.count, file=sys.stderr, delay=BAR_SECONDS, leave=False,
        disable=not shown,
    )  # fmt: skip
    with bar:
        arrivals = Arrivals(workers, state, bar)
        try:
            return rendezvous.gather(seconds, arrivals)
        except MissingPods as error:
            registered = {pod.worker for pod in error.registered}
            missing = [arrivals.describe(each) for each in arrivals.workers() if each.id not in registered]
            head = f"cluster {state.name}: {len(registered)} of {state.settings.count} pods after {seconds:g} s"
            raise UserError(f"{head}: {'; '.join(missing) or error}") from None


class Arrivals:
    """Looks after workers while they start: called some times a second with the ids of those that have registered."""

    def __init__(self, workers: LocalWorkers, state: State, bar: tqdm) -> None:
        self._workers = workers
        self._state = state
        self._bar = bar
        self._began = self._listed = time.monotonic()
        self._mentioned: set[str] = set()

    def __call__(self, registered: frozenset[str]) -> None:
        """Show how many there are; `UserError` for a worker that has ended."""
        self._bar.update(len(registered) - self._bar.n)
        now = time.monotonic()
        if now - self._listed < LIST_SECONDS:
            return
        self._listed = now
        for worker in self.workers():
            if worker.has_ended:
                code = f"exit code {worker.exit_code}" if worker.exit_code is not None else f"status {worker.status}"
                end = f"ended with {code} before the cluster was ready"
                raise UserError(f"{_shown(worker)} {end}{_last_words(worker)}")
            if worker.is_pending and now - self._began >= PENDING_SECONDS and worker.id not in self._mentioned:
                self._mentioned.add(worker.id)
                self._bar.clear()
                print(self.describe(worker), file=sys.stderr, flush=True)

    def workers(self) -> list[Worker]:
        """The workers of this start."""
        return [worker for worker in self._workers.list() if worker.id in self._state.workers]

    def describe(self, worker: Worker) -> str:
        """What a worker does instead of registering."""
        if not worker.is_pending:
            return f"{_shown(worker)} is {worker.status}{_last_words(worker)}"
        asked = self._state.settings
        size = f"{asked.cpu:g} cores, {asked.memory:g} GiB and {asked.nvidia_gpu} GPUs"
        reason = worker.reason or f"it waits for {size}; quota or a free machine is missing"
        return f"{_shown(worker)} is {worker.status}: {reason}"


def _shown(worker: Worker) -> str:
    return f"worker {worker.id} ({worker.address})" if worker.address else f"worker {worker.id}"


def _last_words(worker: Worker) -> str:
    if worker.last_line:
        return f"; its last line: {worker.last_line}"
    return f"; see {worker.app_url}" if worker.app_url else "; it wrote nothing"
