"""A cluster: its pods, its files in `.zeropods/NAME/`, its lease, and its end."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import home
from zeropods.pods.agent import read_secret
from zeropods.pods.backends.cml import CmlWorkers
from zeropods.pods.backends.hosts import OwnHosts
from zeropods.pods.backends.local import LocalWorkers, Settings
from zeropods.pods.gpus import HIDDEN
from zeropods.pods.hostfile import Host, is_loopback, read_hostfile, write_hostfile
from zeropods.pods.preflight import Expectation, Preflight, preflight
from zeropods.pods.processes import deferred
from zeropods.pods.rendezvous import Pod
from zeropods.pods.ssh import account, known_hosts_text, pdsh_ssh_arguments, ssh_config_text
from zeropods.pods.wire import WireError, ask_agents, ask_all
from zeropods.tables import Table

BACKENDS: dict[str, Callable[[Path, Settings], LocalWorkers]] = {
    "local": LocalWorkers,
    "cml": CmlWorkers,
    "hosts": OwnHosts,
}
STATE, HOSTFILE, SSH_CONFIG, KNOWN_HOSTS = "state.json", "hostfile", "ssh_config", "known_hosts"
KEY, SECRET = "id_ed25519", "secret"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
SHELL_NAME = "pods"
"""Name of a cluster that is started from the shell without a name."""
STATUS_SECONDS, LOCK_SECONDS = 2.0, 20.0
RENEW_SECONDS, RENEWALS_PER_LEASE = 5.0, 5
"""Longest time between two renewals of a lease, in seconds, and least number of renewals in it: a few may be lost."""


@dataclass(frozen=True)
class PodStatus:
    """A pod's answer when it is asked for its status."""

    pod: str
    address: str
    slots: int
    hostname: str
    status: str
    """`ready`, or `no answer` and the reason."""
    runs: dict[str, int] = field(default_factory=dict)
    """Number of processes of each run, by the run's name."""
    lease_seconds_left: float | None = None
    """Seconds until its lease runs out; None where it does not answer or has no lease yet."""

    @property
    def is_ready(self) -> bool:
        """Whether the pod answers."""
        return self.status == "ready"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster as it is stored in its folder; it is up from the time it has pods until `down` ends them."""

    folder: Path
    settings: Settings
    workers: tuple[str, ...] = ()
    """Ids of the workers that were started."""
    pods: tuple[Pod, ...] = ()

    @property
    def name(self) -> str:
        """The name of the cluster and of its folder."""
        return self.folder.name

    @property
    def backend(self) -> str:
        """Where the pods come from: `local`, `cml`, or `hosts` for the user's own hosts."""
        return self.settings.backend

    @property
    def shared_machine(self) -> bool:
        """Whether all pods are processes of this machine, so that its cores have to be divided among them."""
        return self.backend != "cml" and all(is_loopback(pod.address) for pod in self.pods)

    @property
    def hides_gpus(self) -> bool:
        """Whether its pods train without GPUs although there may be some."""
        return HIDDEN in self.settings.gpus

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Addresses and slots of the pods, in the hostfile's order."""
        return tuple(Host(pod.address, pod.slots) for pod in self.pods)

    @property
    def hostfile(self) -> Path:
        """Path of the hostfile, which is in DeepSpeed's format."""
        return self.folder / HOSTFILE

    @property
    def ssh_config(self) -> Path:
        """Path of the configuration for ssh and for pdsh's ssh: port, key and pinned host keys."""
        return self.folder / SSH_CONFIG

    @property
    def secret(self) -> bytes:
        """The secret; agents and their master prove to each other that they know it."""
        return read_secret(self.folder / SECRET)

    @property
    def agents(self) -> tuple[tuple[str, int], ...]:
        """Addresses and control ports of the agents."""
        return tuple((pod.address, pod.control_port) for pod in self.pods)

    def statuses(self, seconds: float = STATUS_SECONDS) -> Sequence[PodStatus]:
        """The status of each pod; all pods are asked at once."""
        answers = ask_all(self.agents, self.secret, {"do": "status"}, seconds)
        found = []
        for pod, answer in zip(self.pods, answers, strict=True):
            told = (
                {"status": f"no answer: {answer}"} if isinstance(answer, WireError) else {"status": "ready", **answer}
            )
            found.append(PodStatus(pod.name, pod.address, pod.slots, pod.hostname, **told))
        return found

    def is_ready(self) -> bool:
        """Whether all pods answer now."""
        return all(pod.is_ready for pod in self.statuses())

    def list(self) -> Table:
        """Table of the pods and their current state."""
        return Table.of(map(asdict, self.statuses()), f"Cluster {self.name}")

    def check(self) -> Preflight:
        """Check every pod now; shown as pods x checks, and below them the remedy for each check that is not ok."""
        return replace(self.preflight(expected_here()), title=f"Cluster {self.name}, checked")

    def preflight(self, expected: Expectation, pods: int | None = None) -> Preflight:
        """Check on the first `pods` pods, or on all, whether everything is as expected."""
        names = [pod.name for pod in self.pods[:pods]]
        return preflight(self.hosts[:pods], expected, names=names, ssh_config=self.ssh_config)

    def down(self) -> None:
        """End all pods and remove all files; a second call does nothing."""
        take_down(self.name, self.pods)

    def _repr_html_(self) -> str:
        title = f"Cluster {self.name}: {len(self.pods)} pods, ssh port {self.pods[0].ssh_port}"
        shown = ({"pod": p.name, "address": p.address, "slots": p.slots, "hostname": p.hostname} for p in self.pods)
        return Table.of(shown, title).to_html()


