"""A cluster: its pods, what is kept of it in `.zeropods/NAME/`, its lease, and its end."""

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
from zeropods.pods.backends.cml import CmlWorkers
from zeropods.pods.backends.hosts import OwnHosts
from zeropods.pods.backends.local import LocalWorkers, Settings
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
"""The name of a cluster that the shell starts without naming it."""
STATUS_SECONDS, LOCK_SECONDS = 2.0, 20.0
RENEW_SECONDS, RENEWALS_PER_LEASE = 5.0, 5
"""A lease is renewed every 5 s, or at least so often in its time: a few renewals may be lost before the lease is."""


@dataclass(frozen=True)
class PodStatus:
    """What a pod answers when it is asked."""

    pod: str
    address: str
    slots: int
    hostname: str
    status: str
    """`ready`, or `no answer` and why."""
    runs: dict[str, int] = field(default_factory=dict)
    """Number of processes by run."""
    lease_seconds_left: float | None = None
    """Seconds until its lease runs out; None where it does not answer."""

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self.status == "ready"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster as it is kept in its folder; it is up once it has pods, until `down` ends them."""

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
        """`local`, `cml`, or `hosts` of the user's own."""
        return self.settings.backend

    @property
    def shared_machine(self) -> bool:
        """Whether all pods are processes of this machine, among which its cores have to be divided."""
        return self.backend != "cml" and all(is_loopback(pod.address) for pod in self.pods)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Addresses and slots, in the hostfile's order."""
        return tuple(Host(pod.address, pod.slots) for pod in self.pods)

    @property
    def hostfile(self) -> Path:
        """The hostfile, in DeepSpeed's format."""
        return self.folder / HOSTFILE

    @property
    def ssh_config(self) -> Path:
        """The configuration of ssh and of pdsh's ssh: port, key and pinned host keys."""
        return self.folder / SSH_CONFIG

    @property
    def secret(self) -> bytes:
        """What agents and their master prove to each other."""
        return bytes.fromhex((self.folder / SECRET).read_text(encoding="ascii"))

    @property
    def agents(self) -> tuple[tuple[str, int], ...]:
        """Addresses and control ports of the agents."""
        return tuple((pod.address, pod.control_port) for pod in self.pods)

    def statuses(self, seconds: float = STATUS_SECONDS) -> Sequence[PodStatus]:
        """What each pod answers when asked, all at once."""
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
        """The pods and their state now."""
        return Table.of(map(asdict, self.statuses()), f"Cluster {self.name}")

    def check(self) -> Preflight:
        """What is found on every pod now: pods x checks, and below them the remedy of each check that is not ok."""
        return replace(self.preflight(expected_here()), title=f"Cluster {self.name}, checked")

    def preflight(self, expected: Expectation, pods: int | None = None) -> Preflight:
        """What is found on the first `pods` of them, or on all, that is not as expected."""
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
    """A cluster that is up: of this name, else the shell's, else the only one; `UserError` where there is none."""
    name = chosen_name() if name is None else name
    cluster = None if name is None else read_cluster(folder_of(name))
    if cluster is None or not cluster.pods:
        there = f"only {', '.join(c.name for c in clusters())}" if clusters() else "nor is another"
        call = "zeropods pods up --count N" + (f" --name {name}" if name not in (None, SHELL_NAME) else "")
        raise UserError(f"cluster {name or SHELL_NAME}: is not up, {there}; {call}")
    return cluster


def clusters() -> list[Cluster]:
    """All clusters of this home that are up."""
    return [found for name in names() if (found := read_cluster(folder_of(name))) and found.pods]


def known_cluster(hostfile: Path) -> Cluster | None:
    """A cluster whose own hostfile this is, or one that was brought up on these hosts and is not another launch's."""
    lines = tuple(host.line() for host in read_hostfile(hostfile))
    for cluster in clusters():
        if cluster.hostfile.resolve() == hostfile.resolve():
            return cluster
        is_theirs = cluster.settings.hosts == lines and cluster.settings.lease == "idle"
        if is_theirs and cluster.is_ready():
            return cluster
    return None


def chosen_name() -> str | None:
    """The cluster that is meant where none is named; None where there is none."""
    there = names()
    if SHELL_NAME in there or not there:
        return SHELL_NAME if there else None
    if len(there) > 1:
        raise UserError(f"clusters {', '.join(there)}: several are up; say which with --name")
    return there[0]


def workers_of(cluster: Cluster) -> LocalWorkers:
    """The workers whose records lie in a cluster's folder."""
    return BACKENDS[cluster.backend](cluster.folder, cluster.settings)


def expected_here() -> Expectation:
    """What pods need to be like this machine: its versions, and the training script of the working folder, if any."""
    scripts = (path.name for path in Path.cwd().glob("textsql_train.py"))
    return Expectation.of_this_machine(Path.cwd(), tuple(scripts))


# What is kept of a cluster


def folder_of(name: str) -> Path:
    """The folder of a cluster; `UserError` for a name that is none."""
    if not NAME.fullmatch(name):
        raise UserError(f"cluster name {name!r}: expected 1 to 40 letters, digits, '-' or '_', a letter or digit first")
    return home() / name


