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
from zeropods.pods.gpus import HIDDEN, own_gpus, too_few_message
from zeropods.pods.hostfile import Host, read_hostfile
from zeropods.pods.leases import LEASES
from zeropods.pods.machine import name_of_process, this_machine
from zeropods.pods.processes import ending_in_order, signals_deferred
from zeropods.pods.rendezvous import Pod, Rendezvous
from zeropods.pods.ssh import has_account, make_key, pdsh_ssh_arguments
from zeropods.programs import LISTENED, find_program, required_programs
from zeropods.tables import progress, said_above

OTHER_SSH_PORTS = 7
"""Number of ports that a pod's sshd tries after `SSH_PORT`, in case all before were taken."""
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
        memory: GiB of memory of each CML worker.
        nvidia_gpu: GPUs of each CML worker; if not given, as many as here. With 0, pods of any
            backend train without GPUs.
        accelerator_label: CML's id of the kind of GPU that CML workers get, where there are
            several.
        resource_profile: CML's id of the size of CML workers, where it has such profiles.
        replace_lost: whether a CML worker that ends before all pods are ready is replaced by a new
            one, once, instead of ending the others.

    Raises:
        UserError: an argument is wrong, a hostfile needs ssh, a worker ended or never started, or
            the name is taken.
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
    cml_ids = {"accelerator_label": accelerator_label, "resource_profile": resource_profile}
    BACKENDS[backend_name].check_request(nvidia_gpu, **cml_ids)
    _check_choices(backend_name, lease, replace_lost=replace_lost)
    waiting = _Waiting(_wait_seconds(seconds, backend_name), replace_lost)
    # Without hosts there is a count, as `_hosts` has made sure.
    pod_count = len(hosts) or count or 0
    settings = Settings(
        count=pod_count,
        slots=slots,
        backend=backend_name,
        lease=lease,
        lease_seconds=lease_seconds or LEASES[lease],
        cpu=cpu,
        memory=memory,
        nvidia_gpu=own_gpus() if nvidia_gpu is None else nvidia_gpu,
        hosts=tuple(host.line() for host in hosts),
        ssh_config=None if ssh_config is None else str(Path(ssh_config).absolute()),
        gpus=_gpus_of_pods(backend_name, pod_count, slots, nvidia_gpu),
        **cml_ids,
    )
    folder = folder_of(name_of_process("kernel") if name is None else name)
    _check_programs(folder, hosts)
    remove_ended_clusters()
    with ending_in_order(), locked(folder):
        cluster_up = _cluster_up(folder, settings)
        cluster = cluster_up or _make(folder, settings, port, waiting)
    if lease == "kernel":
        # A cluster that was up before is not taken down with this process by this call.
        hold(cluster, end_at_exit=cluster_up is None)
    return cluster


def slots_per_pod(count: int) -> int:
    """Number of slots of each pod that `up(count)` starts: its GPUs, at least 1."""
    return BACKENDS[usual_backend()].slots_of_pods(count)


# What is asked for


def _check_numbers(nvidia_gpu: int | None, **positive: float | None) -> None:
    """Refuse a negative number of GPUs, and any of the other numbers, by their names in `up`, that
    is not positive and finite; None stands for one that was not given."""
    for parameter, number in positive.items():
        if number is not None and not 0 < number < math.inf:
            flag = parameter.replace("_", "-")
            raise UserError(f"--{flag} {number}; expected a positive number")
    if nvidia_gpu is not None and nvidia_gpu < 0:
        raise UserError(f"--nvidia-gpu {nvidia_gpu}; expected at least 0")


def _check_choices(backend: str, lease: str, *, replace_lost: bool) -> None:
    """Refuse an unknown kind of lease, and `replace_lost` where the backend cannot replace workers.
    Arguments as those of `up`."""
    if lease not in LEASES:
        raise UserError(f"lease {lease!r}: expected {' or '.join(LEASES)}")
    if replace_lost and not BACKENDS[backend].can_replace:
        raise UserError("--replace: is for CML workers; leave it out")


