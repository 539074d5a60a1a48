"""The agent of a pod, with a real warden, a real sshd and real processes: what it starts, watches and ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.full.launches import ROOT, until
from tests.full.one_pod import WAIT_SECONDS, OnePod, all_gone, process_in
from zeropods.errors import UserError
from zeropods.pods.processes import Process, is_alive, send
from zeropods.pods.ssh import Sshd, make_key
from zeropods.pods.wire import WireError
from zeropods.programs import free_port

RANK = """\
import os, pathlib, signal, sys, time
def asked(*_):
    pathlib.Path(sys.argv[1] + ".asked").write_text("yes")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else asked)
pathlib.Path(sys.argv[1] + ".new").write_text(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def start_pod(tmp_path: Path) -> Iterator[Callable[..., OnePod]]:
    """Starts the test's pod, which is ended with all that it had."""
    pods: list[OnePod] = []

    def start(**how: object) -> OnePod:
        pods.append(OnePod(tmp_path, **how))
        return pods[-1]

    yield start
    for pod in pods:
        pod.clean_up()
        assert not pod.processes()


@pytest.fixture(scope="module")
def shared_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnePod]:
    """A pod that tests leave up; each has runs of its own."""
    pod = OnePod(tmp_path_factory.mktemp("pod"))
    yield pod
    pod.clean_up()
    assert not pod.processes()


