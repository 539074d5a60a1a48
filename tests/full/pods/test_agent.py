"""The agent of a pod, with a real warden, a real sshd and real processes: who gets in, and what is left of it.

How it ends runs, whole or in part, is what tests of launches over pods see.
"""

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.full.launches import RANK, ROOT, train, until
from zeropods import pods
from zeropods.errors import UserError
from zeropods.pods.agent import ORDERS
from zeropods.pods.cluster import KEY_FILE, Cluster, workers_of
from zeropods.pods.machine import LONG_SILENCE_SECONDS, seconds_of_silence
from zeropods.pods.processes import PROC, Process, descendants, is_alive, send
from zeropods.pods.ssh import make_key, ssh_argv, start_sshd
from zeropods.pods.wire import ask_all
from zeropods.programs import free_port

WAIT_SECONDS = 600.0
SECRET = secrets.token_hex(32)


def rank(folder: Path) -> str:
    """The command line of a rank of a run folder, which says there who it is, and when it is asked to end."""
    return f"env PYTHONPATH={ROOT} {sys.executable} {RANK} --outputdir {folder} --seconds 600"


def up(**how: Any) -> Cluster:
    """A cluster of one pod, which nothing here renews."""
    return pods.up(1, name="one", backend="local", lease="idle", **how)


def warden(cluster: Cluster) -> Process:
    """The process of the worker; its only child is the agent."""
    (worker,) = workers_of(cluster).processes()
    found = worker.find()
    assert found is not None
    return found


def said(cluster: Cluster) -> str:
    """What warden and agent have printed."""
    (log,) = (cluster.folder / "logs").iterdir()
    return log.read_text(encoding="utf-8")


def shell(cluster: Cluster, command: str) -> list[str]:
    """The command line that lets the pod's shell run a command."""
    return [*ssh_argv(cluster.ssh_config, cluster.pods[0].address, [])[:-1], command]


def session(cluster: Cluster, command: str) -> subprocess.Popen[bytes]:
    """A shell command on the pod that goes on."""
    nothing = subprocess.DEVNULL
    return subprocess.Popen(shell(cluster, command), stdin=nothing, stdout=nothing, stderr=nothing)


