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
from tests.full.conftest import ROOT, TINY
from tests.full.launches import RANK, processes, record, until
from zeropods.measure.heartbeat import read_beats
from zeropods.pods.cluster import take_down
from zeropods.pods.state import names

PODS_SECONDS, RANKS_SECONDS = 30, 15
STAND_IN, TRAINING = "stand-in", "training"
KINDS = (STAND_IN, TRAINING) if os.environ.get("ZEROPODS_SOAK") == "1" else (STAND_IN,)
"""What trains: `rank.py`; in a soak the real script too, whose four ranks import for half a minute."""
INTERVAL = 5
REAL = [
    *TINY, "--save_steps", INTERVAL, "--eval_steps", 0, "--max_steps", 300, "--threads", 1,
    "--per_device_train_batch_size", 4,
]  # fmt: skip
CELLS = (
    "from zeropods import pods\ncluster = pods.up(2, name='notebook')",
    """from tests.full.over_pdsh import pdsh_argv
from zeropods.launch.planning import plan_launch
from zeropods.launch.supervisor import run_launch
planned = plan_launch(cluster, {script!r}, ['--outputdir', {folder!r}, *{flags!r}])
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
    is_real: bool


def notebook(script: Path, folder: Path, *flags: object) -> NotebookClient:
    texts = [cell.format(script=str(script), folder=str(folder), flags=[*map(str, flags)]) for cell in CELLS]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    return NotebookClient(document, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})


@pytest.fixture(scope="module", params=KINDS)
def killed(
    request: pytest.FixtureRequest, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Killed]:
    """A notebook whose kernel was killed while its two ranks trained; then it was executed again, to its end."""
    area = tmp_path_factory.mktemp("kernel")
    home, folder = area / "home", area / "run"
    is_real = request.param == TRAINING
    script = ROOT / "textsql_train.py" if is_real else RANK
    first = [*REAL, "--dataset_path", prepared] if is_real else ["--seconds", 600]
    again = first if is_real else ["--seconds", 0.5]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ZEROPODS_HOME", str(home))
        environment.setenv("PYTHONPATH", str(ROOT))
        at: list[float] = []
        killer = threading.Thread(target=kill_kernel, args=(folder, home, at))
        killer.start()
        with pytest.raises(DeadKernelError):
            notebook(script, folder, *first).execute()
        killer.join()
        until(lambda: not processes(script, folder))
        ranks = time.monotonic() - at[0]
        until(lambda: not processes_of(home))
        gone = time.monotonic() - at[0]
        try:
            notebook(script, folder, *again).execute()
        finally:
            for name in names():
                take_down(name)
        yield Killed(ranks, gone, folder, is_real)


def kill_kernel(folder: Path, home: Path, at: list[float]) -> None:
    until(lambda: trains(folder), 150)
    (kernel,) = [pid for pid in processes_of(home) if "ipykernel_launcher" in command(pid)]
    os.kill(kernel, signal.SIGKILL)
    at.append(time.monotonic())


def trains(folder: Path) -> bool:
    """Whether both ranks do, and have saved once if they are real."""
    if (folder / "checkpoints").exists():
        return min((beat.step for beat in read_beats(folder).values()), default=0) > INTERVAL + 2
    return all((folder / f"pid.{rank}").is_file() for rank in range(2))


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def test_its_ranks_end_with_the_lease_of_the_run(killed: Killed) -> None:
    assert killed.ranks_seconds < RANKS_SECONDS


def test_its_pods_end_by_themselves(killed: Killed) -> None:
    assert killed.pods_seconds < PODS_SECONDS, killed


def test_executed_again_it_goes_on_with_its_run(killed: Killed) -> None:
    found: dict[str, Any] = record(killed.folder)
    assert (found["status"], found["attempt"]) == ("ok", 1)


def test_real_training_goes_on_from_its_checkpoint(killed: Killed) -> None:
    if not killed.is_real:
        pytest.skip("a stand-in has no checkpoints: make soak")
    assert record(killed.folder)["ranks"][0]["first_step"] >= INTERVAL


def test_the_attempt_that_ended_with_the_kernel_is_kept(killed: Killed) -> None:
    assert [path.name for path in (killed.folder / "attempts").iterdir()] == ["0.json"]
