"""Preflight of pods behind a real sshd: good, other, changed, silent and absent ones."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.pods.hostfile import Host
from zeropods.pods.preflight import LOGIN_SECONDS, mending_lines, preflight, require
from zeropods.pods.preflight_checks import Check, Expectation, PodChecks, Preflight
from zeropods.pods.probe import find_program
from zeropods.pods.ssh import known_hosts_text, pdsh_ssh_arguments, ssh_argv, ssh_config_text
from zeropods.pods.sshd import make_key

START_SECONDS = 20.0
DEAD_SECONDS = 3.0
"""A dead pod is named by then."""
NOISE_SECONDS = 2.0
"""What a busy machine may add."""
SSHD_CONFIG = """
ListenAddress {address}
Port {port}
HostKey "{folder}/host_key"
AuthorizedKeysFile "{keys}"
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
{more}
"""


@dataclass(frozen=True)
class Cluster:
    """Addresses of 127.0.1.K with one port, one key and one configuration, as `pods up` makes it."""

    folder: Path
    port: int
    public_key: str

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def know(self, keys: dict[str, str]) -> None:
        """Pin these host keys."""
        text = known_hosts_text((address, self.port, key) for address, key in keys.items())
        (self.folder / "known_hosts").write_text(text)
        config = ssh_config_text(
            keys, self.port, self.folder / "id_ed25519", self.folder / "known_hosts", getpass.getuser()
        )
        self.ssh_config.write_text(config)

    @contextlib.contextmanager
    def sshd(self, address: str, more: str = "") -> Iterator[str]:
        """Serve one pod; yields its host key."""
        folder = self.folder / address
        folder.mkdir()
        host_key = make_key(folder / "host_key", address)
        (folder / "authorized_keys").write_text(self.public_key + "\n")
        config = folder / "sshd_config"
        # sshd expands %h and its like there.
        keys = str(folder / "authorized_keys").replace("%", "%%")
        config.write_text(SSHD_CONFIG.format(address=address, port=self.port, folder=folder, keys=keys, more=more))
        with serving([find_program("sshd"), "-D", "-f", str(config), "-E", str(folder / "log")], address, self.port):
            yield host_key

    def check(self, addresses: list[str], expected: Expectation) -> tuple[Preflight, dict[str, float]]:
        """The preflight, and after how many seconds each pod was named."""
        started = time.monotonic()
        named: dict[str, float] = {}

        def watch(checked: PodChecks) -> None:
            named[checked.address] = time.monotonic() - started

        hosts = [Host(address, 1) for address in addresses]
        names = [f"pod{number}" for number in range(1, len(hosts) + 1)]
        found = preflight(hosts, expected, names=names, ssh_config=self.ssh_config, port=self.port, watch=watch)
        return found, named


@contextlib.contextmanager
def serving(argv: list[str | None], address: str, port: int) -> Iterator[None]:
    """Run a server until it listens, and end it afterwards."""
    assert argv[0] is not None, "sshd is not installed"
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with subprocess.Popen([str(part) for part in argv]) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not listens(address, port):
                assert process.poll() is None and time.monotonic() < deadline, f"nothing listens on {address}:{port}"
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def listens(address: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0


@contextlib.contextmanager
def silent(address: str, port: int, greeting: bytes = b"") -> Iterator[None]:
    """A server that says its greeting, if any, and then nothing, for ever."""
    held: list[socket.socket] = []
    with socket.socket() as server:
        server.bind((address, port))
        server.listen()
        threading.Thread(target=accept_all, args=(server, greeting, held), daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


def accept_all(server: socket.socket, greeting: bytes, held: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.sendall(greeting)
            held.append(connection)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return made_in(tmp_path / "my cluster 100%")


def made_in(folder: Path) -> Cluster:
    folder.mkdir(mode=0o700)
    with socket.socket() as free:
        free.bind(("127.0.1.1", 0))
        port = free.getsockname()[1]
    return Cluster(folder, port, make_key(folder / "id_ed25519", "cluster"))


@pytest.fixture
def expected(tmp_path: Path) -> Expectation:
    project = tmp_path / "my project"
    project.mkdir()
    (project / "train.py").write_text("print('train')\n")
    return Expectation.of_this_machine(project, ("train.py",))


def check_of(found: Preflight, pod: int, name: str) -> Check:
    return next(check for check in found.pods[pod].checks if check.check == name)


def test_good_pods_pass(cluster: Cluster, expected: Expectation) -> None:
    with cluster.sshd("127.0.1.1") as one, cluster.sshd("127.0.1.2") as two:
        cluster.know({"127.0.1.1": one, "127.0.1.2": two})
        found, _ = cluster.check(["127.0.1.1", "127.0.1.2"], dataclasses.replace(expected, master_port=cluster.port))
    # The master's port is looked at on the first pod only; here sshd itself has it.
    assert check_of(found, 0, "port").verdict == "failed"
    assert "port" not in [check.check for check in found.pods[1].checks]
    others = [check for pod in found.pods for check in pod.checks if check.check != "port"]
    assert [check for check in others if check.verdict == "failed"] == []
    assert check_of(found, 1, "project").value == "same files"


def test_remote_command_arrives_as_it_was(cluster: Cluster) -> None:
    command = ["printf", "%s|", "two words", "$HOME", "it's", 'a"b', "back\\slash"]
    with cluster.sshd("127.0.1.1") as key:
        cluster.know({"127.0.1.1": key})
        argv = ssh_argv(cluster.ssh_config, "127.0.1.1", command)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.stdout == "two words|$HOME|it's|a\"b|back\\slash|", done.stderr


def test_pdsh_reaches_pods_by_the_same_configuration(tmp_path: Path) -> None:
    cluster = made_in(tmp_path / "100%host")
    with cluster.sshd("127.0.1.1") as one, cluster.sshd("127.0.1.2") as two:
        cluster.know({"127.0.1.1": one, "127.0.1.2": two})
        append = {"PDSH_SSH_ARGS_APPEND": pdsh_ssh_arguments(cluster.ssh_config)}
        done = subprocess.run(
            ["pdsh", "-R", "ssh", "-w", "127.0.1.1,127.0.1.2", "echo here"],
            capture_output=True, text=True, timeout=START_SECONDS, check=False, env={**os.environ, **append},
        )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["127.0.1.1: here", "127.0.1.2: here"], done.stderr


def test_pod_with_another_torch_is_named_with_both_versions(
    cluster: Cluster, expected: Expectation, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "torch-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    with cluster.sshd("127.0.1.1") as one, cluster.sshd("127.0.1.2", f"SetEnv PYTHONPATH={other.parent}") as two:
        cluster.know({"127.0.1.1": one, "127.0.1.2": two})
        found, _ = cluster.check(["127.0.1.1", "127.0.1.2"], expected)
    assert check_of(found, 0, "torch").verdict == "ok"
    wanted = expected.versions["torch"]
    with pytest.raises(UserError, match=r"^pod2 \(127.0.1.2\): torch failed: 9.9.9; the master has ") as raised:
        require(found)
    assert f"the master has {wanted};" in str(raised.value)


def test_changed_host_key_is_named_as_such(cluster: Cluster, expected: Expectation, tmp_path: Path) -> None:
    with cluster.sshd("127.0.1.1"):
        cluster.know({"127.0.1.1": make_key(tmp_path / "pinned", "another")})
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert [check.value for check in found.pods[0].checks] == ["host key changed"]
    assert f"ssh-keygen -R '[127.0.1.1]:{cluster.port}'" in mending_lines(found)[0]


def test_unknown_host_key_is_never_accepted(cluster: Cluster, expected: Expectation) -> None:
    with cluster.sshd("127.0.1.1") as key:
        cluster.know({"127.0.1.1": key})
        (cluster.folder / "known_hosts").write_text("")
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert [check.value for check in found.pods[0].checks] == ["host key unknown"]
    assert (cluster.folder / "known_hosts").read_text() == ""


def test_key_of_another_cluster_is_refused(cluster: Cluster, expected: Expectation) -> None:
    with cluster.sshd("127.0.1.1") as key:
        (cluster.folder / "127.0.1.1" / "authorized_keys").write_text("")
        cluster.know({"127.0.1.1": key})
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert [check.value for check in found.pods[0].checks] == ["key refused"]


def test_dead_pods_are_named_within_three_seconds_and_the_others_checked(
    cluster: Cluster, expected: Expectation
) -> None:
    pods = [f"127.0.1.{number}" for number in (1, 2, 3, 4)]
    with (
        cluster.sshd(pods[0]) as key,
        silent(pods[2], cluster.port),
        silent(pods[3], cluster.port, b"SSH-2.0-OpenSSH_9.2\r\n"),
    ):
        cluster.know(dict.fromkeys(pods, key))
        found, named = cluster.check(pods, expected)
    assert [pod.checks[0].verdict for pod in found.pods] == ["ok", "failed", "failed", "failed"]
    assert check_of(found, 0, "project").verdict == "ok"
    assert check_of(found, 1, "ssh").value == "nothing listens"
    assert all("no answer" in check_of(found, index, "ssh").value for index in (2, 3))
    assert LOGIN_SECONDS < DEAD_SECONDS
    assert all(named[pod] < DEAD_SECONDS + NOISE_SECONDS for pod in pods[1:]), named


def test_server_that_is_no_sshd_is_named(cluster: Cluster, expected: Expectation, tmp_path: Path) -> None:
    with silent("127.0.1.1", cluster.port, b"220 mail\r\n" * 2000):
        cluster.know({"127.0.1.1": "ssh-ed25519 AAAA"})
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert check_of(found, 0, "ssh").verdict == "failed"


def test_project_folder_that_is_not_there_is_named(cluster: Cluster, expected: Expectation, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(expected, project=tmp_path / "nowhere")
    with cluster.sshd("127.0.1.1") as key:
        cluster.know({"127.0.1.1": key})
        found, _ = cluster.check(["127.0.1.1"], elsewhere)
    check = check_of(found, 0, "project")
    assert (check.verdict, check.value) == ("failed", "missing") and str(tmp_path / "nowhere") in check.remedy


def test_pod_without_this_interpreter_is_named(
    cluster: Cluster, expected: Expectation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    with cluster.sshd("127.0.1.1") as key:
        cluster.know({"127.0.1.1": key})
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert [(check.check, check.value) for check in found.pods[0].checks[1:]] == [("python", "missing")]


def test_chatty_login_does_not_spoil_the_answer(cluster: Cluster, expected: Expectation) -> None:
    chatty = "ForceCommand echo '{welcome}'; echo hello; sh -c \"$SSH_ORIGINAL_COMMAND\""
    with cluster.sshd("127.0.1.1", chatty) as key:
        cluster.know({"127.0.1.1": key})
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert check_of(found, 0, "project").verdict == "ok"


def test_connection_lost_after_login_is_named(cluster: Cluster, expected: Expectation) -> None:
    with cluster.sshd("127.0.1.1", "ForceCommand sleep 0.2; kill -9 $PPID") as key:
        cluster.know({"127.0.1.1": key})
        found, _ = cluster.check(["127.0.1.1"], expected)
    assert [check.value for check in found.pods[0].checks] == ["lost after login"]


def test_interrupted_preflight_leaves_no_ssh(cluster: Cluster, expected: Expectation) -> None:
    def interrupt(checked: PodChecks) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with cluster.sshd("127.0.1.1", "ForceCommand sleep 5") as key:
        cluster.know({"127.0.1.1": key, "127.0.1.2": key})
        hosts = [Host("127.0.1.1", 1), Host("127.0.1.2", 1)]
        with pytest.raises(KeyboardInterrupt):
            preflight(hosts, expected, ssh_config=cluster.ssh_config, port=cluster.port, watch=interrupt)
        assert not any(str(cluster.ssh_config).encode() in argv for argv in running())
    assert time.monotonic() - started < START_SECONDS


def running() -> Iterator[bytes]:
    """The argument lists of all processes, their parts ended by zero bytes."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield process.read_bytes()