@pytest.fixture
def rank(tmp_path: Path) -> Callable[..., str]:
    """Makes the command line of a process that writes its number into a file, and notes when it is asked to end."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    return lambda file, *how: f"{sys.executable} {script} {tmp_path / file} {' '.join(how)}"


def detached(command: str) -> str:
    """A shell line that leaves `command` running when its shell and its session are gone."""
    return f"(setsid nohup {command} </dev/null >/dev/null 2>&1 &)"


def run_of_two(pod: OnePod, rank: Callable[..., str], folder: Path, run: str) -> tuple[Process, Process]:
    """A session with one process of a run, and one that was detached from it."""
    pod.ask(do="renew", run=run, seconds=20.0)
    pod.ssh_session(f"export ZEROPODS_RUN={run}; {detached(rank(f'{run}.away'))}; {rank(run)}; true")
    return process_in(folder / run), process_in(folder / f"{run}.away")


def test_a_pod_registers_and_its_sshd_answers_the_clusters_key_only(start_pod, tmp_path, monkeypatch) -> None:
    for name in ("CDSW_PROJECT", "CDSW_API_KEY", "CDSW_MASTER_IP"):
        monkeypatch.setenv(name, f"the {name}")
    pod = start_pod()
    assert (pod.registration.worker, pod.registration.slots) == ("worker-1", 1)
    seen = dict(line.split("=", 1) for line in pod.ssh("env").stdout.splitlines())
    assert seen["ZEROPODS_POD"] == pod.address and str(Path(sys.executable).parent) in seen["PATH"]
    assert {name: value for name, value in seen.items() if name.startswith("CDSW_")} == {
        "CDSW_ENGINE_ID": "worker-1",
        "CDSW_IP_ADDRESS": pod.address,
        "CDSW_MASTER_IP": "the CDSW_MASTER_IP",
        "CDSW_PROJECT": "the CDSW_PROJECT",
    }
    until(lambda: f"pod {pod.address}: ready, ssh port {pod.ssh_port}\n" in pod.said())
    assert pod.temporary.stat().st_mode & 0o777 == 0o700
    os.remove(tmp_path / "id_ed25519")
    make_key(tmp_path / "id_ed25519", "stranger")
    done = pod.ssh("true")
    assert done.returncode == 255 and "Permission denied" in done.stderr


# Leases


def test_a_run_that_is_not_renewed_is_ended_and_others_go_on(shared_pod, rank, tmp_path) -> None:
    pod = shared_pod
    lost = run_of_two(pod, rank, tmp_path, "lost")
    kept = run_of_two(pod, rank, tmp_path, "kept")
    pod.ssh_session(f"{rank('unmarked')}; true")
    unmarked = process_in(tmp_path / "unmarked")
    pod.ask(do="renew", run="lost", seconds=1.0)
    until(lambda: all_gone({*lost}))
    assert (tmp_path / "lost.asked").exists(), "it was killed without being asked"
    assert all(map(is_alive, [*kept, unmarked]))
    with pytest.raises(WireError, match="run lost has ended"):
        pod.ask(do="renew", run="lost", seconds=10.0)
    assert pod.ask(do="renew", run="kept", seconds=10.0)["processes"] == 2
    late = pod.ssh_session(f"export ZEROPODS_RUN=lost; {rank('late')}; true")
    late.wait(WAIT_SECONDS)


def test_a_renewal_tells_how_many_processes_there_are_and_were(shared_pod, rank, tmp_path) -> None:
    pod = shared_pod
    opened = pod.ask(do="renew", run="counted", seconds=20.0)
    assert (opened["processes"], opened["seen"], opened["last_seen_seconds"]) == (0, 0, None)
    members = run_of_two(pod, rank, tmp_path, "counted")
    assert pod.ask(do="status")["runs"]["counted"] == 2
    for process in members:
        send(process, signal.SIGKILL)
    until(lambda: pod.ask(do="renew", run="counted", seconds=20.0)["processes"] == 0)
    after = pod.ask(do="renew", run="counted", seconds=20.0)
    assert after["seen"] == 2 and 0 < after["last_seen_seconds"] < WAIT_SECONDS


def test_the_end_of_a_run_asks_first_kills_what_does_not_heed_it_and_leaves_others(shared_pod, rank, tmp_path) -> None:
    pod = shared_pod
    members = run_of_two(pod, rank, tmp_path, "ended")
    others = run_of_two(pod, rank, tmp_path, "other")
    pod.ssh_session(f"export ZEROPODS_RUN=ended; {rank('deaf', 'deaf')}; true")
    deaf = process_in(tmp_path / "deaf")
    pod.ssh(detached(rank("behind")))
    behind = process_in(tmp_path / "behind")
    assert pod.ask(do="end", run="ended", grace_seconds=1.0)["left"] == 0
    assert all_gone({*members, deaf})
    assert (tmp_path / "ended.asked").exists() and (tmp_path / "ended.away.asked").exists()
    assert all(map(is_alive, [*others, behind]))


def test_a_kernel_lease_that_is_not_renewed_ends_the_pod(start_pod, rank, tmp_path) -> None:
    pod = start_pod(lease="kernel", lease_seconds=2.0)
    pod.ssh_session(f"{rank('session')}; true")
    process_in(tmp_path / "session")
    family = pod.processes()
    assert 1.0 < pod.ask(do="renew")["lease_seconds_left"] <= 2.0
    assert pod.warden.wait(WAIT_SECONDS) == 0
    assert all_gone(family)
    assert "its kernel lease was not renewed for 2 s" in pod.said()


def test_an_idle_lease_is_held_by_a_session(start_pod, rank, tmp_path) -> None:
    pod = start_pod(lease="idle", lease_seconds=2.0)
    session = pod.ssh_session(f"{rank('session')}; true")
    process_in(tmp_path / "session")
    with pytest.raises(subprocess.TimeoutExpired):
        pod.warden.wait(3.5)
    session.kill()
    session.wait(WAIT_SECONDS)
    assert pod.warden.wait(WAIT_SECONDS) == 0
    assert "its idle lease was not used for 2 s" in pod.said()


# The end of a pod


@pytest.mark.parametrize(
    ("victim", "signum", "status", "said"),
    [
        ("agent", signal.SIGKILL, 1, "the agent was killed by signal 9"),
        ("group", signal.SIGKILL, -9, ""),
        ("sshd", signal.SIGKILL, 1, "its sshd ended with status -9"),
        ("stopped agent", signal.SIGTERM, 1, "did not end in 10 s"),
        ("warden", signal.SIGTERM, 0, "ended: it got SIGTERM\n"),
        ("", 0, 0, "ended: it was asked to\n"),
    ],
)
def test_nothing_is_left_however_a_pod_ends(
    start_pod, rank, tmp_path, victim: str, signum: int, status: int, said: str
) -> None:
    pod = start_pod()
    run_of_two(pod, rank, tmp_path, "r")
    family, folder = pod.processes(), pod.temporary
    if victim in ("agent", "sshd"):
        send(getattr(pod, victim), signum)
    elif victim:
        if victim == "stopped agent":
            send(pod.agent, signal.SIGSTOP)
        os.killpg(pod.warden.pid, signum)
    else:
        assert pod.ask(do="end") == {"ending": True}
    assert pod.warden.wait(WAIT_SECONDS) == status
    until(lambda: all_gone(family))
    assert not folder.exists()
    assert said in pod.said()
    # Whatever was there was asked first, unless nobody was left to do so.
    assert (tmp_path / "r.asked").exists() == ("agent" not in victim)


# What cannot begin


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("ZEROPODS_SECRET", None, "ZEROPODS_SECRET: not set; a worker is started by `zeropods pods up`"),
        ("ZEROPODS_SECRET", "xyz", "ZEROPODS_...: non-hexadecimal number found"),
        ("ZEROPODS_SSH_PORTS", "2222,a", "ZEROPODS_...: invalid literal"),
        ("ZEROPODS_MASTER", "127.0.0.1:1", "no answer of the master in 1 s"),
    ],
)
def test_a_worker_that_cannot_begin_says_why_in_one_line(name: str, value: str | None, line: str) -> None:
    environment = {**os.environ, **worker_environment(), name: value}
    done = subprocess.run(
        [sys.executable, str(ROOT / "worker_p.py")],
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert line in done.stderr and "xyz" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_worker_that_waits_for_its_master_ends_at_once_on_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        environment = worker_environment(register_seconds="600", port=str(master.getsockname()[1]))
        with subprocess.Popen(
            [sys.executable, str(ROOT / "worker_p.py")], env={**os.environ, **environment}, stdout=subprocess.DEVNULL
        ) as worker:
            master.settimeout(WAIT_SECONDS)
            connection, _ = master.accept()
            worker.terminate()
            assert worker.wait(WAIT_SECONDS) == 0
            connection.close()


def worker_environment(register_seconds: str = "1", port: str = "1") -> dict[str, str]:
    return {
        "ZEROPODS_MASTER": f"127.0.0.1:{port}",
        "ZEROPODS_SECRET": secrets.token_hex(32),
        "ZEROPODS_SSH_PORTS": "2222",
        "ZEROPODS_SLOTS": "1",
        "ZEROPODS_REGISTER_SECONDS": register_seconds,
        "ZEROPODS_AUTHORIZED_KEY": "ssh-ed25519 AAAA",
        "ZEROPODS_LEASE": "idle",
        "ZEROPODS_LEASE_SECONDS": "60",
        "CDSW_IP_ADDRESS": "127.0.0.1",
        "CDSW_ENGINE_ID": "worker-1",
    }


@pytest.mark.parametrize("is_taken", [True, False])
def test_an_sshd_that_does_not_start_says_why(tmp_path, is_taken: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if is_taken else free_port("127.0.0.1")
        # No host key was made.
        said = f"127.0.0.1:{port}: taken meanwhile" if is_taken else "ended at its start: sshd: no hostkeys available"
        with pytest.raises(UserError, match=said):
            asyncio.run(Sshd(tmp_path, "127.0.0.1").start(port, "ssh-ed25519 AAAA"))
