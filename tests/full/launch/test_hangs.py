"""Runs that hang, wait for a lost rank, or have no memory left, for real: found, named, ended, with nothing left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.forks import Forked, begin_ranks
from tests.full.launches import ended, left, record, started, until
from tests.small_memory import small_memory, within
from zeropods import pods
from zeropods.launch.local import start_child, to_end
from zeropods.measure.heartbeat import read_beats
from zeropods.measure.record import LAUNCH_LOCK, read_record
from zeropods.measure.run_folder import locked
from zeropods.pods.cluster import Cluster

STEP_TIMEOUT = 6.0


@pytest.fixture(scope="module")
def hung(cluster: Cluster, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that wait for their ends together.

    `stopped`, on two pods, of which a rank was stopped; `skipped`, of two ranks, of which one passes by a barrier; and
    `full`, of one that finds no memory.
    """
    folder = tmp_path_factory.mktemp("hung")
    stopped = folder / "stopped"
    process = started(cluster, stopped, "--seconds", 600, pods=2, step_timeout=STEP_TIMEOUT)
    until(lambda: len(beats := read_beats(stopped)) == 2 and min(beat.step for beat in beats.values()) > 3)
    os.kill(read_beats(stopped)[1].pid, signal.SIGSTOP)
    flags = [*TINY, "--dataset_path", prepared, "--eval_steps", 0, "--max_steps", 100]
    runs = ["--", 1, folder / "full", "--", 2, folder / "skipped"]
    argv = [sys.executable, "-m", "tests.full.misbehaving", *map(str, [*flags, *runs])]
    try:
        # Watched as `--launcher none` has it.
        with pytest.MonkeyPatch.context() as environment, locked(folder / "skipped", LAUNCH_LOCK):
            environment.setenv("PYTHONPATH", str(ROOT))
            to_end(lambda output: [start_child(argv, output)], folder / "skipped", step_timeout=STEP_TIMEOUT)
    finally:
        said = ended(process)
    assert process.returncode == 1, said
    return folder


def test_a_rank_that_skips_a_collective_ends_the_run_with_places_and_stacks(hung: Path) -> None:
    folder, done = hung / "skipped", read_record(hung / "skipped")
    assert done.status == "timeout" and done.reason is not None
    for said in ("distributed_c10d.py", "barrier", "from tests/full/misbehaving.py", "rank 0 waits", "rank 1 waits"):
        assert said in done.reason
    assert "in of_its_own" in (folder / "stacks" / "0.txt").read_text()
    assert "in _run_epoch" in (folder / "stacks" / "1.txt").read_text()
    assert [rank.step for rank in done.ranks] == [3, 3] and not left(folder)


def test_an_allocation_that_fails_is_out_of_memory_with_phase_and_peak(hung: Path) -> None:
    folder = hung / "full"
    found = record(folder)
    assert found["status"] == "oom" and "can't allocate memory" in found["reason"]
    assert re.search(r"; phase steady, 3 steps done, peak resident 0\.\d\d GiB$", found["reason"])
    # A rank that ends in order leaves neither heartbeat nor stacks.
    assert [path.name for path in (folder / "ranks").iterdir()] == ["0.json"]
    assert not (folder / "stacks").exists()


def test_a_stopped_rank_of_two_pods_is_named_and_the_run_ended(hung: Path) -> None:
    folder, found = hung / "stopped", record(hung / "stopped")
    assert (found["status"], found["pod"], found["rank"]) == ("timeout", "pod2", 1)
    assert "rank 1 on pod2 is stopped at" in found["reason"] and "rank 0 on pod1 is at" in found["reason"]
    assert "in train" in (folder / "stacks" / "0.txt").read_text()
    assert "is stopped; its main thread" in (folder / "stacks" / "1.txt").read_text()
    assert not left(folder)


def test_a_rank_that_the_kernel_ended_is_named_with_its_pod_and_phase(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with small_memory(700) as group:
        up = [sys.executable, "-m", "zeropods", "pods", "up", "--count", 2, "--name", "small"]
        subprocess.run(within(group, up), capture_output=True, timeout=240, check=True)
        cluster = pods.find("small")
        try:
            said = ended(started(cluster, folder, "--seconds", 60, "--hog_mib", 8))
        finally:
            cluster.down()
    found = record(folder)
    assert found["status"] == "oom" and found["pod"] in ("pod1", "pod2"), said
    assert found["rank"] == int(found["pod"] == "pod2")
    assert f"rank {found['rank']}: killed by the kernel, out of memory: phase steady, " in found["reason"]
    assert not left(folder)


# Ranks of one run, of which one waits for another.


SECONDS = 600.0


@contextmanager
def two_ranks(said: Path, arguments: list[object], **variables: str) -> Iterator[list[Forked]]:
    """Two ranks that train, each the only one of its pod; neither is left."""
    ranks = begin_ranks([*TINY, *arguments], 2, said, LOCAL_RANK="0", LOCAL_SIZE="1", **variables)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate(SECONDS)


def said(ranks: list[Forked]) -> list[list[str]]:
    """The lines for people of each rank, after its end."""
    texts = [rank.communicate(SECONDS) for rank in ranks]
    return [[line for line in text.splitlines() if line.startswith("zeropods: ")] for text in texts]


@pytest.fixture
def flags(prepared: Path, tmp_path: Path) -> list[object]:
    return ["--dataset_path", prepared, "--outputdir", tmp_path / "run", "--eval_steps", "0", "--precision", "fp32"]


def test_a_rank_that_waits_for_a_lost_one_still_leaves_what_it_measured(flags: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = [*flags, "--max_steps", "100000", "--per_device_train_batch_size", "1"]
    with two_ranks(tmp_path / "said", endless, ZEROPODS_RUN="r1") as ranks:
        log = run / "train.log"
        until(lambda: log.is_file() and "step 5 " in log.read_text(), SECONDS)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(1)
        ranks[0].send_signal(signal.SIGTERM)
        until((run / "ranks" / "0.json").is_file, SECONDS)
        left = json.loads((run / "ranks" / "0.json").read_text())
    assert (left["status"], left["reason"]) == ("interrupted", "SIGTERM while waiting for other ranks")
    assert len(left["losses"]) >= 5
    assert left["step"] == len(np.load(run / "steps" / "0.npy")) >= left["losses"][-1]["step"]
    assert left["peak_resident_bytes"] >= left["phases"]["steady"]["peak_resident_bytes"] > 0
    assert left["sampled"]["resident_bytes"]["samples"] > 0


def test_an_error_that_all_ranks_share_is_said_once_and_one_before_they_meet_by_each(
    flags: list[object], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "of_somebody_else").touch()
    for added, line, count in (
        ([], "is not empty and is not a run folder", 1),
        (["--dataset_path", "/nowhere"], "no prepared data set", 2),
    ):
        with two_ranks(tmp_path / f"said-{count}", [*flags, "--max_steps", "1", *added]) as ranks:
            lines = [each for own in said(ranks) for each in own]
            assert [rank.returncode for rank in ranks] == [1, 1]
        assert len(lines) == count and all(line in each for each in lines)
