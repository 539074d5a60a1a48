"""A cluster: its pods, its files in `.zeropods/NAME/`, its lease, and its end."""

from __future__ import annotations

import asyncio
import atexit
import errno
import hashlib
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import home
from zeropods.pods.agent import read_secret
from zeropods.pods.backends import BACKEND_NAMES
from zeropods.pods.backends.base import Backend, Settings
from zeropods.pods.backends.cml import CmlWorkers
from zeropods.pods.backends.hosts import OwnHosts
from zeropods.pods.backends.local import LocalWorkers
from zeropods.pods.gpus import HIDDEN
from zeropods.pods.hostfile import Host, read_hostfile, write_hostfile
from zeropods.pods.machine import LONG_SILENCE_SECONDS, Machine, seconds_of_silence, this_machine
from zeropods.pods.preflight import Expectation, Preflight, preflight, preflight_by_agents
from zeropods.pods.processes import signals_deferred
from zeropods.pods.rendezvous import Pod
from zeropods.pods.ssh import account, known_hosts_text, pdsh_ssh_arguments, ssh_config_text
from zeropods.pods.wire import Message, WireError, ask_agents, ask_all
from zeropods.programs import find_program
from zeropods.tables import Table

BACKENDS: dict[str, type[Backend]] = {
    "local": LocalWorkers,
    "cml": CmlWorkers,
    "hosts": OwnHosts,
}
"""The backends by name."""
STATE_FILE = "state.json"
HOSTFILE = "hostfile"
SSH_CONFIG = "ssh_config"
KNOWN_HOSTS = "known_hosts"
KEY_FILE = "id_ed25519"
SECRET_FILE = "secret"
PROGRAMS_OF_PDSH = ("pdsh", "ssh")
"""Programs that a launch over pdsh needs here; its pods need sshd."""
CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
SHELL_NAME = "pods"
"""Name of a cluster that is started from the shell without a name."""
STATUS_SECONDS = 2.0
"""Seconds that agents have to answer when they are asked how they are, or told to end."""
LOCK_SECONDS = 20.0
"""Seconds to wait for another process that has locked a cluster, where waiting makes sense."""
LOCK_PAUSE_SECONDS = 0.1
END_PAUSE_SECONDS = 0.1
"""Seconds between two looks whether pods that were told to end have ended."""
END_SECONDS = 20.0
"""Longest time in seconds to wait until they have."""
LEASE_RENEWAL_SECONDS = 5.0
"""Longest time between two renewals of a lease."""
RENEWALS_PER_LEASE = 5
"""Least number of renewals in the time of a lease: a few may be lost."""


