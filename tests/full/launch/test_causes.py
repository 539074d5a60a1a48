"""Faults in real runs over real pods: the rank that began the end is named, with its pod and the reason."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.faults import LIBRARY, SECONDS, give_order, kill_rank, until_trains
from tests.full.forks import begin_ranks
from tests.full.launches import left, record
from zeropods.measure.record import read_record
from zeropods.pods.cluster import Cluster

AT_A_TIME = 3
"""Number of runs that go on side by side."""
ENDLESS = [*TINY, "--eval_steps", "0", "--threads", "1", "--max_steps", "100000"]


@dataclass(frozen=True)
class Case:
    """A fault in one rank, and what is to be said of it."""

    act: Callable[[Path, int], object]
    """Does it to a rank of the run in this folder."""
    said: str
    """Part of the reason."""
    rank: int = 1
    pods: int = 2
    technique: str | None = None
    """A file of `dsconfig/`; plain data parallelism if not given."""
    status: str = "failed"
    last_words: str = ""
    step_timeout: float | None = None


def ordered(fault: str) -> Callable[[Path, int], object]:
    """A fault that the rank does by itself, see `faulty_library`."""
    return partial(give_order, fault=fault)


CASES = {
    "SIGKILL": Case(
        kill_rank, "rank 1 left no measurement: killed by SIGKILL, phase steady, ", pods=3, technique="zero2"
    ),
    "SIGSEGV": Case(
        ordered("segmentation fault"), "rank 0 left no measurement: killed by SIGSEGV, phase steady, ", rank=0,
        technique="zero1",
    ),
    "exit": Case(
        ordered("exit"), "rank 1: exit() was called at tests/full/faulty_library/sentencepiece.py:",
        last_words="before the run was finished", technique="zero2",
    ),
    "os._exit(0)": Case(
        ordered("os._exit(0)"), "rank 1 left no measurement: ended with status 0 before the run was finished, phase ",
        last_words="the library says goodbye",
    ),
    "os._exit(3)": Case(
        ordered("os._exit(3)"), "rank 0 left no measurement: ended with status 3, phase steady, ", rank=0,
        last_words="the library says goodbye",
    ),
    "exception": Case(
        ordered("exception"), "rank 1: ValueError: row 7 is damaged", last_words="ValueError: row 7 is damaged",
        technique="zero3",
    ),
    "memory": Case(
        ordered("torch out of memory"), "rank 1: RuntimeError: [enforce fail at alloc_cpu.cpp", status="oom",
        last_words="DefaultCPUAllocator: can't allocate memory",
    ),
    "disk full": Case(
        ordered("disk full"), "rank 1: OSError: [Errno 28] No space left on device",
        last_words="zeropods: No space left on device",
    ),
    "hang": Case(
        ordered("hang"), "rank 1 on pod2 is at tests/full/faulty_library/sentencepiece.py:", status="timeout",
        step_timeout=20.0,
    ),
}  # fmt: skip


def begun(cluster: Cluster, folder: Path, prepared: Path, case: Case) -> subprocess.Popen[str]:
    """A launch, as a user calls it."""
    config = [] if case.technique is None else ["--deepspeed", ROOT / "dsconfig" / f"{case.technique}.json"]
    limit = [] if case.step_timeout is None else ["--step-timeout", case.step_timeout]
    flags = [*ENDLESS, "--dataset_path", prepared, "--outputdir", folder, *config]
    words = ["launch", "--name", cluster.name, "--num-pods", case.pods, *limit, "--", "textsql_train.py", *flags]
    command = [sys.executable, "-m", "zeropods", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LIBRARY), str(ROOT)])}
    with open(f"{folder}.said", "w") as said:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said, text=True)


def broken_run(cluster: Cluster, folder: Path, prepared: Path, case: Case) -> int:
    """Launch a run, let the fault happen once it trains, and return the exit status of the launch."""
    launch = begun(cluster, folder, prepared, case)
    try:
        until_trains(folder, case.pods, launch.poll)
        case.act(folder, case.rank)
        return launch.wait(SECONDS)
    finally:
        launch.terminate()
        launch.wait()


@pytest.fixture(scope="module")
def broken(cluster: Cluster, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """The run folder and the exit status of each case."""
    area = tmp_path_factory.mktemp("broken")
    folders = {name: area / name.replace(" ", "-") for name in CASES}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        statuses = pool.map(lambda name: broken_run(cluster, folders[name], prepared, CASES[name]), CASES)
        return {name: (folders[name], status) for name, status in zip(CASES, statuses, strict=True)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_began_the_end_is_named_in_the_record_and_in_what_is_printed(
    broken: dict[str, tuple[Path, int]], name: str
) -> None:
    folder, status = broken[name]
    case, found = CASES[name], record(folder)
    said = Path(f"{folder}.said").read_text()
    pod = f"pod{case.rank + 1}"
    assert status == 1, said
    assert (found["status"], found["pod"], found["rank"]) == (case.status, pod, case.rank), found["reason"]
    assert case.said in found["reason"] and "GLHF" not in found["reason"]
    assert f"zeropods: {folder}: {case.status}: {pod}: {found['reason']}" in said
    assert any(case.last_words in line for line in found["last_lines"])
    assert not left(folder)


def test_the_ends_of_all_ranks_are_recorded_in_their_order(broken: dict[str, tuple[Path, int]]) -> None:
    exits = record(broken["SIGKILL"][0])["exits"]
    assert [(exits[0]["rank"], exits[0]["status"])] == [(1, -signal.SIGKILL)]
    assert {each["rank"]: each["status"] for each in exits} == {0: 1, 1: -signal.SIGKILL, 2: 1}
    assert not list((broken["SIGKILL"][0] / "ranks").glob("*.exit"))


# Ranks that end before they have opened the run.


def test_a_run_whose_ranks_all_end_before_it_is_opened_has_a_record(
    cluster: Cluster, prepared: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(prepared, tmp_path / "broken"))
    os.truncate(next((data / "train").glob("*.arrow")), 100)
    launch = begun(cluster, tmp_path / "run", data, Case(kill_rank, "", technique="zero1"))
    assert launch.wait(SECONDS) == 1
    said = Path(f"{tmp_path / 'run'}.said").read_text()
    found = read_record(tmp_path / "run")
    assert (found.status, found.pods, found.model_id, found.technique) == ("failed", 2, "t5-tiny", "zero1"), said
    assert (found.rank, found.pod) in ((0, "pod1"), (1, "pod2")) and str(data) in (found.reason or "")
    assert {seen.rank: seen.status for seen in found.exits} == {0: 1, 1: 1}


# Runs without pods.


def test_a_script_in_which_a_library_calls_exit_does_not_end_with_status_0(prepared: Path, tmp_path: Path) -> None:
    flags = [*ENDLESS, "--dataset_path", prepared, "--outputdir", tmp_path / "run"]
    path = os.pathsep.join([str(LIBRARY), str(ROOT)])
    (rank,) = begin_ranks(flags, 1, tmp_path / "said", PYTHONPATH=path)
    until_trains(tmp_path / "run", 1, lambda: rank.returncode)
    give_order(tmp_path / "run", 0, "exit")
    said = rank.communicate(SECONDS)
    assert rank.returncode == 1, said
    found = record(tmp_path / "run")
    assert found["status"] == "failed" and found["reason"].startswith("exit(")
    assert f"zeropods: {found['reason']} before the run was finished" in said
