"""Pods on hosts of the user's own, each behind a plain sshd; and pods on networks that are cut."""

import getpass
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.full.clusters import (
    listens,
    plain_sshd,
    ports_of,
    processes_of,
    ssh,
    zeropods,
)
from tests.full.launches import ended, left, of_processes, record, started, train, until
from tests.made import SETTINGS
from tests.namespaces import Namespaces, are_possible
from zeropods import pods
from zeropods.errors import UserError
from zeropods.files import ROOT
from zeropods.pods.cluster import BACKENDS, Cluster, names
from zeropods.pods.hostfile import Host, write_hostfile
from zeropods.pods.processes import Process, descendants
from zeropods.pods.ssh import known_hosts_text, make_key
from zeropods.pods.wire import WireError, ask_all

NAMES = {"first": "127.0.7.2", "second": "127.0.7.1"}
"""The user's names of the hosts, in the order of the hostfile, which is not that of the addresses."""
needs_namespaces = pytest.mark.skipif(not are_possible(), reason="network namespaces need root and iproute2")


@dataclass(frozen=True)
class Own:
    """What the user has: a hostfile, an ssh configuration, and the address of each host."""

    folder: Path
    port: int
    network: Namespaces | None = None
    """Where each host has a network of its own."""

    @property
    def hostfile(self) -> Path:
        return self.folder / "my_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "my_ssh_config"

    def sessions(self, name: str) -> list[Process]:
        """What runs below the sshd of a host."""
        return descendants(int((self.folder / name / "pid").read_text()))

    @contextmanager
    def serving(self, name: str, more: str = "") -> Iterator[None]:
        """The sshd of a host, with a key of its own that the user knows; `more` in its configuration."""
        address, key = NAMES[name], (self.folder / "id_ed25519.pub").read_text().strip()
        network = self.network
        command = list if network is None else lambda argv: network.command(address, argv)
        with plain_sshd(self.folder / name, address, self.port, key, more, command) as host_key:
            with open(self.folder / "known_hosts", "a") as known:
                known.write(known_hosts_text([(address, self.port, host_key)]))
            yield


