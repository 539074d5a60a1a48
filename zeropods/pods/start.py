"""`up` starts pods and waits until they are ready, or leaves nothing behind and says why."""

from __future__ import annotations

import math
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeropods.errors import UserError, told_differences
from zeropods.files import PLAIN
from zeropods.pods.backends import BACKEND_NAMES
from zeropods.pods.backends.base import Backend, Settings, Worker
from zeropods.pods.backends.local import SSH_PORT
from zeropods.pods.cluster import (
    BACKENDS,
    KEY_FILE,
    LOCK_SECONDS,
    PROGRAMS_OF_PDSH,
    SECRET_FILE,
    SSH_CONFIG,
    Cluster,
    claim,
    clear,
    folder_of,
    hold,
    locked,
    read_cluster,
    remove_ended_clusters,
    require_this_machine,
    usual_backend,
    workers_of,
    write_access_files,
    write_cluster,
)
from zeropods.pods.gpus import HIDDEN, own_gpus, too_few
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.leases import LEASES
from zeropods.pods.machine import name_of_process, this_machine
from zeropods.pods.processes import ending_in_order, signals_deferred
from zeropods.pods.rendezvous import Pod, Rendezvous
from zeropods.pods.ssh import has_account, make_key, pdsh_ssh_arguments
from zeropods.programs import LISTENED, find_program, required_programs
from zeropods.tables import progress, said_above

OTHER_SSH_PORTS = 7
SECRET_BYTES = 32
PROGRAMS_OF_SSH = ("ssh", "ssh-keygen")
"""Programs without which nobody here can log in on a pod: then its pods start no sshd."""
POD_SECONDS = "ZEROPODS_POD_SECONDS"
"""Environment variable with the seconds to wait for pods, for notebooks and sweeps, which have no
flag for it."""
WATCH_SECONDS = 1.0
"""Seconds between two checks of the workers, as long as not all of them have registered."""


def up(
    count: int | None = None,
    *,
    hostfile: str | Path | None = None,
    ssh_config: str | Path | None = None,
    slots: int | None = None,
    backend: str | None = None,
    name: str | None = None,
    port: int | None = None,
    seconds: float | None = None,
    lease: str = "kernel",
    lease_seconds: float | None = None,
    cpu: float = 4,
    memory: float = 32,
    nvidia_gpu: int | None = None,
    accelerator_label: int | None = None,
    resource_profile: int | None = None,
    replace_lost: bool = False,
) -> Cluster:
    """Start pods and wait until all of them are ready; a cluster that is already up as asked for is
    returned as it is.

    Whatever goes wrong, Ctrl-C included, nothing that was started is left behind.

    Pods of this machine share the GPUs that this process sees: each has its own. Where there are
    too few, they train without GPUs, and a line on stderr says so.

    Args:
        count: number of pods; if not given, all hosts of the hostfile, if there is one.
        hostfile: lists hosts of your own, which your ssh reaches without a prompt and which have
            this project and this Python at the same place. The pods are in its order.
        ssh_config: configuration with which ssh reaches them; your usual one if not given.
        slots: processes per pod; if not given, one per GPU, at least 1.
        backend: `local` or `cml`; if not given, `cml` inside a CML session, else `local`.
        name: name of the cluster; if not given, one made from the ids of this process and its
            machine.
        port: port of the rendezvous; if not given, 6000 or a free one.
        seconds: time within which all pods have to be ready; if not given, ZEROPODS_POD_SECONDS,
            else 120, and 900 for CML workers.
        lease: kind of the lease, `kernel` or `idle`, see `LEASES`.
        lease_seconds: duration of the lease; if not given, that of its kind.
        cpu: cores of each CML worker.
        memory: its GiB.
        nvidia_gpu: its GPUs, if not given as many as here. With 0, pods of any kind train without
            GPUs.
        accelerator_label: CML's id of the kind of GPU that its workers get, where there are
            several.
        resource_profile: CML's id of the size of its workers, where it has such profiles.
        replace_lost: whether a CML worker that ends before all pods are ready is replaced by a new
            one, once, instead of ending the others.

    Raises:
        UserError: a hostfile needs ssh, a worker ended or never started, or the name is taken.
    """
    _check_numbers(
        nvidia_gpu,
        count=count,
        slots=slots,
        lease_seconds=lease_seconds,
        cpu=cpu,
        memory=memory,
        seconds=seconds,
    )
    hosts = _hosts(hostfile, ssh_config, count, slots, backend)
    backend_name = _backend_for(hosts, backend)
    of_cml = {"accelerator_label": accelerator_label, "resource_profile": resource_profile}
    BACKENDS[backend_name].check_request(nvidia_gpu, **of_cml)
    _check_choices(backend_name, lease, replace_lost=replace_lost)
    waiting = _Waiting(_wait_seconds(seconds, backend_name), replace_lost)
    number = len(hosts) or count or 0
    settings = Settings(
        count=number,
        slots=slots,
        backend=backend_name,
        lease=lease,
        lease_seconds=lease_seconds or LEASES[lease],
        cpu=cpu,
        memory=memory,
        nvidia_gpu=own_gpus() if nvidia_gpu is None else nvidia_gpu,
        hosts=tuple(host.line() for host in hosts),
        ssh_config=None if ssh_config is None else str(Path(ssh_config).absolute()),
        gpus=_gpus_of_pods(backend_name, number, slots, nvidia_gpu),
        **of_cml,
    )
    folder = folder_of(name_of_process("kernel") if name is None else name)
    _check_programs(folder, hosts)
    remove_ended_clusters()
    with ending_in_order(), locked(folder):
        standing = _standing(folder, settings)
        cluster = standing or _make(folder, settings, port, waiting)
    if lease == "kernel":
        hold(cluster, end_at_exit=standing is None)
    return cluster