def test_a_pod_answers_the_cluster_s_key_only_and_keeps_those_of_cml_to_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CDSW_PROJECT", "CDSW_API_KEY"):
        monkeypatch.setenv(name, f"the {name}")
    cluster = up()
    (pod,) = cluster.pods
    told = subprocess.run(shell(cluster, "env"), capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    seen = dict(line.split("=", 1) for line in told.stdout.splitlines())
    assert seen["ZEROPODS_POD"] == pod.address and str(Path(sys.executable).parent) in seen["PATH"]
    of_cml = {"CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "CDSW_PROJECT"}
    assert {name for name in seen if name.startswith("CDSW_")} == of_cml
    until(lambda: f"pod {pod.address}: ready, ssh port {pod.ssh_port}\n" in said(cluster))
    (cluster.folder / KEY_FILE).unlink()
    make_key(cluster.folder / KEY_FILE, "stranger")
    done = subprocess.run(shell(cluster, "true"), capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 255 and "Permission denied" in done.stderr


def test_an_idle_lease_is_held_by_a_session(home: Path, tmp_path: Path) -> None:
    cluster = up(lease_seconds=5.0)
    worker, held = warden(cluster), session(cluster, f"{rank(tmp_path / 'session')}; true")
    train(tmp_path / "session", 1)
    time.sleep(3.0)
    held.kill()
    held.wait(WAIT_SECONDS)
    # If the session had not held it, it would have run out 3 s sooner.
    assert until(lambda: not is_alive(worker), WAIT_SECONDS) > 3.5
    assert "its idle lease was not used for 5 s" in said(cluster)


@pytest.mark.parametrize(
    ("victim", "signum", "told"),
    [
        ("agent", signal.SIGKILL, "the agent was killed by signal 9"),
        ("group", signal.SIGKILL, ""),
        ("sshd", signal.SIGKILL, "its sshd ended with status -9"),
        ("stopped agent", signal.SIGTERM, "did not end in 10 s"),
        ("warden", signal.SIGTERM, "ended: it got SIGTERM\n"),
        ("", 0, "ended: it was asked to\n"),
    ],
)
def test_nothing_is_left_however_a_pod_ends(home: Path, tmp_path: Path, victim: str, signum: int, told: str) -> None:
    cluster, near, away = up(), tmp_path / "near", tmp_path / "away"
    renewed = {"do": "renew", "run": "r", "seconds": 20.0}
    ask_all(cluster.agents, cluster.secret, renewed, WAIT_SECONDS)
    detached = f"(setsid nohup {rank(away)} </dev/null >/dev/null 2>&1 &)"
    session(cluster, f"export ZEROPODS_RUN=r; {detached}; {rank(near)}; true")
    for folder in (near, away):
        train(folder, 1)
    worker = warden(cluster)
    (agent,) = worker.children()
    sshd = next(child for child in agent.children() if child.name() == "sshd")
    # sshd writes its title over its arguments: they may end in blanks or in zeros.
    title = (PROC / str(sshd.pid) / "cmdline").read_bytes().decode()
    (place,) = re.findall(r"-f\W(\S+)/sshd_config", title)
    family = [worker, *descendants(worker.pid)]
    if victim in ("agent", "sshd"):
        send(agent if victim == "agent" else sshd, signum)
    elif victim:
        if victim == "stopped agent":
            send(agent, signal.SIGSTOP)
        os.killpg(worker.pid, signum)
    else:
        assert [*ask_all(cluster.agents, cluster.secret, {"do": "end"}, WAIT_SECONDS)] == [{"ending": True}]
    worker.wait(WAIT_SECONDS)
    until(lambda: not any(map(is_alive, family)))
    assert not Path(place).exists() and told in said(cluster)
    # Whatever was there was asked first, unless nobody was left to do so.
    assert (near / "ranks" / "0.json").exists() == ("agent" not in victim)


# What cannot begin


WORKER = [sys.executable, str(ROOT / "worker_p.py")]


@pytest.mark.parametrize("arguments", [[], ["stdin"]])
def test_a_worker_that_is_started_by_hand_says_what_it_is_for_in_one_line(arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != ORDERS}
    done = subprocess.run(
        [*WORKER, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"zeropods: worker_p\.py.*: no orders.*; it is the program of a pod, and is not started by hand; "
        r"start pods with: zeropods pods up --count N\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"other": 1}, "ZEROPODS_ORDERS: Orders.__init__() got an unexpected keyword argument 'other'; do master and"),
        ({"secret_file": "/nowhere/secret"}, "/nowhere/secret: No such file or directory; has its cluster ended?"),
        ({"secret_file": str(ROOT / "README.md")}, "README.md: is not a cluster's secret; zeropods pods down"),
        ({}, "no answer from the master in 1 s"),
    ],
)
def test_a_worker_that_cannot_begin_says_why_in_one_line(tmp_path: Path, changes: dict[str, object], line: str) -> None:
    environment = worker_environment(tmp_path, **changes)
    done = subprocess.run(
        WORKER,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert line in done.stderr and SECRET not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_worker_that_waits_for_its_master_ends_at_once_on_a_signal(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        environment = worker_environment(tmp_path, register_seconds=600, master=master.getsockname())
        with subprocess.Popen(WORKER, env={**os.environ, **environment}, stdout=subprocess.DEVNULL) as worker:
            master.settimeout(WAIT_SECONDS)
            connection, _ = master.accept()
            worker.terminate()
            assert worker.wait(WAIT_SECONDS) == 0
            connection.close()


def test_a_worker_shows_in_the_cluster_s_folder_that_it_lives(tmp_path: Path) -> None:
    """Machines that share the folder and cannot reach the worker look there."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        environment = worker_environment(tmp_path, register_seconds=600, master=master.getsockname())
        for path in (tmp_path / "secret", tmp_path):
            os.utime(path, (0, 0))
        assert seconds_of_silence(tmp_path) > LONG_SILENCE_SECONDS
        with subprocess.Popen(WORKER, env={**os.environ, **environment}, stdout=subprocess.DEVNULL) as worker:
            until(lambda: seconds_of_silence(tmp_path) < LONG_SILENCE_SECONDS, WAIT_SECONDS)
            worker.terminate()
            assert worker.wait(WAIT_SECONDS) == 0


def worker_environment(folder: Path, **changes: object) -> dict[str, str]:
    """Variables of a worker whose secret lies in a file of this folder."""
    secret_file = folder / "secret"
    secret_file.write_text(f"{SECRET}\n")
    orders = {
        "master": ("127.0.0.1", 1),
        "secret_file": str(secret_file),
        "ssh_ports": (2222,),
        "authorized_key": "ssh-ed25519 AAAA",
        "lease": "idle",
        "lease_seconds": 60.0,
        "slots": 1,
        "register_seconds": 1.0,
    }
    place = {"CDSW_IP_ADDRESS": "127.0.0.1", "CDSW_ENGINE_ID": "worker-1"}
    return {ORDERS: json.dumps({**orders, **changes}), **place}


@pytest.mark.parametrize("has_key", [True, False])
def test_an_sshd_takes_the_next_port_or_says_why_it_does_not_start(tmp_path: Path, has_key: bool) -> None:
    if has_key:
        make_key(tmp_path / "host_key", "")
    free = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        why = "Cannot bind any address" if has_key else "sshd: no hostkeys available"
        said = f"ended as soon as it was started: {why}"
        with pytest.raises(UserError, match=said):
            asyncio.run(start_sshd(tmp_path, "127.0.0.1", [taken], "ssh-ed25519 AAAA"))
        if has_key:
            sshd, port = asyncio.run(start_sshd(tmp_path, "127.0.0.1", [taken, free], "ssh-ed25519 AAAA"))
            sshd.kill()
            assert port == free and sshd.wait() == -signal.SIGKILL