def names() -> list[str]:
    """Names of all clusters that have a folder, whether they are complete or not."""
    return sorted(path.parent.name for path in home().glob(f"*/{STATE}") if NAME.fullmatch(path.parent.name))


def write_cluster(cluster: Cluster) -> None:
    """Write a cluster's state; whoever reads it meanwhile sees the old one."""
    files.write_json(cluster.folder / STATE, {**asdict(cluster), "folder": str(cluster.folder)})


def read_cluster(folder: Path) -> Cluster | None:
    """The cluster of a folder, None where there is none; `UserError` for a file that is not one of ours."""
    path = folder / STATE
    if not path.is_file():
        return None
    remedy = f"this is not a cluster's state; end its pods and remove {folder}"
    return replace(files.validated(Cluster, path, path.read_bytes(), remedy), folder=folder)


@contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a cluster's folder, made with mode 700 where there is none; `UserError` where another process holds it.

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
                    line = f"cluster {folder.name}: another process starts or ends it; wait for that one"
                    raise UserError(line) from None
            time.sleep(0.1)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            yield
        finally:
            # Nothing came to be in it: then it was only made to be locked.
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


# The files by which ssh, pdsh and DeepSpeed reach the pods


def write_files(cluster: Cluster, users: Mapping[str, str]) -> None:
    """Write what lets ssh, pdsh and DeepSpeed reach the pods of a cluster, with their host keys pinned.

    Args:
        users: the account at an address, where it is not this user's.
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
    """What DeepSpeed's own command needs in order to reach the pods as pinned."""
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": pdsh_ssh_arguments(cluster.ssh_config)}


def deepspeed_argv(cluster: Cluster) -> list[str]:
    """DeepSpeed's own command, up to the script.

    Its ssh check is left out because it uses neither port nor key of ours, and knows no time limit; one
    host is reached by ssh only if that is forced.
    """
    hosts = cluster.hosts
    return [
        str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(cluster.hostfile), "--launcher", "pdsh",
        "--no_ssh_check", *(["--force_multi"] if len(hosts) == 1 else []), "--num_nodes", str(len(hosts)),
        "--num_gpus", str(min(host.slots for host in hosts)), "--master_addr", hosts[0].address,
    ]  # fmt: skip


# The lease of a cluster, renewed by the process that started it: when that is gone, the pods end


_held: dict[str, threading.Event] = {}
"""By the names of the clusters whose lease this process renews: ends that."""


def hold(cluster: Cluster, *, end_at_exit: bool) -> None:
    """Renew a cluster's lease until it is released or this process ends.

    A thread does it: a notebook's cell may keep the kernel busy.

    Args:
        end_at_exit: take it down when this process ends in order.
    """
    release(cluster.name)
    released, owner, secret = threading.Event(), os.getpid(), cluster.secret
    _held[cluster.name] = released

    def renew() -> None:
        # At once: who asks for a standing cluster again and again must not keep it waiting for its next renewal.
        while not released.is_set():
            # Who uses a pod that is lost finds that out; this only has to go on asking, also when the main thread has
            # ended and no other thread can be begun.
            asyncio.run(ask_agents(cluster.agents, secret, {"do": "renew"}, RENEW_SECONDS))
            released.wait(min(RENEW_SECONDS, cluster.settings.lease_seconds / RENEWALS_PER_LEASE))

    def down_at_exit() -> None:
        # A forked child does not own it.
        if os.getpid() == owner:
            cluster.down()

    threading.Thread(target=renew, name="zeropods-lease", daemon=True).start()
    if end_at_exit:
        atexit.register(down_at_exit)


def release(name: str) -> None:
    """Renew a cluster's lease no longer."""
    if name in _held:
        _held.pop(name).set()


# The end of clusters: their pods, their keys, and what is left where `up` was killed


def take_down(name: str, pods: tuple[Pod, ...] | None = None) -> bool:
    """End a cluster, or what is left of one, and remove its files; returns whether there was anything.

    Args:
        pods: only if it still has these pods: the name may be another cluster's by now.
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
    """End what a cluster's folder speaks of and empty the folder, whose lock is held; an empty one stays as it is."""
    cluster = read_cluster(folder)
    if cluster is not None:
        with deferred():
            workers_of(cluster).stop(cluster.workers)
            for path in sorted(folder.iterdir(), key=lambda path: path.name == STATE):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif any(folder.iterdir()):
        raise UserError(f"{folder}: holds something that is no cluster; choose another name")


def sweep() -> None:
    """Remove the remains of clusters whose workers were processes of this machine, and have all ended.

    Their keys open nothing any more.
    """
    for name in names():
        # What another process holds, or what is no cluster of ours, is left alone.
        with suppress(UserError), locked(folder_of(name)):
            cluster = read_cluster(folder_of(name))
            if cluster and cluster.backend != "cml" and all(w.has_ended for w in workers_of(cluster).list()):
                clear(cluster.folder)