class UnknownWorkers(LocalWorkers):
    """Stands for a backend that this process does not know: only its class is asked, and none of
    its workers is started or ended."""

    can_be_killed = False
    network = None


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
    """A cluster as it is stored in its folder; it is up from the time it has pods until `down` ends
    them."""

    folder: Path
    settings: Settings
    workers: tuple[str, ...] = ()
    """Ids of the workers that were started."""
    pods: tuple[Pod, ...] = ()
    machine: Machine
    """The machine on which it was started."""

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
        """Whether all pods are processes of this machine, so that its cores have to be divided
        among them."""
        addresses = (pod.address for pod in self.pods)
        return self.backend_class.shares_this_machine(addresses)

    @property
    def backend_class(self) -> type[Backend]:
        """What is known of its backend.

        One that this process does not know, of another version or of a test, counts as processes
        of this machine, as most backends are.
        """
        return BACKENDS.get(self.backend, UnknownWorkers)

    @property
    def network(self) -> str:
        """What the network between the pods is called."""
        return self.backend_class.network or self.backend

    @property
    def is_elsewhere(self) -> bool:
        """Whether another machine that shares this folder, such as another session of a CML
        project, started it."""
        return self.machine.id != this_machine().id

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
    def secret_file(self) -> Path:
        """Path of the file with the secret, which only this user can read."""
        return self.folder / SECRET_FILE

    @property
    def secret(self) -> bytes:
        """The secret; agents and their master prove to each other that they know it."""
        return read_secret(self.secret_file)

    @property
    def agents(self) -> tuple[tuple[str, int], ...]:
        """Addresses and control ports of the agents."""
        return tuple((pod.address, pod.control_port) for pod in self.pods)

    def why_not_pdsh(self) -> str | None:
        """Why its pods cannot be reached from here over pdsh, so that their agents start what runs
        on them; None where they can."""
        missing = [f"no {name}" for name in PROGRAMS_OF_PDSH if find_program(name) is None]
        if missing:
            return f"there is {' and '.join(missing)} here"
        without_sshd = [pod.name for pod in self.pods if pod.ssh_port is None]
        if without_sshd:
            return f"there is no sshd on {', '.join(without_sshd)}"
        return None

    def statuses(self, seconds: float = STATUS_SECONDS) -> Sequence[PodStatus]:
        """The status of each pod, all of which are asked at once; `UserError` where the cluster's
        secret is gone."""
        answers = ask_all(self.agents, self.secret, {"do": "status"}, seconds)
        statuses = []
        for pod, answer in zip(self.pods, answers, strict=True):
            fields: Message
            if isinstance(answer, WireError):
                fields = {"status": f"no answer: {answer}"}
            else:
                # The agent's answer has the other fields, see `Leases.status`.
                fields = {"status": "ready", **answer}
            statuses.append(PodStatus(pod.name, pod.address, pod.slots, pod.hostname, **fields))
        return statuses

    def state_now(self) -> Cluster | None:
        """Read the cluster's state again, since a process that restarts a run may have replaced
        some of its pods; None where it was taken down, or its name is another cluster's by now."""
        now = read_cluster(self.folder)
        if now is not None and _is_same_cluster(now, self.pods):
            return now
        return None

    def now(self) -> Cluster:
        """The cluster as `state_now` has it; this one where there is none, or its state cannot be
        read."""
        with suppress(UserError, OSError):
            return self.state_now() or self
        return self

    def is_ready(self) -> bool:
        """Whether all pods answer now."""
        return all(pod.is_ready for pod in self.now().statuses())

    def list(self) -> Table:
        """Table of the pods and their current state."""
        return Table.of(map(asdict, self.now().statuses()), f"Cluster {self.name}")

    def check(self) -> Preflight:
        """Check every pod now; shown as pods x checks, and below them the remedy for each check
        that is not ok."""
        checked = self.now().preflight(expected_here())
        return replace(checked, title=f"Cluster {self.name}, checked")

    def preflight(
        self, expected: Expectation, pods: int | None = None, *, over_ssh: bool | None = None
    ) -> Preflight:
        """Check on the first `pods` pods, or on all, whether everything is as expected.

        Args:
            pods: number of pods to check; if not given, all.
            over_ssh: whether to check over ssh or through the agents; if not given, over ssh where
                pdsh reaches the pods.
        """
        names = [pod.name for pod in self.pods[:pods]]
        hosts = self.hosts[:pods]
        if over_ssh is None:
            over_ssh = self.why_not_pdsh() is None
        if over_ssh:
            return preflight(hosts, expected, names=names, ssh_config=self.ssh_config)
        agents = self.agents[:pods]
        return preflight_by_agents(hosts, expected, agents, self.secret, names=names)

    def down(self) -> None:
        """End all pods and remove all files; a second call does nothing."""
        take_down(self.name, self.pods)

    def _repr_html_(self) -> str:
        title = f"Cluster {self.name}: {len(self.pods)} pods"
        rows = []
        for pod in self.pods:
            row = {
                "pod": pod.name,
                "address": pod.address,
                "slots": pod.slots,
                "hostname": pod.hostname,
                "ssh port": pod.ssh_port or "-",
            }
            rows.append(row)
        return Table.of(rows, title).to_html()


def find(name: str | None = None) -> Cluster:
    """The cluster of this name that is up.

    Args:
        name: if not given, the shell's cluster, else the only one of this machine.

    Raises:
        UserError: there is none, or without a name there are several.
    """
    if name is None:
        name = chosen_name()
    cluster = None
    if name is not None:
        cluster = read_cluster(folder_of(name))
    if cluster is not None and cluster.pods:
        return cluster
    names_up = ", ".join(shown_name(other) for other in clusters())
    others = f"; these are: {names_up}" if names_up else ", and no other cluster is"
    command = "zeropods pods up --count N"
    if name not in (None, SHELL_NAME):
        command += f" --name {name}"
    raise UserError(f"cluster {name or SHELL_NAME}: is not up{others}; {command}")


