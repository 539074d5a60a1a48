"""Leases of a pod and its runs over real processes: what is found below an agent, and what ends when."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from zeropods.pods import leases
from zeropods.pods.leases import IDLE, KERNEL, RUN_VARIABLE, Leases, pod_processes, takes_sigterm
from zeropods.pods.processes import (
    Process,
    child_pids,
    descendants,
    find_process,
    from_record,
    is_alive,
    is_stopped,
    send,
    to_record,
    variable,
)

WAIT_SECONDS = 20.0
SLEEP = shutil.which("sleep") or "sleep"


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    """A process below which others are started: it reads commands. All of them are killed when the test ends."""
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE) as shell:
        yield shell
        for process in (*descendants(shell.pid), known(shell.pid)):
            send(process, signal.SIGKILL)


@pytest.fixture
def start(agent: subprocess.Popen[bytes]) -> Callable[..., Process]:
    """Starts a process below the agent."""

    def begin(*argv: str, run: str | None = None) -> Process:
        before = {process.pid for process in Process(agent.pid).children()}
        mark = f"{RUN_VARIABLE}={run}" if run else ""
        assert agent.stdin is not None
        agent.stdin.write(f"{mark} {shlex.join(argv)} &\n".encode())
        agent.stdin.flush()
        until(lambda: [child for child in Process(agent.pid).children() if child.pid not in before])
        (child,) = [child for child in Process(agent.pid).children() if child.pid not in before]
        # Until then it is a copy of the shell, without its mark.
        until(lambda: child.cmdline()[-1:] == [argv[-1]] or not is_alive(child))
        return child

    return begin


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks come ten times as often."""
    monkeypatch.setattr(leases, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(leases, "STRANGER_SECONDS", 1.0)


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def known(pid: int) -> Process:
    process = find_process(pid)
    assert process is not None
    return process


def lived(agent: subprocess.Popen[bytes], work: Callable[[Leases], object], seconds: float) -> list[str]:
    """Why a pod was ended within so long, whose leases were used so when they began."""
    ended: list[str] = []

    async def main() -> None:
        pod = Leases(agent.pid, lambda: None, ended.append)
        work(pod)
        watching = asyncio.create_task(pod.watch())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended:
            await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(main())
    return ended[:1]


# Processes


def test_descendants_are_found_parents_first(start) -> None:
    child = start("sh", "-c", f"sh -c '{SLEEP} 600; true'; true")
    until(lambda: [process.name() for process in descendants(child.pid)] == ["sh", "sleep"])
    assert child_pids(child.pid) in (None, [descendants(child.pid)[0].pid])


def test_a_zombie_is_not_alive_and_of_a_process_that_has_ended_nothing_is_known() -> None:
    child = subprocess.Popen(["true"])
    process = known(child.pid)
    until(lambda: not is_alive(process))
    assert find_process(child.pid) == process
    child.wait(WAIT_SECONDS)
    assert (find_process(child.pid), variable(process, RUN_VARIABLE), descendants(child.pid)) == (None, None, [])
    assert not send(process, signal.SIGKILL) and not is_stopped(process)


def test_a_process_on_disk_is_known_again(start) -> None:
    child = start(SLEEP, "600")
    record = to_record(child)
    assert from_record(record) == child
    pid, started = record
    assert isinstance(started, float)
    assert from_record([pid, started - 60]) is None


def test_processes_below_an_agent_are_sorted_by_their_run(agent, start) -> None:
    first = start(SLEEP, "600", run="first")
    second = start("sh", "-c", f"env -i {SLEEP} 600; true", run="second")
    unmarked = start(SLEEP, "600")
    until(lambda: [process.name() for process in descendants(second.pid)] == ["sleep"])
    found = pod_processes(agent.pid, sshd=None)
    assert [process.pid for process in found.runs["first"]] == [first.pid]
    assert [process.name() for process in found.runs["second"]] == ["sh", "sleep"]
    assert unmarked in found.orphans and first not in found.orphans


def test_shells_and_the_deepspeed_launcher_are_not_asked_to_end(start, tmp_path) -> None:
    (tmp_path / "rank.py").write_text("import time; time.sleep(600)")
    shell = start("sh", "-c", f"{SLEEP} 600; true")
    rank = start(sys.executable, str(tmp_path / "rank.py"))
    launcher = start(sys.executable, "-c", "import time; time.sleep(600)", "-m", "deepspeed.launcher.launch")
    until(lambda: all("-c" in child.cmdline() for child in (shell, launcher)))
    until(lambda: rank.cmdline()[1:] == [str(tmp_path / "rank.py")])
    assert [takes_sigterm(child) for child in (shell, rank, launcher)] == [False, True, False]


# The pod's own lease


@pytest.mark.usefixtures("quick")
def test_a_lease_that_nobody_prolongs_ends_the_pod(agent) -> None:
    assert lived(agent, lambda pod: pod.open(KERNEL, 0.3), WAIT_SECONDS) == [
        "its kernel lease was not renewed for 0.3 s"
    ]
    assert lived(agent, lambda pod: pod.open(IDLE, 0.3), WAIT_SECONDS) == ["its idle lease was not used for 0.3 s"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("kind", "ends"), [(KERNEL, True), (IDLE, False)])
def test_an_open_run_holds_an_idle_lease_only(agent, kind: str, ends: bool) -> None:
    def use(pod: Leases) -> None:
        pod.open(kind, 0.5)
        pod.renew_run("r", 60.0)

    assert bool(lived(agent, use, 1.5)) == ends


# Runs


@pytest.mark.usefixtures("quick")
def test_a_run_whose_lease_runs_out_is_ended_for_ever_and_others_are_not(agent, start) -> None:
    lost, kept = start(SLEEP, "600", run="lost"), start(SLEEP, "600", run="kept")

    def use(pod: Leases) -> None:
        used.append(pod)
        assert pod.renew_run("lost", 0.2)["processes"] == 1
        pod.renew_run("kept", 60.0)

    used: list[Leases] = []
    lived(agent, use, 1.5)
    assert not is_alive(lost) and is_alive(kept)
    assert used[0].renew_run("lost", 60.0) == {"error": "run lost has ended"}
    assert used[0].status()["runs"] == {"kept": 1}


@pytest.mark.usefixtures("quick")
def test_a_run_that_nobody_opens_and_a_late_process_of_an_ended_one_are_ended(agent, start) -> None:
    stranger, late = start(SLEEP, "600", run="stranger"), start(SLEEP, "600", run="ended")

    async def end(pod: Leases) -> None:
        await pod.end_run("ended", 0.0)

    lived(agent, lambda pod: asyncio.ensure_future(end(pod)), 0.5)
    assert not is_alive(late) and is_alive(stranger)
    lived(agent, lambda pod: None, 2.5)
    assert not is_alive(stranger)


@pytest.mark.usefixtures("quick")
def test_what_nothing_has_left_behind_is_ended_unless_a_run_is_open(agent, start) -> None:
    orphan = start(SLEEP, "600")
    lived(agent, lambda pod: pod.renew_run("r", 60.0), 0.5)
    assert is_alive(orphan)
    lived(agent, lambda pod: None, 1.0)
    assert not is_alive(orphan)
