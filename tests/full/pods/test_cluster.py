"""Clusters of real pods on this machine: up, found, used, down, and nothing left whatever happens."""

import base64
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.clusters import SECONDS, listens, ports_of, processes_of, program, ssh, zeropods
from tests.full.cml_double import CmlDouble
from tests.full.launches import ROOT, ended, of_processes, record, started, train, until
from zeropods import pods
from zeropods.errors import UserError
from zeropods.pods import processes
from zeropods.pods.backends import local
from zeropods.pods.cluster import (
    KEY_FILE,
    SECRET_FILE,
    Cluster,
    remove_ended_clusters,
    take_down,
    workers_of,
)
from zeropods.pods.processes import POD

SLEEPER = "import time; time.sleep(300)"
DEAF = f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEPER}"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What workers run instead of the agent: it only sleeps, until a test writes something else."""
    script = tmp_path / "worker.py"
    script.write_text(SLEEPER)
    monkeypatch.setattr(local, "WORKER_SCRIPT", script)
    return script


def starting(worker: Path, call: str) -> subprocess.Popen[str]:
    """A process whose workers run that script, so that its `up` never comes to its end."""
    return program(f"from zeropods.pods.backends import local\nlocal.WORKER_SCRIPT = {str(worker)!r}\n{call}")


def kill_pod(cluster: Cluster, number: int) -> None:
    """End the process that a pod is."""
    records = workers_of(cluster).processes()
    found = next(record.find() for record in records if record.id == cluster.pods[number].worker)
    assert found is not None
    processes.end(lambda: [found], 20.0)


def test_check_finds_good_pods_good_and_names_one_that_has_died(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = pods.up(2, name="pods")
    good = zeropods("pods", "check", "--json")
    assert (good.returncode, json.loads(good.stdout)["ok"]) == (0, True), good.stdout
    kill_pod(cluster, 1)
    bad = zeropods("pods", "check")
    line = f"pod2 ({cluster.pods[1].address}): ssh failed: nothing listens; no sshd at"
    assert bad.returncode == 1 and line in bad.stdout
    (tmp_path / "textsql_train.py").touch()
    monkeypatch.chdir(tmp_path)
    found = cluster.check()
    table = found.table()
    project = table.rows[0][table.header.index("project")]
    assert [row[0] for row in table.rows] == ["pod1", "pod2"] and project == "same files"
    assert line in found._repr_html_() and any(told.startswith(line) for told in str(found).splitlines())


def test_a_cluster_is_found_again_not_changed_listed_and_ended_by_another_process_and_leaves_nothing(
    home: Path,
) -> None:
    cluster = pods.up(2, slots=4, name="one")
    assert [ssh(cluster, pod.address, "echo", pod.name) for pod in cluster.pods] == ["pod1", "pod2"]
    assert cluster.hostfile.read_text() == "".join(f"{pod.address} slots=4\n" for pod in cluster.pods)
    assert pods.up(2, slots=4, name="one") == cluster
    with pytest.raises(UserError, match=r"one: is up with other settings \(count 2 -> 1\)"):
        pods.up(1, slots=4, name="one")
    hostfile = home.parent / "hosts"
    hostfile.write_text("127.0.0.1 slots=1\n")
    with pytest.raises(UserError, match=r"count 2 -> 1, .*hosts none -> 127\.0\.0\.1 slots=1"):
        pods.up(hostfile=hostfile, name="one")
    (found,) = json.loads(zeropods("pods", "list", "--json").stdout)["clusters"]
    assert found["hostfile"] == str(cluster.hostfile)
    assert [(pod["address"], pod["slots"], pod["status"]) for pod in found["pods"]] == [
        (pod.address, 4, "ready") for pod in cluster.pods
    ]
    ports = ports_of([cluster])
    assert zeropods("pods", "down").stdout == "down: one\n"
    cluster.down()
    assert not processes_of(home) and not any(listens(*port) for port in ports) and not list(home.iterdir())


def test_a_dead_cluster_is_replaced_and_the_old_one_does_not_end_the_new(home: Path) -> None:
    old = pods.up(1, name="one")
    for process in processes_of(home):
        os.kill(process, signal.SIGKILL)
    new = pods.up(1, name="one")
    assert new.pods != old.pods and ssh(new, new.pods[0].address, "echo", "there") == "there"
    old.down()
    assert new.is_ready()


def test_two_clusters_at_once_have_their_own_pods(home: Path) -> None:
    starts = [
        program(f"from zeropods.cli import main; main(['pods', 'up', '--count', '2', '--name', {n!r}])") for n in "ab"
    ]
    errors = [start.communicate(timeout=SECONDS)[1] for start in starts]
    assert [cluster.name for cluster in pods.clusters()] == ["a", "b"], errors
    first, second = pods.clusters()
    assert len({pod.address for pod in first.pods + second.pods}) == 4
    first.down()
    assert second.is_ready()
    assert zeropods("pods", "down", "--all").stdout == "down: b\n"


def test_pods_end_with_the_process_that_holds_their_lease(home: Path) -> None:
    holder = program(
        "import time; from zeropods import pods; pods.up(2, lease_seconds=3); print('up', flush=True); time.sleep(300)"
    )
    assert holder.stdout is not None and holder.stdout.readline() == "up\n"
    time.sleep(4.5)
    (cluster,) = pods.clusters()
    assert cluster.is_ready()
    holder.kill()
    holder.communicate()
    until(lambda: not processes_of(home))

    def is_swept() -> bool:
        remove_ended_clusters()
        return not list(home.iterdir())

    # A process that is about to end shows no environment any more, and still counts as running.
    until(is_swept)


def test_a_program_that_ends_takes_its_pods_down(home: Path) -> None:
    done = program("from zeropods import pods; pods.up(2); print('up')")
    assert done.communicate(timeout=SECONDS) == ("up\n", "")
    assert not processes_of(home) and not list(home.iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_up_that_is_interrupted_leaves_nothing(home: Path, worker: Path, number: int, status: int) -> None:
    starter = starting(
        worker, "import sys; from zeropods.cli import main; sys.exit(main(['pods', 'up', '--count', '3']))"
    )
    until(lambda: len(list(home.glob("pods/workers/*.json"))) == 3)
    time.sleep(0.5)
    starter.send_signal(number)
    starter.communicate(timeout=SECONDS)
    assert starter.returncode == status and not processes_of(home) and not list(home.iterdir())


def test_up_that_was_killed_is_cleared_by_down_though_its_workers_ignore_sigterm(
    home: Path, worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.write_text(DEAF)
    starter = starting(worker, "from zeropods import pods; pods.up(2, name='dead')")
    until(lambda: len(list(home.glob("dead/workers/*.json"))) == 2)
    time.sleep(0.5)
    starter.kill()
    starter.communicate()
    monkeypatch.setattr(local, "WORKER_STOP_SECONDS", 1.0)
    assert take_down("dead")
    assert not processes_of(home) and not list(home.iterdir())


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "raise SystemExit('no GPU here')",
            r"worker \w+ \(127\.\d+\.\d+\.\d+\) ended with exit code 1; .* no GPU here",
        ),
        (SLEEPER, r"0 of 2 pods after 3 s: worker \w+ \(127.*\) is running; it wrote nothing; worker \w+"),
    ],
)
def test_a_worker_that_dies_or_says_nothing_is_named(home: Path, worker: Path, script: str, line: str) -> None:
    worker.write_text(script)
    with pytest.raises(UserError, match=line):
        pods.up(2, seconds=3)