def slots_per_pod(count: int) -> int:
    """Number of slots of each pod that `up(count)` starts: its GPUs, at least 1."""
    return BACKENDS[usual_backend()].slots_of_pods(count)


# What is asked for


def _check_numbers(nvidia_gpu: int | None, **positive: float | None) -> None:
    """Refuse a negative number of GPUs, and another number that is not positive and finite; None
    stands for one that was not given."""
    for parameter, number in positive.items():
        if number is not None and not 0 < number < math.inf:
            flag = parameter.replace("_", "-")
            raise UserError(f"--{flag} {number}; expected a positive number")
    if nvidia_gpu is not None and nvidia_gpu < 0:
        raise UserError(f"--nvidia-gpu {nvidia_gpu}; expected at least 0")


def _check_choices(backend: str, lease: str, *, replace_lost: bool) -> None:
    """Refuse a lease that there is not, and new workers from a backend that has none. Arguments as
    those of `up`."""
    if lease not in LEASES:
        raise UserError(f"lease {lease!r}: expected {' or '.join(LEASES)}")
    if replace_lost and not BACKENDS[backend].can_replace:
        raise UserError("--replace: is for CML workers; leave it out")


def _check_programs(folder: Path, hosts: tuple[Host, ...]) -> None:
    """Refuse a cluster's folder whose path pdsh cannot take, where there is pdsh, and hosts where
    there is no ssh."""
    if all(map(find_program, PROGRAMS_OF_PDSH)):
        pdsh_ssh_arguments(folder / SSH_CONFIG)
    if hosts:
        # Their workers are started over the user's own ssh.
        required_programs("ssh")


def _wait_seconds(seconds: float | None, backend: str) -> float:
    """Seconds within which all pods have to be ready: those that were asked for, else those of the
    environment, else the backend's."""
    if seconds is not None:
        return seconds
    text = os.environ.get(POD_SECONDS)
    if not text:
        return BACKENDS[backend].ready_seconds
    remedy = f"{POD_SECONDS}: {text!r}; expected a positive number of seconds"
    try:
        number = float(text)
    except ValueError:
        raise UserError(remedy) from None
    if not 0 < number < math.inf:
        raise UserError(remedy)
    return number


def _hosts(
    hostfile: str | Path | None,
    ssh_config: str | Path | None,
    count: int | None,
    slots: int | None,
    backend: str | None,
) -> tuple[Host, ...]:
    """The first `count` hosts of a hostfile, or all, and none without a hostfile; refuse what
    contradicts that there is one, or that there is none. Arguments as those of `up`."""
    if hostfile is None:
        _check_without_hostfile(ssh_config, count)
        return ()
    if slots is not None:
        raise UserError(f"slots {slots}: the hostfile says how many each host has; leave slots out")
    if backend is not None:
        expected = " or ".join(BACKEND_NAMES)
        remedy = f"leave it out with a hostfile; without one, expected {expected}"
        raise UserError(f"backend {backend!r}: {remedy}")
    hosts = read_hostfile(Path(hostfile))
    if count is not None and count > len(hosts):
        remedy = "add some, or ask for fewer pods"
        raise UserError(f"--count {count}: {hostfile} has {len(hosts)} hosts; {remedy}")
    return hosts[:count]