def own(folder: Path, network: Namespaces | None = None) -> Own:
    """The user's files; no host serves yet."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("", 0))
        made = Own(folder, free.getsockname()[1], network)
    make_key(folder / "id_ed25519", "user")
    blocks = [f"Host {name}\n  HostName {address}\n" for name, address in NAMES.items()]
    always = f"Host *\n  Port {made.port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/id_ed25519\n"
    files = f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
    made.ssh_config.write_text("".join([*blocks, always, files]))
    (folder / "known_hosts").touch()
    write_hostfile(made.hostfile, [Host("first", 2), Host("second", 1)])
    return made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    """Two hosts that serve."""
    made = own(tmp_path_factory.mktemp("own") / "user")
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(made.serving(name))
        yield made


def up(hosts: Own, **how: object) -> pods.Cluster:
    return pods.up(hostfile=hosts.hostfile, ssh_config=hosts.ssh_config, **how)  # type: ignore[arg-type]


def test_pods_come_up_in_the_hostfile_s_order_serve_show_no_secret_and_leave_nothing(hosts: Own, home: Path) -> None:
    """The secret stands in no argument list, environment or log."""
    cluster = up(hosts)
    assert [host.line() for host in cluster.hosts] == ["127.0.7.2 slots=2", "127.0.7.1 slots=1"]
    assert [ssh(cluster, pod.address, "printenv", "ZEROPODS_POD") for pod in cluster.pods] == list(NAMES.values())
    assert (cluster.backend, cluster.shared_machine) == ("hosts", True)
    shown = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(home)]
    assert all(any(name in text for text in shown) for name in (b"backends.hosts", b"worker_p.py"))
    assert any(is_local(pid, "ssh") for pid in processes_of(home))
    for name in ("cmdline", "environ"):
        shown += of_processes(name).values()
    shown += [path.read_bytes() for path in (cluster.folder / "logs").iterdir()]
    assert not any(cluster.secret.hex().encode() in text for text in shown)
    ports = ports_of([cluster])
    cluster.down()
    assert not any(listens(*port) for port in ports) and not processes_of(home) and not list(home.iterdir())
    until(lambda: not any(hosts.sessions(name) for name in NAMES))


@needs_namespaces
def test_hosts_with_a_network_of_their_own_reach_this_machine(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Namespaces(tmp_path, replace(SETTINGS, backend="namespaces"))
    try:
        second, first = network.claim()
        monkeypatch.setitem(NAMES, "first", first)
        monkeypatch.setitem(NAMES, "second", second)
        made = own(tmp_path / "user", network)
        with made.serving("first"), made.serving("second"):
            cluster = up(made)
            assert [ssh(cluster, pod.address, "printenv", "ZEROPODS_POD") for pod in cluster.pods] == [first, second]
            assert not cluster.shared_machine
            cluster.down()
            assert not processes_of(home)
    finally:
        network.close()


@pytest.mark.parametrize("what", ["backends.hosts", "ssh"])
def test_a_pod_ends_when_what_started_it_here_is_killed(hosts: Own, home: Path, what: str) -> None:
    cluster = up(hosts, count=1, lease="idle")
    (killed,) = [pid for pid in processes_of(home) if is_local(pid, what)]
    os.kill(killed, signal.SIGKILL)
    until(lambda: not processes_of(home) and not any(listens(*port) for port in ports_of([cluster])))


def is_local(pid: int, what: str) -> bool:
    """Whether it is the stand-in for a worker, or its ssh."""
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return argv[0] == "ssh" if what == "ssh" else any(part.endswith(what) for part in argv[:3])


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (str(ROOT), r"host first: /nowhere: no such folder there; share the project folder with it"),
        (sys.executable, r"host first: /nowhere: no such Python there; install it with the requirements at this path"),
    ],
)
def test_a_host_without_the_project_or_its_python_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, line: str
) -> None:
    monkeypatch.setitem(NAMES, "first", "127.0.9.1")
    made = own(tmp_path / "user")
    # The host has all that this machine has; what it is asked for is moved to where it has nothing.
    moved = f"s#{missing}\\( \\|$\\)#/nowhere\\1#g"
    command = f'ForceCommand sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | sed "{moved}")"'
    with made.serving("first", command), pytest.raises(UserError, match=line):
        up(made, count=1)
    assert not processes_of(home) and not list(home.iterdir())


def test_a_launch_on_a_hostfile_brings_pods_up_and_down_or_uses_those_that_are_up(
    hosts: Own, home: Path, tmp_path: Path
) -> None:
    place = ["--hostfile", str(hosts.hostfile), "--ssh-config", str(hosts.ssh_config), "--num-pods", "1"]
    script = [str(ROOT / "tests" / "full" / "rank.py"), "--outputdir", str(tmp_path / "run")]
    for lasting in (False, True):
        if lasting:
            told = zeropods("pods", "up", *place[:4], "--name", "mine", "--json")
            assert [pod["address"] for pod in json.loads(told.stdout)["pods"]] == list(NAMES.values()), told.stderr
        done = zeropods("launch", *place, "--dry-run", "--json", "--", *script)
        assert [host["address"] for host in json.loads(done.stdout)["hosts"]] == ["127.0.7.2"], done.stderr
        assert names() == (["mine"] if lasting else []) and bool(processes_of(home)) == lasting
    assert zeropods("pods", "down").stdout == "down: mine\n"


def test_a_host_that_ssh_cannot_reach_or_that_has_another_key_is_named_and_the_others_are_ended(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMES, "first", "127.0.8.2")
    monkeypatch.setitem(NAMES, "second", "127.0.8.1")
    made = own(tmp_path / "user")
    with made.serving("first"):
        with pytest.raises(UserError, match=r"host second: .*refused; 'ssh second true' must work"):
            up(made)
        (made.folder / "known_hosts").write_text("")
        with pytest.raises(UserError, match=r"host first: Host key verification failed\."):
            up(made, count=1)
    assert not processes_of(home) and not list(home.iterdir())


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"slots": 2}, "slots 2: the hostfile says how many"),
        ({"backend": "local"}, "backend 'local': leave it out with a hostfile"),
        ({"ssh_config": "/nowhere/config"}, "host first: Can't open user config file /nowhere/config"),
        ({"hostfile": "twice"}, r"hostfile: first and 127\.0\.7\.2 are both 127\.0\.7\.2"),
        ({"hostfile": "unknown"}, r"host nobody\.invalid: no IPv4 address"),
    ],
)
def test_a_hostfile_that_cannot_be_used_or_is_contradicted_is_refused(
    hosts: Own, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, object], line: str
) -> None:
    write_hostfile(tmp_path / "twice", [Host("first", 1), Host("127.0.7.2", 1)])
    write_hostfile(tmp_path / "unknown", [Host("nobody.invalid", 1)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=line):
        pods.up(**{"hostfile": hosts.hostfile, "ssh_config": hosts.ssh_config, **how})  # type: ignore[arg-type]


# A pod's network is cut in mid-run and restored: the run ends everywhere, and nobody comes back to it.


@needs_namespaces
def test_a_pod_that_is_cut_off_is_lost_for_good_and_a_short_interruption_ends_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "namespaces", Namespaces)
    apart = pods.up(3, name="apart", backend="namespaces")
    network, cut = Namespaces(apart.folder, apart.settings), apart.pods[0]  # with rank 0, who holds the lock
    process = started(apart, tmp_path / "run", "--seconds", 600)
    ranks = train(tmp_path / "run")
    network.cut(cut.address)
    until(lambda: process.poll() is not None)
    said = ended(process)
    found = record(tmp_path / "run")
    assert (found["status"], found["pod"]) == ("pod_lost", cut.name), said
    until(lambda: not left(tmp_path / "run"))  # the pod that was cut off ended its ranks by itself
    network.restore(cut.address)
    run = found["identity"]["seen"]["ZEROPODS_RUN"]
    until(lambda: not isinstance(asked(apart, run), OSError))
    assert isinstance(asked(apart, run), WireError)
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    again = started(apart, tmp_path / "again", "--seconds", 12)
    train(tmp_path / "again")
    network.cut(apart.pods[1].address)
    signal.sigtimedwait([], 2.0)
    network.restore(apart.pods[1].address)
    said = ended(again)
    assert again.returncode == 0 and record(tmp_path / "again")["status"] == "ok", said
    apart.down()


def asked(apart: Cluster, run: str) -> object:
    """What the pod that was cut off answers to a supervisor that wants to go on with the run."""
    request = {"do": "renew", "run": run, "seconds": 10}
    (answer,) = ask_all(apart.agents[:1], apart.secret, request, 5.0)
    return answer