def _check_programs(folder: Path, hosts: tuple[Host, ...]) -> None:
    """Refuse, where there is pdsh, a cluster's folder whose path pdsh cannot take; and refuse hosts
    where there is no ssh."""
    if all(map(find_program, PROGRAMS_OF_PDSH)):
        pdsh_ssh_arguments(folder / SSH_CONFIG)
    if hosts:
        # Their workers are started over the user's own ssh.
        required_programs("ssh")


def _wait_seconds(seconds: float | None, backend: str) -> float:
    """Seconds within which all pods have to be ready: those that were asked for, else those of
    `POD_SECONDS` in the environment, else the backend's; `UserError` where the variable is no
    positive number."""
    if seconds is not None:
        return seconds
    text = os.environ.get(POD_SECONDS)
    if not text:
        return BACKENDS[backend].ready_seconds
    message = f"{POD_SECONDS}: {text!r}; expected a positive number of seconds"
    try:
        number = float(text)
    except ValueError:
        raise UserError(message) from None
    if not 0 < number < math.inf:
        raise UserError(message)
    return number


def _hosts(
    hostfile: str | Path | None,
    ssh_config: str | Path | None,
    count: int | None,
    slots: int | None,
    backend: str | None,
) -> tuple[Host, ...]:
    """The first `count` hosts of a hostfile, all of them where no count is given, and none where
    there is no hostfile. Arguments as those of `up`.

    Raises:
        UserError: an argument contradicts the hostfile or needs one that is not given, there are
            fewer hosts than `count`, or neither a hostfile nor a count is given.
    """
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
    """Refuse an ssh configuration, which only hosts of a hostfile need, and a missing count."""
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
    """The GPUs of each pod, as `Settings.gpus`; none where no GPUs were asked for. Arguments as
    those of `up`."""
    if nvidia_gpu == 0:
        return (HIDDEN,) * count
    return BACKENDS[backend].gpus_of_pods(count, slots)


def _cluster_up(folder: Path, settings: Settings) -> Cluster | None:
    """The cluster in this folder if all of its pods answer and it was started with these settings;
    None if there is none, or whatever is left of it can be cleared.

    Raises:
        UserError: it is another machine's, is up with other settings, or is partly up and in use.
    """
    cluster = read_cluster(folder)
    if cluster is None:
        return None
    require_this_machine(cluster)
    if not cluster.pods:
        return None
    statuses = cluster.statuses()
    ready_pods = [status for status in statuses if status.is_ready]
    changes = _changes(cluster.settings, settings)
    if len(ready_pods) == len(statuses) and not changes:
        return cluster
    pods_in_use = [status.pod for status in ready_pods if status.runs]
    if ready_pods and changes:
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
    """How new pods are waited for."""

    seconds: float
    """Time within which all of them have to be ready."""
    replace_lost: bool
    """Whether a worker that ends before all pods are ready gets a new one in its place."""


def _make(folder: Path, settings: Settings, port: int | None, waiting: _Waiting) -> Cluster:
    """Start all pods of a cluster and write its files in its folder, whose lock is held; end and
    remove them if anything goes wrong. A line on stderr says so where GPUs are hidden though
    nobody asked for that, and where pods are not reached over pdsh."""
    clear(folder)
    # The state is written first: it says what to clean up if this process does not finish.
    cluster = Cluster(folder=folder, settings=settings, machine=this_machine())
    claim(cluster)
    with ExitStack() as undo:
        undo.callback(clear, folder)
        cluster = _start(cluster, port, waiting)
        # All went well: nothing is undone.
        undo.pop_all()
    hides_gpus_as_asked = settings.nvidia_gpu == 0
    if cluster.hides_gpus and not hides_gpus_as_asked:
        reason = too_few_message(settings.count, settings.slots)
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

    Raises:
        UserError: a worker could not be created, or ended, or not all are ready in time; those that
            did start are left to the caller, who finds their ids in the state.
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
        # Looked at only now that the ids of those that did start are written down, by which they
        # are ended.
        if workers.failure is not None:
            raise UserError(f"cluster {cluster.name}: {workers.failure}")
        cluster, pods = _gather(rendezvous, workers, cluster, orders, waiting, cluster.workers)
        if settings.hosts:
            # Pods on hosts of one's own are named in the order of the hosts.
            pods = tuple(sorted(pods, key=lambda pod: cluster.workers.index(pod.worker)))
        named_pods = []
        for number, pod in enumerate(pods, start=1):
            named_pods.append(replace(pod, name=f"pod{number}"))
        cluster = replace(cluster, pods=tuple(named_pods))
        write_access_files(cluster, workers.accounts())
        write_cluster(cluster)
    return cluster