def _check_without_hostfile(ssh_config: str | Path | None, count: int | None) -> None:
    if ssh_config is not None:
        raise UserError(
            f"ssh configuration {ssh_config}: is for hosts of your own; give their hostfile too"
        )
    if count is None:
        raise UserError("--count: not given; say how many pods, or name a --hostfile")


def _backend_for(hosts: tuple[Host, ...], backend: str | None) -> str:
    """Name of the backend of the user's own hosts where there are any, else of the one that was
    asked for, else of the usual one."""
    if hosts:
        return "hosts"
    if not backend:
        return usual_backend()
    if backend not in BACKENDS:
        expected = " or ".join(BACKEND_NAMES)
        raise UserError(f"backend {backend!r}: expected {expected}")
    return backend


def _gpus_of_pods(
    backend: str, count: int, slots: int | None, nvidia_gpu: int | None
) -> tuple[str, ...]:
    """The GPUs of each pod, as `Settings.gpus`; arguments as those of `up`."""
    if nvidia_gpu == 0:
        return (HIDDEN,) * count
    return BACKENDS[backend].gpus_of_pods(count, slots)


def _standing(folder: Path, settings: Settings) -> Cluster | None:
    """The cluster in this folder if it is as asked for; None if whatever is left of it can be
    cleared."""
    cluster = read_cluster(folder)
    if cluster is None:
        return None
    require_this_machine(cluster)
    if not cluster.pods:
        return None
    pods = cluster.statuses()
    ready = [pod for pod in pods if pod.is_ready]
    changes = _changes(cluster.settings, settings)
    if len(ready) == len(pods) and not changes:
        return cluster
    pods_in_use = [pod.pod for pod in ready if pod.runs]
    if ready and changes:
        reason = f"up with other settings ({changes})"
    elif pods_in_use:
        reason = f"only partly up, with a run on {', '.join(pods_in_use)}"
    else:
        return None
    remedy = f"zeropods pods down --name {cluster.name}, or another name"
    raise UserError(f"cluster {cluster.name}: is {reason}; {remedy}")


def _changes(before: Settings, after: Settings) -> str:
    """The settings that differ, in words; empty where none does."""
    values_before = asdict(before)
    values_after = asdict(after)
    changed = [name for name in values_after if values_before[name] != values_after[name]]
    return told_differences(values_before, values_after, changed)


# A new cluster


@dataclass(frozen=True)
class _Waiting:
    """How long the pods of a new cluster are waited for, and what happens to one that ends."""

    seconds: float
    replace_lost: bool


def _make(folder: Path, settings: Settings, port: int | None, waiting: _Waiting) -> Cluster:
    """Start all pods of a cluster and write its files in its folder; end and remove them if
    anything goes wrong."""
    clear(folder)
    # The state is written first: it says what to clean up if this process does not finish.
    cluster = Cluster(folder=folder, settings=settings, machine=this_machine())
    claim(cluster)
    with ExitStack() as undo:
        undo.callback(clear, folder)
        cluster = _start(cluster, port, waiting)
        undo.pop_all()
    is_asked_for = settings.nvidia_gpu == 0
    if cluster.hides_gpus and not is_asked_for:
        reason = too_few(settings.count, settings.slots)
        print(f"cluster {cluster.name}: {reason}", file=sys.stderr, flush=True)
    why_not_pdsh = cluster.why_not_pdsh()
    if why_not_pdsh is not None:
        line = f"{why_not_pdsh}, so agents start the ranks (--launcher agents)"
        print(f"cluster {cluster.name}: {line}", file=sys.stderr, flush=True)
    return cluster


def _start(cluster: Cluster, port: int | None, waiting: _Waiting) -> Cluster:
    """Start the workers of a cluster that has been claimed, and write down their ids at once; when
    all are ready, name the pods and write the files by which they are reached.

    Returns:
        The cluster with its pods.
    """
    settings = cluster.settings
    workers = workers_of(cluster)
    authorized_key = None
    if _can_have_ssh(cluster.folder):
        authorized_key = make_key(cluster.folder / KEY_FILE, f"zeropods {cluster.name}")
    secret = _make_secret(cluster.folder / SECRET_FILE)
    address = workers.master_address()
    with Rendezvous(secret=secret, count=settings.count, address=address, port=port) as rendezvous:
        orders = _orders(cluster, (address, rendezvous.port), authorized_key, waiting)
        with signals_deferred():
            cluster = replace(cluster, workers=workers.start(orders))
            write_cluster(cluster)
        # Only now, since the ids of those that did start are needed to end them.
        if workers.failure is not None:
            raise UserError(f"cluster {cluster.name}: {workers.failure}")
        cluster, pods = _gather(rendezvous, workers, cluster, orders, waiting, cluster.workers)
        if settings.hosts:
            # Pods on hosts of one's own are named in the order of the hosts.
            pods = tuple(sorted(pods, key=lambda pod: cluster.workers.index(pod.worker)))
        named = [replace(pod, name=f"pod{number}") for number, pod in enumerate(pods, start=1)]
        cluster = replace(cluster, pods=tuple(named))
        write_access_files(cluster, workers.accounts())
        write_cluster(cluster)
    return cluster