def shown_name(cluster: Cluster) -> str:
    """Its name, and its machine where that is another one."""
    if cluster.is_elsewhere:
        return f"{cluster.name} (of {cluster.machine.hostname})"
    return cluster.name


def clusters() -> list[Cluster]:
    """All clusters below `home()` that are up, those of other machines included."""
    read = [read_cluster(folder_of(name)) for name in names()]
    return [cluster for cluster in read if cluster is not None and cluster.pods]


def known_cluster(hostfile: Path) -> Cluster | None:
    """The cluster whose own hostfile this is, or one that was started on exactly these hosts and
    whose pods all answer; else None. One that ends with the process that started it, as a launch's
    does, is left to that process."""
    lines = tuple(host.line() for host in read_hostfile(hostfile))
    for cluster in clusters():
        if cluster.hostfile.resolve() == hostfile.resolve():
            return cluster
        has_these_hosts = cluster.settings.hosts == lines
        outlives_its_starter = cluster.settings.lease == "idle"
        if has_these_hosts and outlives_its_starter and cluster.is_ready():
            return cluster
    return None


def chosen_name() -> str | None:
    """Name of the cluster of this machine that is meant where none is named: the shell's, else the
    only one; None where there is no cluster, and `UserError` where there are several."""
    candidates = names_here()
    if not candidates:
        return None
    if SHELL_NAME in candidates:
        return SHELL_NAME
    if len(candidates) > 1:
        raise UserError(f"clusters {', '.join(candidates)}: several are up; say which with --name")
    return candidates[0]


def workers_of(cluster: Cluster) -> Backend:
    """The workers of a cluster, as an object of its backend; `UserError` where this process does
    not know the backend."""
    if cluster.backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise UserError(
            f"cluster {cluster.name}: its backend {cluster.backend!r} is unknown; expected one of "
            f"{known}: end it with the version of zeropods that started it"
        )
    return BACKENDS[cluster.backend](cluster.folder, cluster.settings)


def usual_backend() -> str:
    """Name of the backend from which pods come where none is named and there is no hostfile."""
    for name, backend in BACKENDS.items():
        if backend.is_for_here():
            return name
    return BACKEND_NAMES[0]


def expected_here() -> Expectation:
    """What pods need to match this machine: its versions, and the training script in the working
    folder, if any."""
    scripts = tuple(path.name for path in Path.cwd().glob("textsql_train.py"))
    return Expectation.of_this_machine(Path.cwd(), scripts)


# What is stored about a cluster


def folder_of(name: str) -> Path:
    """The folder of a cluster; `UserError` for an invalid name."""
    if not CLUSTER_NAME.fullmatch(name):
        expected = "expected 1 to 40 letters, digits, '-' or '_', a letter or digit first"
        raise UserError(f"cluster name {name!r}: {expected}")
    return home() / name


def names() -> list[str]:
    """Names of all clusters that have a state file in their folder, whether they are complete or
    not."""
    folders = [path.parent.name for path in home().glob(f"*/{STATE_FILE}")]
    return sorted(name for name in folders if CLUSTER_NAME.fullmatch(name))


def names_here() -> list[str]:
    """The names that `names` returns, without those of other machines' clusters."""
    of_this_machine = []
    for name in names():
        cluster = None
        # A file that is not a state is listed, and reported by whoever reads it next.
        with suppress(UserError):
            cluster = read_cluster(folder_of(name))
        if cluster is None or not cluster.is_elsewhere:
            of_this_machine.append(name)
    return of_this_machine


def claim(cluster: Cluster) -> None:
    """Write the first state of a cluster, whose folder is empty; `UserError` where another machine
    was faster.

    A lock does not keep other machines out. So a new folder with the state in it is renamed to the
    cluster's: a rename replaces an empty folder and no other, so that only one machine succeeds.
    """
    folder = cluster.folder
    new_folder = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        files.write_json(new_folder / STATE_FILE, as_stored(cluster))
        os.rename(new_folder, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        reason = "another machine is starting it"
        raise UserError(f"cluster {folder.name}: {reason}; take another name") from None
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)


def write_cluster(cluster: Cluster) -> None:
    """Write a cluster's state; a process that reads it meanwhile sees the old one."""
    files.write_json(cluster.folder / STATE_FILE, as_stored(cluster))


