"""Preflight of pods behind a real sshd: good, other, changed, silent and absent ones."""

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.full.clusters import plain_sshd
from tests.full.conftest import ROOT
from tests.full.launches import processes
from zeropods.errors import UserError
from zeropods.pods.cluster import Cluster
from zeropods.pods.hostfile import Host
from zeropods.pods.preflight import Check, Expectation, Preflight, preflight, probe_command
from zeropods.pods.ssh import known_hosts_text, make_key, ssh_config_text

MOST_SECONDS = 120.0
"""A check of pods that do not answer ends in seconds; on a busy machine in this. Without a limit it never does."""
FIRST, SECOND = "127.0.1.1", "127.0.1.2"


@dataclass(frozen=True)
class Served:
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

    def sshd(self, address: str, more: str = "") -> AbstractContextManager[str]:
        """Serve one pod; yields its host key."""
        return plain_sshd(self.folder / address, address, self.port, self.public_key, more)

    def check(self, addresses: list[str], expected: Expectation) -> Preflight:
        """The preflight of pods with one slot each."""
        hosts = [Host(address, 1) for address in addresses]
        names = [f"pod{number}" for number in range(1, len(hosts) + 1)]
        return preflight(hosts, expected, names=names, ssh_config=self.ssh_config)


@contextlib.contextmanager
def silent(address: str, port: int, greeting: bytes = b"") -> Iterator[None]:
    """A server that says its greeting, if any, and then nothing, for ever."""
    held: list[socket.socket] = []

    def accept_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.sendall(greeting)
                held.append(connection)

    with socket.create_server((address, port)) as server:
        threading.Thread(target=accept_all, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.fixture
def served(tmp_path: Path) -> Served:
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    with socket.socket() as free:
        free.bind((FIRST, 0))
        port = free.getsockname()[1]
    return Served(folder, port, make_key(folder / "id_ed25519", "cluster"))


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Expectation:
    # A pod's own counts where the master has none.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    project = tmp_path / "my project"
    project.mkdir()
    (project / "train.py").write_text("print('train')\n")
    return Expectation.of_this_machine(project, ("train.py",))


def check_of(found: Preflight, pod: int, name: str) -> Check:
    return next(check for check in found.pods[pod].checks if check.check == name)


def another_torch(folder: Path) -> Path:
    """A folder in which Python finds torch 9.9.9."""
    about = folder / "torch-9.9.9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    return folder


def test_good_pods_pass_and_one_with_another_torch_is_named(
    served: Served, expected: Expectation, tmp_path: Path
) -> None:
    other = another_torch(tmp_path / "other")
    with served.sshd(FIRST) as one, served.sshd(SECOND, f"SetEnv PYTHONPATH={other}") as two:
        served.know({FIRST: one, SECOND: two})
        found = served.check([FIRST, SECOND], expected)
        taken = served.check([FIRST, SECOND], replace(expected, master_port=served.port))
    assert not [check for check in found.pods[0].checks if check.verdict == "failed"]
    assert check_of(found, 1, "project").value == "same files"
    line = rf"^pod2 \(127.0.1.2\): torch failed: 9.9.9; the master has {expected.versions['torch']};".replace(
        "+", r"\+"
    )
    with pytest.raises(UserError, match=line):
        found.require()
    # The master's port is looked at on the first pod only; here sshd itself has it.
    assert check_of(taken, 0, "port").verdict == "failed"
    assert "port" not in [check.check for check in taken.pods[1].checks]


def test_a_pod_finds_packages_where_its_ranks_will_over_ssh_and_by_its_agent(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(another_torch(tmp_path / "it's 'other'")))
    expected = Expectation.of_this_machine(ROOT)
    for over_ssh in (True, False):
        found = cluster.preflight(expected, 1, over_ssh=over_ssh)
        assert check_of(found, 0, "torch").value == "9.9.9"


def test_changed_and_unknown_host_keys_are_never_accepted(
    served: Served, expected: Expectation, tmp_path: Path
) -> None:
    with served.sshd(FIRST):
        served.know({FIRST: make_key(tmp_path / "pinned", "another")})
        changed = served.check([FIRST], expected)
        (served.folder / "known_hosts").write_text("")
        unknown = served.check([FIRST], expected)
    assert [check.value for check in changed.pods[0].checks] == ["host key changed"]
    assert "ssh-keygen -R 127.0.1.1" in changed.remedies()[0]
    assert [check.value for check in unknown.pods[0].checks] == ["host key unknown"]
    assert (served.folder / "known_hosts").read_text() == ""


def test_dead_pods_are_named_after_a_limit_and_the_others_checked(served: Served, expected: Expectation) -> None:
    pods = [f"127.0.1.{number}" for number in (1, 2, 3, 4)]
    with (
        served.sshd(pods[0]) as key,
        silent(pods[2], served.port),
        silent(pods[3], served.port, b"220 mail\r\n" * 2000),
    ):
        served.know(dict.fromkeys(pods, key))
        started = time.monotonic()
        found = served.check(pods[1:], expected)
        seconds = time.monotonic() - started
        good = served.check(pods, expected)
    assert [pod.checks[0].verdict for pod in good.pods] == ["ok", "failed", "failed", "failed"]
    assert check_of(good, 0, "project").verdict == "ok"
    assert check_of(found, 0, "ssh").value == "nothing listens"
    assert check_of(found, 1, "ssh").value == "no answer"
    assert seconds < MOST_SECONDS


def test_project_folder_or_interpreter_that_is_not_there_is_named(
    served: Served, expected: Expectation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.sshd(FIRST) as key:
        served.know({FIRST: key})
        project = served.check([FIRST], replace(expected, project=str(tmp_path / "nowhere")))
        monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
        python = served.check([FIRST], expected)
    check = check_of(project, 0, "project")
    assert (check.verdict, check.value) == ("failed", "missing") and str(tmp_path / "nowhere") in check.remedy
    assert [(check.check, check.value) for check in python.pods[0].checks[1:]] == [("python", "missing")]


def test_a_missing_project_folder_is_named_in_a_home_with_another_clone_too(
    expected: Expectation, tmp_path: Path
) -> None:
    """Python takes a folder `zeropods` of the working directory for the package where it is installed as editable."""
    (tmp_path / "home" / "zeropods").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = probe_command(replace(expected, project=str(tmp_path / "nowhere")))
    argv = ["sh", "-c", command]
    done = subprocess.run(
        argv, cwd=tmp_path / "home", env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    checks = {check["check"]: check["value"] for check in json.loads(done.stdout)["checks"]}
    assert checks["project"] == "missing"


@pytest.mark.parametrize(
    ("more", "name", "value"),
    [
        ("ForceCommand echo '{welcome}'; echo hello; sh -c \"$SSH_ORIGINAL_COMMAND\"", "project", "same files"),
        ("ForceCommand sleep 0.2; kill -9 $PPID", "ssh", f"Connection to {FIRST} closed by remote host."),
        ("AuthorizedKeysFile none", "ssh", "key refused"),
        ("ForceCommand kill -ALRM $$", "ssh", "no answer: its check was killed, or took more than 20 s"),
    ],
    ids=["chatty login", "lost after login", "key of another cluster", "probe's alarm"],
)
def test_what_a_pod_s_sshd_does_is_seen(
    served: Served, expected: Expectation, more: str, name: str, value: str
) -> None:
    with served.sshd(FIRST, more) as own:
        served.know({FIRST: own})
        assert check_of(served.check([FIRST], expected), 0, name).value == value


def test_interrupted_preflight_leaves_no_ssh(served: Served, expected: Expectation) -> None:
    with served.sshd(FIRST, "ForceCommand sleep 600") as key:
        served.know({FIRST: key, SECOND: key})
        started = time.monotonic()
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            served.check([FIRST, SECOND], expected)
        assert time.monotonic() - started < MOST_SECONDS
        assert not processes(served.ssh_config)