def _can_have_ssh(folder: Path) -> bool:
    """Whether the pods of a cluster with this folder can be reached over ssh from here: there are
    the programs, ssh's configuration can hold the path of the folder, and this user has an
    account."""
    has_programs = all(map(find_program, PROGRAMS_OF_SSH))
    is_path_plain = PLAIN.fullmatch(str(folder.absolute())) is not None
    return has_programs and is_path_plain and has_account()


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
    awaited_ids: tuple[str, ...],
) -> tuple[Cluster, tuple[Pod, ...]]:
    """Wait until workers of a cluster are pods; where `waiting` says so, start a new worker, once,
    in the place of one that ends meanwhile.

    Args:
        orders: for a new worker.
        awaited_ids: ids of the workers to wait for.

    Returns:
        The cluster, with the new workers in the place of those that ended; and the pods in the
        order of their addresses, without names.

    Raises:
        UserError: a worker has ended and gets no new one, or not all are ready in time; the message
            names those that are missing.
    """
    deadline = time.monotonic() + waiting.seconds
    count = len(awaited_ids)
    replacement_ids: set[str] = set()
    with progress("pods", "pods", count) as bar:
        while True:
            pods = rendezvous.gather(min(WATCH_SECONDS, deadline - time.monotonic()))
            if pods is not None:
                _require_all(pods, count, cluster)
                bar.update(count - bar.n)
                return cluster, pods
            registered_ids = rendezvous.registered
            bar.update(len(registered_ids) - bar.n)
            awaited = [worker for worker in workers.list() if worker.id in awaited_ids]
            for worker in awaited:
                if not worker.has_ended:
                    continue
                is_replacement = worker.id in replacement_ids
                if not _may_replace(workers, worker, waiting, is_replacement=is_replacement):
                    raise UserError(f"{_failure_prefix(cluster)}: {worker.description}")
                # First, so that the others are not told meanwhile that all are there.
                rendezvous.forget(worker.id)
                cluster, new_id = _replace_worker(cluster, workers, worker, orders)
                others = [other for other in awaited_ids if other != worker.id]
                awaited_ids = (*others, new_id)
                replacement_ids.add(new_id)
            missing = [worker for worker in awaited if worker.id not in registered_ids]
            bar.set_postfix(Counter(worker.status for worker in missing if worker.status))
            if time.monotonic() >= deadline:
                ready = f"{len(registered_ids)} of {count} pods after {waiting.seconds:g} s"
                raise UserError(f"cluster {cluster.name}: {ready}: {_why_not_ready(missing)}")


def _require_all(pods: Sequence[Pod], count: int, cluster: Cluster) -> None:
    """Refuse fewer pods than were waited for: one was forgotten just when the last one came, and
    the others have been told that all are there, so none can be waited for any more."""
    if len(pods) < count:
        reason = "a worker has ended just when the last pod was ready; try again"
        raise UserError(f"{_failure_prefix(cluster)}: {reason}")


