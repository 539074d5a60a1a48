"""Leases of a pod and its runs over real processes: what is found below an agent, and what ends when."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.full.launches import until
from zeropods.pods import leases
from zeropods.pods.leases import IDLE, KERNEL, Leases
from zeropods.pods.processes import RUN, Process

SLEEP = "import time; time.sleep(600)"
SECONDS = 20.0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process below this one, which is the agent here; checks come ten times as often."""
    monkeypatch.setattr(leases, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(leases, "STRANGER_SECONDS", 1.0)
    started: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, run: str | None = None) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, **({RUN: run} if run else {})}))
        until(lambda: Process(started[-1].pid).cmdline() == list(argv))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def lived(work: Callable[[Leases], object], seconds: float, happens: Callable[[], bool] = lambda: False) -> list[str]:
    """Why a pod was ended within so long, or before something happened; its leases were used so when they began."""
    ended: list[str] = []

    async def main() -> None:
        pod = Leases(os.getpid(), list, ended.append)
        work(pod)
        watching = asyncio.create_task(pod.watch())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended and not happens():
            await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(main())
    return ended[:1]


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(("kind", "ends"), [(KERNEL, True), (IDLE, False)])
def test_an_open_run_holds_an_idle_lease_only(kind: str, ends: bool) -> None:
    def use(pod: Leases) -> None:
        pod.open(kind, 0.3)
        pod.renew_run("r", 60.0)

    assert bool(lived(use, 0.9)) == ends


def test_a_run_that_nobody_opens_and_a_late_process_of_an_ended_one_are_ended(start) -> None:
    stranger, late = (start(sys.executable, "-c", SLEEP, run=run) for run in ("stranger", "ended"))

    async def end(pod: Leases) -> None:
        await pod.end_run("ended", 0.0)

    lived(lambda pod: asyncio.ensure_future(end(pod)), SECONDS, lambda: late.poll() is not None)
    assert late.poll() is not None and stranger.poll() is None
    lived(lambda pod: None, SECONDS, lambda: stranger.poll() is not None)
    assert stranger.poll() is not None