def as_stored(cluster: Cluster) -> dict[str, object]:
    """A cluster as its state file holds it."""
    return {**asdict(cluster), "folder": str(cluster.folder)}


def read_cluster(folder: Path) -> Cluster | None:
    """The cluster of a folder, None where there is none; `UserError` where its state file is not
    one of ours."""
    path = folder / STATE_FILE
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    remedy = f"this is not a cluster's state; end its pods and remove {folder}"
    cluster = files.validated(Cluster, path, content, remedy)
    # Another machine may have the same folder at another path.
    return replace(cluster, folder=folder)


@contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Lock a cluster's folder for the block, and make it with mode 700 if it is missing;
    `UserError` if another process still holds it after `seconds`.

    The lock is a name in the abstract namespace (unix(7)): it leaves no file, and ends with the
    process that holds it. It keeps other processes of this machine out, but none of another
    machine: whose cluster it is, its state says.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        _take_lock(lock, folder, seconds)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            yield
        finally:
            # An empty folder is removed: it was only created to be locked, or its cluster has been
            # ended. Another machine may be first, or put its own cluster there meanwhile.
            with suppress(OSError):
                folder.rmdir()


def _take_lock(lock: socket.socket, folder: Path, seconds: float) -> None:
    """Give a socket the name that stands for a folder, as soon as no other process has it;
    `UserError` where one still has it after `seconds`."""
    deadline = time.monotonic() + seconds
    name = f"\0zeropods-{hashlib.sha256(os.fsencode(folder)).hexdigest()}"
    while True:
        try:
            lock.bind(name)
            return
        except OSError:
            if time.monotonic() >= deadline:
                reason = "another process is starting or ending it"
                raise UserError(f"cluster {folder.name}: {reason}; wait for it to finish") from None
        time.sleep(LOCK_PAUSE_SECONDS)


# The files with which ssh, pdsh and DeepSpeed reach the pods


def write_access_files(cluster: Cluster, users: Mapping[str, str]) -> None:
    """Write the files that let ssh, pdsh and DeepSpeed reach the pods of a cluster, with their host
    keys pinned; a pod without sshd is in the hostfile only.

    Args:
        users: accounts by address; an address without one uses this user's.
    """
    folder = cluster.folder
    key = folder / KEY_FILE
    known_hosts = folder / KNOWN_HOSTS
    blocks = []
    host_keys = []
    for pod in cluster.pods:
        if pod.ssh_port is None or pod.host_key is None:
            continue
        user = users.get(pod.address) or account()
        blocks.append(ssh_config_text([pod.address], pod.ssh_port, key, known_hosts, user))
        host_keys.append((pod.address, pod.ssh_port, pod.host_key))
    if blocks:
        files.write_text(known_hosts, known_hosts_text(host_keys))
        files.write_text(folder / SSH_CONFIG, "".join(blocks))
    write_hostfile(folder / HOSTFILE, cluster.hosts)


def deepspeed_environment(cluster: Cluster) -> dict[str, str]:
    """Environment variables with which DeepSpeed's own command reaches the pods, with their host
    keys pinned; `UserError` where pdsh cannot take the path of the ssh configuration."""
    arguments = pdsh_ssh_arguments(cluster.ssh_config)
    return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": arguments}


def deepspeed_argv(cluster: Cluster) -> list[str]:
    """Argument list of DeepSpeed's own command, up to the script; each pod gets as many processes
    as the one with the fewest slots."""
    hosts = cluster.hosts
    deepspeed = Path(sys.executable).with_name("deepspeed")
    slots = min(host.slots for host in hosts)
    argv = [str(deepspeed), "--hostfile", str(cluster.hostfile), "--launcher", "pdsh"]
    # The check uses neither our port nor our key, and has no timeout.
    argv += ["--no_ssh_check"]
    if len(hosts) == 1:
        # Without this, DeepSpeed starts the ranks of a single host here.
        argv += ["--force_multi"]
    argv += ["--num_nodes", str(len(hosts)), "--num_gpus", str(slots)]
    argv += ["--master_addr", hosts[0].address]
    return argv


# A `kernel` lease is renewed by the process that called `up`: the pods end when that is gone


_stop_events: dict[str, threading.Event] = {}
"""Events that end the renewal of a lease, by the names of the clusters whose leases this process
renews."""