def _may_replace(
    workers: Backend, ended: Worker, waiting: _Waiting, *, is_replacement: bool
) -> bool:
    """Whether a worker that has ended gets another in its place; one that took the place of another
    gets none."""
    return waiting.replace_lost and not is_replacement and workers.may_replace(ended.id)


def _failure_prefix(cluster: Cluster) -> str:
    """The beginning of a message about a worker that has ended before it was a pod."""
    prefix = f"cluster {cluster.name}"
    # A cluster that has pods is up, and only gets new ones.
    if cluster.pods:
        return prefix
    return f"{prefix} did not come up"


def _why_not_ready(missing: Sequence[Worker]) -> str:
    """What the workers that are no pods do, in words."""
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
        names: names of the lost pods.
        seconds: time to wait at most, if that is less than new pods are waited for anyway.

    Returns:
        The cluster as its state says now.

    Raises:
        UserError: the cluster is another machine's or was taken down, a worker cannot be replaced,
            or its new one did not become ready. Then the cluster has the pods that it had, and the
            new workers are ended; those that CML, which may not answer, could not be told to end
            are kept in the cluster's state, and are ended with the cluster.
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
    """Start new pods in the place of a cluster's lost ones, and return the cluster with them.

    The cluster's lock is held. Its state gets all of the new pods, or none: where one fails, with a
    `UserError`, all new workers are ended.
    """
    workers = workers_of(cluster)
    for pod in lost_pods:
        if not workers.may_replace(pod.worker):
            reason = "is the session's own pod, which no worker can replace"
            raise UserError(f"cluster {cluster.name}: {pod.name} ({pod.address}) {reason}")
    authorized_key = None
    key_file = cluster.folder / f"{KEY_FILE}.pub"
    # A cluster without ssh has none.
    if key_file.is_file():
        # Without the comment behind it.
        authorized_key = " ".join(key_file.read_text(encoding="utf-8").split()[:2])
    address = workers.master_address()
    rendezvous = Rendezvous(secret=cluster.secret, count=len(lost_pods), address=address, port=None)
    with ExitStack() as undo, rendezvous:
        undo.callback(_withdraw_new_workers, workers, cluster)
        orders = _orders(cluster, (address, rendezvous.port), authorized_key, waiting)
        new_ids: tuple[str, ...] = ()
        for pod in lost_pods:
            lost_worker = Worker(pod.worker, True, f"{pod.name} ({pod.address}) is lost")
            cluster, new_id = _replace_worker(cluster, workers, lost_worker, orders)
            new_ids = (*new_ids, new_id)
        cluster, new_pods = _gather(rendezvous, workers, cluster, orders, waiting, new_ids)
        pods = {pod.name: pod for pod in cluster.pods}
        # Any new pod may take any of these names: all of them are workers of one kind.
        for lost_pod, new_pod in zip(lost_pods, new_pods, strict=True):
            pods[lost_pod.name] = replace(new_pod, name=lost_pod.name)
        cluster = replace(cluster, pods=tuple(pods.values()))
        write_access_files(cluster, workers.accounts())
        write_cluster(cluster)
        undo.pop_all()
    return cluster


def _withdraw_new_workers(workers: Backend, before: Cluster) -> None:
    """End the workers that a cluster has got since `before`, and write its state and its files as
    they were; do nothing where the cluster was taken down. Where the backend raises an error, the
    state keeps the new workers, which then end with the cluster."""
    now = read_cluster(before.folder)
    if now is None:
        return
    new_workers = [worker for worker in now.workers if worker not in before.workers]
    with signals_deferred():
        workers.withdraw(new_workers)
        write_access_files(before, workers.accounts())
        write_cluster(before)


def _replace_worker(
    cluster: Cluster, workers: Backend, lost: Worker, orders: Mapping[str, object]
) -> tuple[Cluster, str]:
    """Start a new worker in the place of a lost one, write its id into the cluster's state, and
    tell the user.

    Returns:
        The cluster with the new worker, and the new one's id.

    Raises:
        UserError: the new worker could not be created.
    """
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