def test_cml_is_told_no_secret_and_no_process_of_its_pods_shows_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cml = CmlDouble()
    cml.install(monkeypatch)
    cluster = pods.up(3, cpu=1, memory=2)
    needles = secrets_of(cluster).values()
    shown = [text for name in ("cmdline", "environ") for text in of_processes(name).values()]
    assert sum(b"worker_p.py" in text for text in shown) >= 3
    assert cml.calls and any("ZEROPODS_ORDERS" in call["env"] for call in cml.calls)
    # What CML keeps in its database is what it was told.
    shown += [repr(call).encode() for call in cml.calls]
    assert [text for text in shown if any(needle in text for needle in needles)] == []
    secret_file = cluster.folder / SECRET_FILE
    assert secret_file.stat().st_mode & 0o777 == 0o600
    cluster.down()
    assert not secret_file.exists()


# The secret and the key lie in two files that only their owner reads, and nowhere else while a run goes on.


PAUSE_SECONDS = 0.02


@contextlib.contextmanager
def watching() -> Iterator[set[bytes]]:
    """Command lines and environments of all processes of the machine, read again and again until it is left."""
    texts: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(PAUSE_SECONDS):
            for name in ("cmdline", "environ"):
                texts.update(of_processes(name).values())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield texts
    finally:
        over.set()
        thread.join()


def secrets_of(cluster: Cluster) -> dict[str, bytes]:
    """The secret in each form in which it could be seen, and what the private key's file has of its own."""
    secret, lines = cluster.secret, (cluster.folder / KEY_FILE).read_bytes().splitlines()[2:-1]
    forms = {"raw": secret, "hexadecimal": secret.hex().encode(), "base64": base64.b64encode(secret).rstrip(b"=")}
    return {**forms, **{f"line {number} of the key": line for number, line in enumerate(lines)}}


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
    with watching() as texts:
        up = pods.up(3, name="watched")
        try:
            process = started(up, run, "--seconds", 600)
            ranks = train(run)
            environments = of_processes("environ")
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

    words = [b"worker_p.py", b"sshd", b"pdsh", b"rank.py", b"ssh", b"ZEROPODS_ORDERS=", b"ZEROPODS_RUN="]
    assert [word for word in words if not any(word in text for text in texts)] == []
    assert [(text, found(text)) for text in texts if found(text)] == []
    assert all(b"ZEROPODS_RUN=" in environments[rank] for rank in ranks)
    assert not any(b"ZEROPODS_ORDERS" in environments[rank] for rank in ranks)
    assert not up.folder.exists()
    assert {path.name for path, text in files.items() if found(text)} == {SECRET_FILE, KEY_FILE}
    assert (modes["watched"], modes[SECRET_FILE], modes[KEY_FILE]) == (0o700, 0o600, 0o600)
    names = {path.name for path in files}
    assert {"record.json", "config.json", "state.json", "hostfile", "ssh_config", "launch.json"} <= names
    assert any(path.suffix == ".log" for path in files)
    assert "rank 0 trains" in said and found(said.encode()) == []
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks and [path.name for path in notebooks if found(path.read_bytes())] == []