def hold(cluster: Cluster, *, end_at_exit: bool) -> None:
    """Renew a cluster's lease until `release` or the end of this process, and return at once.

    A thread does this, because a notebook's cell may keep the kernel busy.

    Args:
        end_at_exit: whether to take the cluster down when this process exits normally.
    """
    # A second call for a cluster takes the place of the first.
    release(cluster.name)
    released = threading.Event()
    owner = os.getpid()
    secret = cluster.secret
    pause = min(LEASE_RENEWAL_SECONDS, cluster.settings.lease_seconds / RENEWALS_PER_LEASE)
    _stop_events[cluster.name] = released
    agents = cluster.agents

    def follow_replacements() -> None:
        nonlocal agents
        while not released.is_set():
            agents = _agents_now(cluster) or agents
            released.wait(pause)

    def renew() -> None:
        # The first renewal comes at once: otherwise repeated calls for a cluster that is up would
        # put its next renewal off again and again.
        while not released.is_set():
            request = {"do": "renew"}
            # Answers are not looked at, since whoever uses a lost pod will notice. The loop runs in
            # this thread, since no other can be started once the main thread has ended.
            asyncio.run(ask_agents(agents, secret, request, LEASE_RENEWAL_SECONDS))
            released.wait(pause)

    def down_at_exit() -> None:
        # A forked child does not own the cluster.
        if os.getpid() == owner:
            cluster.down()

    threading.Thread(target=renew, name="zeropods-lease", daemon=True).start()
    if cluster.backend_class.can_replace:
        # Another thread, since a file server that hangs must not keep leases from being renewed.
        follower = threading.Thread(target=follow_replacements, name="zeropods-agents", daemon=True)
        follower.start()
    if end_at_exit:
        atexit.register(down_at_exit)


