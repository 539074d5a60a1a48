"""A cluster's secret and its key lie in two files that only their owner reads, and nowhere else while a run goes on."""

import base64
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.full.launches import ROOT, ended, of_processes, record, started, train
from zeropods import pods
from zeropods.pods.cluster import KEY, SECRET, Cluster
from zeropods.pods.processes import POD

PAUSE_SECONDS = 0.02


@contextlib.contextmanager
def watching() -> Iterator[set[bytes]]:
    """All command lines of the machine, read again and again until it is left."""
    lines: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(PAUSE_SECONDS):
            lines.update(of_processes("cmdline").values())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lines
    finally:
        over.set()
        thread.join()


def secrets_of(cluster: Cluster) -> dict[str, bytes]:
    """The secret in each form in which it could be seen, and the lines of the private key's file."""
    secret, lines = cluster.secret, (cluster.folder / KEY).read_bytes().splitlines()[1:-1]
    return {
        "secret": secret,
        "secret in hexadecimal": secret.hex().encode(),
        "secret in base64": base64.b64encode(secret).rstrip(b"="),
        # The first line is the same for every key.
        **{f"line {number} of the key": line for number, line in enumerate(lines[1:], start=2)},
    }


def everything(*folders: Path) -> dict[Path, bytes]:
    """All files below these folders; those of pods of others may go meanwhile."""
    found = {}
    for path in sorted({path for folder in folders for path in folder.rglob("*") if path.is_file()}):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.read_bytes()
    return found


def test_secrets_lie_in_two_files_and_nowhere_else_while_a_run_goes_on(shared_home: Path, tmp_path: Path) -> None:
    """A cluster from its start to the end of a run over pdsh, watched all the time."""
    run = tmp_path / "run"
    with watching() as lines:
        up = pods.up(3, name="watched")
        try:
            process = started(up, run, "--seconds", 600)
            ranks = train(run)
            environments = of_processes("environ")
            agents = {pid for pid, line in of_processes("cmdline").items() if b"worker_p.py" in line}
            (run / "enough").touch()
            said = ended(process)
            assert record(run)["status"] == "ok", said
            files = everything(up.folder, run, *Path(tempfile.gettempdir()).glob(f"{POD}*"))
            modes = {path.name: path.stat().st_mode & 0o777 for path in (up.folder, *up.folder.iterdir())}
            needles = secrets_of(up)
        finally:
            up.down()

    def found(text: bytes) -> list[str]:
        return [name for name, needle in needles.items() if needle in text]

    words = [b"worker_p.py", b"sshd", b"pdsh", b"rank.py", b"ssh"]
    assert [word for word in words if not any(word in line for line in lines)] == []
    assert [(line, found(line)) for line in lines if found(line)] == []
    assert all(b"ZEROPODS_RUN=" in environments[rank] for rank in ranks)
    assert not any(b"ZEROPODS_ORDERS" in environments[rank] for rank in ranks)
    # A pod's own two processes were started with it, which /proc shows to their own user only.
    assert {pid for pid, text in environments.items() if found(text)} <= agents
    assert {path.name for path, text in files.items() if found(text)} == {SECRET, KEY}
    assert (modes["watched"], modes[SECRET], modes[KEY]) == (0o700, 0o600, 0o600)
    names = {path.name for path in files}
    assert {"record.json", "config.json", "state.json", "hostfile", "ssh_config", "launch.json"} <= names
    assert any(path.suffix == ".log" for path in files)
    assert "rank 0 trains" in said and found(said.encode()) == []
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks and [path.name for path in notebooks if found(path.read_bytes())] == []
