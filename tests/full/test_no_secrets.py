"""A cluster's secret and its key lie in two files that only their owner reads, and nowhere else while a run goes on."""

from __future__ import annotations

import base64
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.full.launches import ROOT, ended, record, started, train
from zeropods import pods
from zeropods.files import POD
from zeropods.pods.cluster import KEY, SECRET, Cluster

PROC = Path("/proc")
PAUSE_SECONDS = 0.02
PEM_LINES = slice(1, -1)


class Watch:
    """Reads all command lines of the machine, again and again, until it is left."""

    def __init__(self) -> None:
        self.lines: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(PAUSE_SECONDS):
            self.lines.update(of_processes("cmdline").values())


@dataclass(frozen=True)
class Seen:
    """What was there to be read in the life of a cluster with one run."""

    cluster: Cluster
    run: Path
    needles: dict[str, bytes]
    said: str
    command_lines: set[bytes]
    environments: dict[int, bytes]
    ranks: list[int]
    agents: set[int]
    """Agents and their wardens."""
    files: dict[Path, bytes]
    """Of the cluster, of the run, and of all pods of this machine."""
    folder_mode: int
    modes: dict[Path, int]

    def found(self, text: bytes) -> list[str]:
        """Names of the secrets in a text."""
        return [name for name, needle in self.needles.items() if needle in text]


@pytest.fixture(scope="module")
def seen(shared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A cluster from its start to the end of a run over pdsh, watched all the time."""
    run = tmp_path_factory.mktemp("runs") / "run"
    with Watch() as watch:
        up = pods.up(3, name="watched")
        try:
            process = started(up, run, "--seconds", 1.5)
            ranks = train(run)
            environments = of_processes("environ")
            agents = {pid for pid, line in of_processes("cmdline").items() if b"worker_p.py" in line}
            said = ended(process)
            assert record(run)["status"] == "ok", said
            files = everything(up.folder, run, *Path(tempfile.gettempdir()).glob(f"{POD}*"))
            folder_mode = up.folder.stat().st_mode & 0o777
            modes = {path: path.stat().st_mode & 0o777 for path in everything(up.folder)}
            needles = secrets_of(up)
        finally:
            up.down()
    yield Seen(up, run, needles, said, watch.lines, environments, ranks, agents, files, folder_mode, modes)


def secrets_of(cluster: Cluster) -> dict[str, bytes]:
    """The secret in each form in which it could be seen, and the private key: its file's lines, and its bytes."""
    secret = cluster.secret
    lines = (cluster.folder / KEY).read_bytes().splitlines()[PEM_LINES]
    key = base64.b64decode(b"".join(lines))
    public = base64.b64decode((cluster.folder / f"{KEY}.pub").read_text().split()[1])[-32:]
    # OpenSSH's private section (PROTOCOL.key) holds the 32 bytes of the seed, followed by the public key again.
    seed = key[key.rindex(public) - 32 : key.rindex(public)]
    return {
        "secret": secret,
        "secret in hexadecimal": secret.hex().encode(),
        "secret in capitals": secret.hex().upper().encode(),
        "secret in base64": base64.b64encode(secret).rstrip(b"="),
        "key": seed,
        "key in hexadecimal": seed.hex().encode(),
        **{f"line {number} of the key": line for number, line in enumerate(lines[1:], start=2)},
    }


def of_processes(name: str) -> dict[int, bytes]:
    """A file of every process that may be read."""
    found = {}
    for path in PROC.glob(f"[0-9]*/{name}"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes()
    return found


def everything(*folders: Path) -> dict[Path, bytes]:
    """All files below these folders; those of pods of others may go meanwhile."""
    found = {}
    for path in sorted({path for folder in folders for path in folder.rglob("*") if path.is_file()}):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.read_bytes()
    return found


def test_no_command_line_showed_a_secret(seen: Seen) -> None:
    words = [b"worker_p.py", b"sshd", b"pdsh", b"rank.py", b"ssh"]
    assert [word for word in words if not any(word in line for line in seen.command_lines)] == []
    assert [(line, seen.found(line)) for line in seen.command_lines if seen.found(line)] == []


def test_no_environment_but_that_of_pods_holds_a_secret_while_a_run_goes_on(seen: Seen) -> None:
    assert all(b"ZEROPODS_RUN=" in seen.environments[rank] for rank in seen.ranks)
    # A pod's own two processes were started with it, which /proc shows to their own user only.
    holding = {pid for pid, text in seen.environments.items() if seen.found(text)}
    assert [pid for pid in holding if pid not in seen.agents] == []


def test_ranks_have_no_variable_for_a_secret(seen: Seen) -> None:
    for rank in seen.ranks:
        names = [part.partition(b"=")[0] for part in seen.environments[rank].split(b"\0")]
        assert [name for name in names if name.startswith(b"ZEROPODS") and b"SECRET" in name] == []


def test_only_their_own_two_files_hold_them(seen: Seen) -> None:
    holding = {path.name for path, text in seen.files.items() if seen.found(text)}
    assert holding == {SECRET, KEY}


def test_records_logs_and_output_hold_none(seen: Seen) -> None:
    names = {path.name for path in seen.files}
    assert {"record.json", "config.json", "state.json", "hostfile", "ssh_config", "launch.json"} <= names
    assert any(path.suffix == ".log" for path in seen.files)
    assert "rank 0 trains" in seen.said
    assert seen.found(seen.said.encode()) == []


def test_nobody_else_may_read_what_holds_one(seen: Seen) -> None:
    folder = seen.cluster.folder
    assert (seen.folder_mode, seen.modes[folder / SECRET], seen.modes[folder / KEY]) == (0o700, 0o600, 0o600)


def test_the_notebooks_hold_none(seen: Seen) -> None:
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    assert [path.name for path in notebooks if seen.found(path.read_bytes())] == []