def _can_have_ssh(folder: Path) -> bool:
    """Whether somebody here can log in on the pods of a cluster with this folder, whose path ssh's
    configuration then holds."""
    has_programs = all(map(find_program, PROGRAMS_OF_SSH))
    is_plain = PLAIN.fullmatch(str(folder.absolute())) is not None
    return has_programs and is_plain and has_account()


def _orders(
    cluster: Cluster, master: tuple[str, int], authorized_key: str | None, waiting: _Waiting
) -> dict[str, object]:
    """The fields of an agent's `Orders` that are the same for all.

    Args:
        master: address and port of the rendezvous.
        authorized_key: public key of the cluster; None where it has no ssh.
    """
    return {
        "master": master,
        "secret_file": str(cluster.folder / SECRET_FILE),
        "ssh_ports": (SSH_PORT, *random.sample(LISTENED, OTHER_SSH_PORTS)),
        "authorized_key": authorized_key,
        "lease": cluster.settings.lease,
        "lease_seconds": cluster.settings.lease_seconds,
        "register_seconds": waiting.seconds,
    }


def _make_secret(path: Path) -> bytes:
    """Make a secret, and write it as hexadecimal into a new file that only this user can read."""
    secret = secrets.token_bytes(SECRET_BYTES)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(f"{secret.hex()}\n")
    return secret


def _gather(
    rendezvous: Rendezvous,
    workers: Backend,
    cluster: Cluster,
    orders: Mapping[str, object],
    waiting: _Waiting,
    awaited: tuple[str, ...],
) -> tuple[Cluster, tuple[Pod, ...]]:
    """The cluster, and the pods of its awaited workers once all are ready, by address.

    `UserError` names a worker that has ended, or those that are missing in the end.
    """
    deadline = time.monotonic() + waiting.seconds
    count = len(awaited)
    replacements: set[str] = set()
    with progress("pods", "pods", count) as bar:
        while True:
            pods = rendezvous.gather(min(WATCH_SECONDS, deadline - time.monotonic()))
            if pods is not None:
                bar.update(count - bar.n)
                return cluster, pods
            registered = rendezvous.registered
            bar.update(len(registered) - bar.n)
            started = [worker for worker in workers.list() if worker.id in awaited]
            for worker in started:
                if not worker.has_ended:
                    continue
                is_new = worker.id in replacements
                if not _may_replace(workers, worker, waiting, is_new=is_new):
                    raise UserError(f"{_failed(cluster)}: {worker.description}")
                cluster, new_worker = _with_replacement(cluster, workers, worker, orders)
                rendezvous.forget(worker.id)
                others = [other for other in awaited if other != worker.id]
                awaited = (*others, new_worker)
                replacements.add(new_worker)
            missing = [worker for worker in started if worker.id not in registered]
            bar.set_postfix(Counter(worker.status for worker in missing if worker.status))
            if time.monotonic() >= deadline:
                number = f"{len(registered)} of {count} pods after {waiting.seconds:g} s"
                raise UserError(f"cluster {cluster.name}: {number}: {_why_not_ready(missing)}")


def _may_replace(workers: Backend, ended: Worker, waiting: _Waiting, *, is_new: bool) -> bool:
    """Whether a worker that has ended gets another in its place; one that is new gets none."""
    return waiting.replace_lost and not is_new and workers.may_replace(ended.id)


def _failed(cluster: Cluster) -> str:
    """The beginning of a message about a worker that has ended before it was a pod."""
    place = f"cluster {cluster.name}"
    # One that has pods is up, and only gets new ones.
    if cluster.pods:
        return place
    return f"{place} did not come up"


def _why_not_ready(missing: Sequence[Worker]) -> str:
    descriptions = [worker.description for worker in missing]
    return "; ".join(descriptions) or "they did not become ready"


