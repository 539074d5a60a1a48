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

from tests.full.launches import until
from zeropods.pods import leases
from zeropods.pods.leases import IDLE, KERNEL, Leases, takes_sigterm
from zeropods.pods.processes import RUN, Process, descendants, is_alive, send

SLEEP = shutil.which("sleep") or "sleep"


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    """A process below which others are started: it reads commands. All of them are killed when the test ends."""
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE) as shell:
        yield shell
        for process in (*descendants(shell.pid), Process(shell.pid)):
            send(process, signal.SIGKILL)


@pytest.fixture
def start(agent: subprocess.Popen[bytes]) -> Callable[..., Process]:
    """Starts a process below the agent."""

    def begin(*argv: str, run: str | None = None) -> Process:
        before = {process.pid for process in Process(agent.pid).children()}
        mark = f"{RUN}={run}" if run else ""
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


def lived(agent: subprocess.Popen[bytes], work: Callable[[Leases], object], seconds: float) -> list[str]:
    """Why a pod was ended within so long, whose leases were used so when they began."""
    ended: list[str] = []

    async def main() -> None:
        pod = Leases(agent.pid, list, ended.append)
        work(pod)
        watching = asyncio.create_task(pod.watch())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended:
            await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(main())
    return ended[:1]


def test_shells_and_the_deepspeed_launcher_are_not_asked_to_end(start, tmp_path) -> None:
    (tmp_path / "rank.py").write_text("import time; time.sleep(600)")
    shell = start("sh", "-c", f"{SLEEP} 600; true")
    rank = start(sys.executable, str(tmp_path / "rank.py"))
    launcher = start(sys.executable, "-c", "import time; time.sleep(600)", "-m", "deepspeed.launcher.launch")
    until(lambda: all("-c" in child.cmdline() for child in (shell, launcher)))
    until(lambda: rank.cmdline()[1:] == [str(tmp_path / "rank.py")])
    assert [takes_sigterm(child) for child in (shell, rank, launcher)] == [False, True, False]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("kind", "ends"), [(KERNEL, True), (IDLE, False)])
def test_an_open_run_holds_an_idle_lease_only(agent, kind: str, ends: bool) -> None:
    def use(pod: Leases) -> None:
        pod.open(kind, 0.5)
        pod.renew_run("r", 60.0)

    assert bool(lived(agent, use, 1.5)) == ends


@pytest.mark.usefixtures("quick")
def test_a_run_that_nobody_opens_and_a_late_process_of_an_ended_one_are_ended(agent, start) -> None:
    stranger, late = start(SLEEP, "600", run="stranger"), start(SLEEP, "600", run="ended")

    async def end(pod: Leases) -> None:
        await pod.end_run("ended", 0.0)

    lived(agent, lambda pod: asyncio.ensure_future(end(pod)), 0.5)
    assert not is_alive(late) and is_alive(stranger)
    lived(agent, lambda pod: None, 2.5)
    assert not is_alive(stranger)