def _agents_now(cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """A cluster's agents as its state says now, since a process that restarts a run may have
    replaced some; none where the state cannot be read or the cluster was taken down."""
    with suppress(UserError, OSError):
        now = cluster.state_now()
        if now is not None:
            return now.agents
    return ()


def release(name: str) -> None:
    """Stop renewing a cluster's lease, where this process does that."""
    if name in _stop_events:
        _stop_events.pop(name).set()


# The end of clusters: their pods, their keys, and what is left where `up` was killed


def take_down(name: str, pods: tuple[Pod, ...] | None = None) -> bool:
    """End a cluster, or what is left of one, and remove its files.

    Args:
        pods: end it only if it still has one of these pods, since the name may be another cluster's
            by now; None for whatever has the name.

    Returns:
        Whether there was anything to end.

    Raises:
        UserError: another machine started it, and not all of its pods can be ended from here; or
            another process is starting or ending it.
    """
    folder = folder_of(name)
    if not folder.is_dir():
        release(name)
        return False
    with locked(folder, LOCK_SECONDS):
        cluster = read_cluster(folder)
        if cluster is None or not _is_same_cluster(cluster, pods):
            return False
        release(name)
        if not cluster.is_elsewhere:
            clear(folder)
            return True
        try:
            end_from_afar(cluster)
        except FileNotFoundError:
            # Its own machine has ended it, and removed its files, meanwhile.
            return False
    return True


def _is_same_cluster(cluster: Cluster, pods: tuple[Pod, ...] | None) -> bool:
    """Whether a cluster is still the one that had these pods: some may have been replaced since,
    but not all. None stands for any pods."""
    if pods is None or pods == cluster.pods:
        return True
    return any(pod in cluster.pods for pod in pods)


def clear(folder: Path) -> None:
    """End the cluster of a folder, and empty the folder; an empty folder stays as it is. The caller
    holds the folder's lock.

    Raises:
        UserError: another machine started the cluster, or the folder holds other files.
    """
    cluster = read_cluster(folder)
    if cluster is not None:
        require_this_machine(cluster)
        with signals_deferred():
            workers_of(cluster).stop(cluster.workers)
            remove_files(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty and holds no cluster; choose another name")


def remove_files(folder: Path) -> None:
    """Empty a cluster's folder, its state last: until then the cluster can be found and taken
    down."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == STATE_FILE):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_ended_clusters() -> None:
    """Remove what is left of clusters whose workers have all ended, where that can be seen here:
    where each worker was a process of this machine, the agent itself or the ssh that started it on
    a host."""
    for name in names():
        # A folder that another process holds, or that is not a cluster of ours, is left alone.
        with suppress(UserError), locked(folder_of(name)):
            cluster = read_cluster(folder_of(name))
            if cluster is None or not cluster.backend_class.has_processes_here:
                continue
            if cluster.is_elsewhere:
                # Process ids of another machine mean nothing here.
                continue
            workers_have_ended = all(worker.has_ended for worker in workers_of(cluster).list())
            # The ssh of a host may have ended before the host's agent.
            if workers_have_ended and not answers(cluster):
                clear(cluster.folder)


def answers(cluster: Cluster) -> bool:
    """Whether any agent of a cluster answers; none can be asked where the secret is gone."""
    with suppress(UserError):
        return any(pod.is_ready for pod in cluster.statuses())
    return False


# Clusters that another machine has started, such as another session of a CML project: its process
# ids mean nothing here, and pods of its own are at addresses that only it reaches. Its agents are
# asked, where they can be.


def require_this_machine(cluster: Cluster) -> None:
    """Raise `UserError` where another machine started a cluster: only there do the process ids of
    its workers mean something, so only there may it be changed."""
    if cluster.is_elsewhere:
        remedy = f"take another name, or end it with: zeropods pods down --name {cluster.name}"
        raise UserError(f"cluster {cluster.name}: {started_by(cluster)}; {remedy}")


def started_by(cluster: Cluster) -> str:
    """What messages say of a cluster that another machine started: which one it was."""
    return f"another machine or session, {cluster.machine.hostname}, started it"


def end_from_afar(cluster: Cluster) -> None:
    """End a cluster that this machine did not start, through the agents of its pods, and remove its
    files. Pods that do not answer are taken for ended where they have long shown no life.

    Raises:
        UserError: some pods do not answer here, and their agents may have shown life lately;
            nothing was ended.
        FileNotFoundError: its own machine ends it at this moment.
    """
    reason = why_out_of_reach(cluster)
    if reason is None:
        ask_all(cluster.agents, cluster.secret, {"do": "end"}, STATUS_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        # An agent that was told to end does so by itself, even if it takes longer.
        while answers(cluster) and time.monotonic() < deadline:
            time.sleep(END_PAUSE_SECONDS)
    elif not has_long_been_silent(cluster):
        place = f"cluster {cluster.name}: {started_by(cluster)}"
        raise UserError(f"{place}, and {reason}; {_how_to_end(cluster)}")
    remove_files(cluster.folder)


def _how_to_end(cluster: Cluster) -> str:
    """What to do about a cluster that cannot be ended from here now."""
    command = f"zeropods pods down --name {cluster.name}"
    if cluster.backend_class.shares_folder:
        minutes = f"{LONG_SILENCE_SECONDS / 60:.0f} minutes"
        remedy = f"on {cluster.machine.hostname}: {command}"
        return f"{remedy}; once that machine is gone, here too after {minutes}"
    remedy = f"where it was started: {command}"
    return f"{remedy}; if its pods have ended, remove {cluster.folder}"


def why_out_of_reach(cluster: Cluster) -> str | None:
    """Why the pods of a cluster cannot all be told from here to end, in words; None where they
    can."""
    if not cluster.pods:
        return "it has no pods yet that could be told to end"
    try:
        statuses = cluster.statuses()
    except UserError as error:
        return str(error)
    silent = [f"{status.pod}: {status.status}" for status in statuses if not status.is_ready]
    if not silent:
        return None
    return f"not all of its pods answer here ({'; '.join(silent)})"


def left_of_others() -> list[str]:
    """Names of other machines' clusters that have ended, as far as can be seen: none of their pods
    shows any life."""
    ended = []
    for name in names():
        # A state that is not ours is left alone, and a cluster that goes meanwhile has no files.
        with suppress(UserError, FileNotFoundError):
            cluster = read_cluster(folder_of(name))
            if cluster is None or not cluster.is_elsewhere:
                continue
            if has_long_been_silent(cluster) and not answers(cluster):
                ended.append(name)
    return ended


def has_long_been_silent(cluster: Cluster) -> bool:
    """Whether no agent of a cluster has shown that it lives, by touching the secret in the
    cluster's folder, for `LONG_SILENCE_SECONDS`; False where the agents do not have that folder."""
    if not cluster.backend_class.shares_folder:
        return False
    return seconds_of_silence(cluster.folder) > LONG_SILENCE_SECONDS