def find(name: str | None = None) -> Cluster:
    """The cluster of this name that is up; without a name the shell's, else the only one. `UserError` where none is."""
    name = chosen_name() if name is None else name
    cluster = None if name is None else read_cluster(folder_of(name))
    if cluster is None or not cluster.pods:
        there = f"; these are: {', '.join(c.name for c in clusters())}" if clusters() else ", and no other cluster is"
        call = "zeropods pods up --count N" + (f" --name {name}" if name not in (None, SHELL_NAME) else "")
        raise UserError(f"cluster {name or SHELL_NAME}: is not up{there}; {call}")
    return cluster


def clusters() -> list[Cluster]:
    """All clusters below `home()` that are up."""
    return [found for name in names() if (found := read_cluster(folder_of(name))) and found.pods]


def known_cluster(hostfile: Path) -> Cluster | None:
    """The cluster whose own hostfile this is, or one that is up on its hosts and is not another launch's; else None."""
    lines = tuple(host.line() for host in read_hostfile(hostfile))
    for cluster in clusters():
        if cluster.hostfile.resolve() == hostfile.resolve():
            return cluster
        is_theirs = cluster.settings.hosts == lines and cluster.settings.lease == "idle"
        if is_theirs and cluster.is_ready():
            return cluster
    return None


def chosen_name() -> str | None:
    """Name of the cluster that is meant where none is named; None where there is no cluster."""
    there = names()
    if SHELL_NAME in there or not there:
        return SHELL_NAME if there else None
    if len(there) > 1:
        raise UserError(f"clusters {', '.join(there)}: several are up; say which with --name")
    return there[0]


def workers_of(cluster: Cluster) -> LocalWorkers:
    """The workers of a cluster, as an object of its backend."""
    return BACKENDS[cluster.backend](cluster.folder, cluster.settings)


def expected_here() -> Expectation:
    """What pods need to match this machine: its versions, and the training script in the working folder, if any."""
    scripts = (path.name for path in Path.cwd().glob("textsql_train.py"))
    return Expectation.of_this_machine(Path.cwd(), tuple(scripts))


# What is stored about a cluster


def folder_of(name: str) -> Path:
    """The folder of a cluster; `UserError` for an invalid name."""
    if not NAME.fullmatch(name):
        raise UserError(f"cluster name {name!r}: expected 1 to 40 letters, digits, '-' or '_', a letter or digit first")
    return home() / name


def names() -> list[str]:
    """Names of all clusters that have a state file in their folder, whether they are complete or not."""
    return sorted(path.parent.name for path in home().glob(f"*/{STATE}") if NAME.fullmatch(path.parent.name))


def write_cluster(cluster: Cluster) -> None:
    """Write a cluster's state; a process that reads it meanwhile sees the old one."""
    files.write_json(cluster.folder / STATE, {**asdict(cluster), "folder": str(cluster.folder)})


def read_cluster(folder: Path) -> Cluster | None:
    """The cluster of a folder, None where there is none; `UserError` where its state file is not one of ours."""
    path = folder / STATE
    if not path.is_file():
        return None
    remedy = f"this is not a cluster's state; end its pods and remove {folder}"
    return replace(files.validated(Cluster, path, path.read_bytes(), remedy), folder=folder)


@contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Lock a cluster's folder, made with mode 700 if missing; `UserError` if another process holds it after `seconds`.

    The lock is a name in the abstract namespace (unix(7)): it leaves no file, and ends with the process that holds it.
    """
    deadline = time.monotonic() + seconds
    name = f"\0zeropods-{hashlib.sha256(os.fsencode(folder)).hexdigest()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        while True:
            try:
                lock.bind(name)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    line = f"cluster {folder.name}: another process is starting or ending it; wait for it to finish"
                    raise UserError(line) from None
            time.sleep(0.1)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            yield
        finally:
            # An empty folder is removed: it was only created to be locked, or its cluster has been ended.
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


# The files with which ssh, pdsh and DeepSpeed reach the pods


def write_files(cluster: Cluster, users: Mapping[str, str]) -> None:
    """Write the files that let ssh, pdsh and DeepSpeed reach the pods of a cluster, with their host keys pinned.

    Args:
        users: accounts by address; an address without one uses this user's.
    """
    folder = cluster.folder
    key, known_hosts = folder / KEY, folder / KNOWN_HOSTS
    config = []
    for pod in cluster.pods:
        user = users.get(pod.address) or account()
        config.append(ssh_config_text([pod.address], pod.ssh_port, key, known_hosts, user))
    files.write_text(known_hosts, known_hosts_text((p.address, p.ssh_port, p.host_key) for p in cluster.pods))
    files.write_text(folder / SSH_CONFIG, "".join(config))
    write_hostfile(folder / HOSTFILE, cluster.hosts)


def deepspeed_environment(cluster: Cluster) -> dict[str, str]:
    """Environment variables with which DeepSpeed's own command reaches the pods, with their host keys pinned."""
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": pdsh_ssh_arguments(cluster.ssh_config)}


def deepspeed_argv(cluster: Cluster) -> list[str]:
    """Argument list of DeepSpeed's own command, up to the script.

    Its ssh check is left out because it uses neither our port nor our key, and has no timeout; a single host is reached
    over ssh only if that is forced.
    """
    hosts = cluster.hosts
    return [
        str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(cluster.hostfile), "--launcher", "pdsh",
        "--no_ssh_check", *(["--force_multi"] if len(hosts) == 1 else []), "--num_nodes", str(len(hosts)),
        "--num_gpus", str(min(host.slots for host in hosts)), "--master_addr", hosts[0].address,
    ]  # fmt: skip


# A `kernel` lease is renewed by the process that called `up`: when that process is gone, the pods end


_held: dict[str, threading.Event] = {}
"""Events that end the renewal of a lease, by the names of the clusters whose leases this process renews."""


def hold(cluster: Cluster, *, end_at_exit: bool) -> None:
    """Renew a cluster's lease until it is released or this process ends.

    A thread does this, because a notebook's cell may keep the kernel busy.

    Args:
        end_at_exit: whether to take the cluster down when this process exits normally.
    """
    release(cluster.name)
    released, owner, secret = threading.Event(), os.getpid(), cluster.secret
    _held[cluster.name] = released

    def renew() -> None:
        # The first renewal comes at once: repeated calls for a standing cluster must not put its next renewal off.
        while not released.is_set():
            # Whoever uses a lost pod will notice; this loop only has to go on asking, even when the main thread has
            # ended and no other thread can be started.
            asyncio.run(ask_agents(cluster.agents, secret, {"do": "renew"}, RENEW_SECONDS))
            released.wait(min(RENEW_SECONDS, cluster.settings.lease_seconds / RENEWALS_PER_LEASE))

    def down_at_exit() -> None:
        # A forked child does not own the cluster.
        if os.getpid() == owner:
            cluster.down()

    threading.Thread(target=renew, name="zeropods-lease", daemon=True).start()
    if end_at_exit:
        atexit.register(down_at_exit)


def release(name: str) -> None:
    """Stop renewing a cluster's lease."""
    if name in _held:
        _held.pop(name).set()


# The end of clusters: their pods, their keys, and what is left where `up` was killed


def take_down(name: str, pods: tuple[Pod, ...] | None = None) -> bool:
    """End a cluster, or what is left of one, and remove its files; return whether there was anything to end.

    Args:
        pods: end it only if it still has these pods, since the name may be another cluster's by now.
    """
    folder = folder_of(name)
    if not folder.is_dir():
        release(name)
        return False
    with locked(folder, LOCK_SECONDS):
        cluster = read_cluster(folder)
        if cluster is None or pods not in (None, cluster.pods):
            return False
        release(name)
        clear(folder)
    return True


def clear(folder: Path) -> None:
    """End the cluster of a folder, whose lock is held, and empty the folder; an empty folder stays as it is."""
    cluster = read_cluster(folder)
    if cluster is not None:
        with deferred():
            workers_of(cluster).stop(cluster.workers)
            for path in sorted(folder.iterdir(), key=lambda path: path.name == STATE):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty and holds no cluster; choose another name")


def sweep() -> None:
    """Remove what is left of clusters whose workers were processes of this machine and have all ended.

    Their keys no longer give access to anything.
    """
    for name in names():
        # A folder that another process holds, or that is not a cluster of ours, is left alone.
        with suppress(UserError), locked(folder_of(name)):
            cluster = read_cluster(folder_of(name))
            if cluster and cluster.backend != "cml" and all(w.has_ended for w in workers_of(cluster).list()):
                clear(cluster.folder)