# New workers in the place of lost ones


def replace_lost_pods(
    cluster: Cluster, names: Collection[str], seconds: float = math.inf
) -> Cluster:
    """Start a new worker for each of a cluster's pods that are lost, and wait until all of them are
    pods, with the names and places of the lost ones.

    Pods that another process has replaced meanwhile are left as they are now.

    Args:
        names: of the lost pods.
        seconds: time to wait at most, if that is less than new pods are waited for anyway.

    Returns:
        The cluster as its state says now.

    Raises:
        UserError: the cluster was taken down, a worker cannot be replaced, or its new one did not
            become ready. Then the cluster has the pods that it had, and the new workers are ended;
            those that CML, which may not answer, could not be told to end are kept in the cluster's
            state, and are ended with the cluster.
    """
    require_this_machine(cluster)
    seconds = min(seconds, _wait_seconds(None, cluster.backend))
    lost_pods = [pod for pod in cluster.pods if pod.name in names]
    with locked(cluster.folder, min(seconds, LOCK_SECONDS)):
        now = cluster.state_now()
        if now is None:
            raise UserError(f"cluster {cluster.name}: was taken down meanwhile")
        # Another run's launch may have been first.
        still_lost = [pod for pod in lost_pods if pod in now.pods]
        if not still_lost:
            return now
        return _with_new_pods(now, still_lost, _Waiting(seconds, replace_lost=False))


def _with_new_pods(cluster: Cluster, lost_pods: Sequence[Pod], waiting: _Waiting) -> Cluster:
    """The cluster, whose lock is held, with new pods in the place of lost ones; all of them or none
    are written."""
    workers = workers_of(cluster)
    for pod in lost_pods:
        if not workers.may_replace(pod.worker):
            reason = "is the session's own pod, which no worker can replace"
            raise UserError(f"cluster {cluster.name}: {pod.name} ({pod.address}) {reason}")
    authorized_key = None
    key_file = cluster.folder / f"{KEY_FILE}.pub"
    # A cluster without ssh has none.
    if key_file.is_file():
        authorized_key = " ".join(key_file.read_text(encoding="utf-8").split()[:2])
    address = workers.master_address()
    rendezvous = Rendezvous(secret=cluster.secret, count=len(lost_pods), address=address, port=None)
    with ExitStack() as undo, rendezvous:
        undo.callback(_withdraw_new_workers, workers, cluster)
        orders = _orders(cluster, (address, rendezvous.port), authorized_key, waiting)
        awaited: tuple[str, ...] = ()
        for pod in lost_pods:
            lost = Worker(pod.worker, True, f"{pod.name} ({pod.address}) is lost")
            cluster, new_worker = _with_replacement(cluster, workers, lost, orders)
            awaited = (*awaited, new_worker)
        cluster, new_pods = _gather(rendezvous, workers, cluster, orders, waiting, awaited)
        pods = {pod.name: pod for pod in cluster.pods}
        for lost_pod, new_pod in zip(lost_pods, new_pods, strict=True):
            pods[lost_pod.name] = replace(new_pod, name=lost_pod.name)
        cluster = replace(cluster, pods=tuple(pods.values()))
        write_access_files(cluster, workers.accounts())
        write_cluster(cluster)
        undo.pop_all()
    return cluster


def _withdraw_new_workers(workers: Backend, before: Cluster) -> None:
    """End the workers that a cluster has got and that are no pods, and write its state as it was
    before."""
    now = read_cluster(before.folder)
    if now is None:
        return
    new_workers = [worker for worker in now.workers if worker not in before.workers]
    with signals_deferred():
        workers.withdraw(new_workers)
        write_access_files(before, workers.accounts())
        write_cluster(before)


def _with_replacement(
    cluster: Cluster, workers: Backend, lost: Worker, orders: Mapping[str, object]
) -> tuple[Cluster, str]:
    """The cluster with a new worker in the place of a lost one, and the new one's id; `UserError`
    where there is none."""
    others = tuple(worker for worker in cluster.workers if worker != lost.id)
    with signals_deferred():
        ids = workers.replace(lost.id, orders)
        if ids:
            cluster = replace(cluster, workers=(*others, *ids))
            write_cluster(cluster)
    if workers.failure is not None or not ids:
        reason = workers.failure or "no worker was created in its place"
        raise UserError(f"cluster {cluster.name}: {lost.description}; {reason}")
    said_above(f"cluster {cluster.name}: {lost.description}; a new one takes its place")
    return cluster, ids[0]
