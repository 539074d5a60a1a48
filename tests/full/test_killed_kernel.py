"""A notebook with pods whose kernel is killed in mid-run: what is left of it, and what happens when it is run again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from tests.full.clusters import processes_of
from tests.full.conftest import ROOT
from tests.full.launches import RANK, processes, record, until
from zeropods.pods.removal import take_down
from zeropods.pods.state import names

PODS_SECONDS, RANKS_SECONDS = 30, 15
CELLS = (
    "from zeropods import pods\ncluster = pods.up(2, name='notebook')",
    """from tests.full.over_pdsh import pdsh_argv
from zeropods.launch.planning import plan_launch
from zeropods.launch.run import run_launch
planned = plan_launch(cluster, {script!r}, ['--outputdir', {folder!r}, '--seconds', '{seconds}'])
run_launch(planned, cluster, argv=pdsh_argv)""",
    "cluster.down()",
)


@dataclass(frozen=True)
class Killed:
    """What came of it."""

    ranks_seconds: float
    """From the kernel's end to that of the last rank."""
    pods_seconds: float
    """To that of the last process of the pods."""
    folder: Path


def notebook(folder: Path, seconds: float) -> NotebookClient:
    texts = [cell.format(script=str(RANK), folder=str(folder), seconds=seconds) for cell in CELLS]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    return NotebookClient(document, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """A notebook whose kernel was killed while its two ranks trained; then it was executed again, to its end."""
    area = tmp_path_factory.mktemp("kernel")
    home, folder = area / "home", area / "run"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ZEROPODS_HOME", str(home))
        environment.setenv("PYTHONPATH", str(ROOT))
        at: list[float] = []
        killer = threading.Thread(target=kill_kernel, args=(folder, home, at))
        killer.start()
        with pytest.raises(DeadKernelError):
            notebook(folder, 600).execute()
        killer.join()
        until(lambda: not processes(RANK, folder))
        ranks = time.monotonic() - at[0]
        until(lambda: not processes_of(home))
        gone = time.monotonic() - at[0]
        try:
            notebook(folder, 0.5).execute()
        finally:
            for name in names():
                take_down(name)
        yield Killed(ranks, gone, folder)


def kill_kernel(folder: Path, home: Path, at: list[float]) -> None:
    until(lambda: all((folder / f"pid.{rank}").is_file() for rank in range(2)))
    (kernel,) = [pid for pid in processes_of(home) if "ipykernel_launcher" in command(pid)]
    os.kill(kernel, signal.SIGKILL)
    at.append(time.monotonic())


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def test_its_ranks_end_with_the_lease_of_the_run(killed: Killed) -> None:
    assert killed.ranks_seconds < RANKS_SECONDS


def test_its_pods_end_by_themselves(killed: Killed) -> None:
    assert killed.pods_seconds < PODS_SECONDS, killed


def test_executed_again_it_goes_on_with_its_run(killed: Killed) -> None:
    found: dict[str, Any] = record(killed.folder)
    assert (found["status"], found["attempt"]) == ("ok", 1)


def test_the_attempt_that_ended_with_the_kernel_is_kept(killed: Killed) -> None:
    assert [path.name for path in (killed.folder / "attempts").iterdir()] == ["0.json"]
