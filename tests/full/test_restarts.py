"""Runs over real pods that lose a pod or a rank, and go on by themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.full.launches import agent_of, ended, left, parent, record, started, train, until
from zeropods import pods
from zeropods.pods.cluster import Cluster

FOUND_SECONDS = 10
BATCH = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)


@dataclass(frozen=True)
class Lost:
    """A run on three pods, of which one was killed, agent and warden, and which went on on two."""

    folder: Path
    status: int
    said: str
    killed_unix_seconds: float
    left: list[int]
    again: tuple[int, str]
    """Exit status and words of the same launch, called once more."""

    @property
    def record(self) -> dict[str, Any]:
        return record(self.folder)

    @property
    def journal(self) -> dict[str, Any]:
        (entry,) = json.loads((self.folder / "restarts.json").read_text())["restarts"]
        return dict(entry)


@pytest.fixture(scope="module")
def lost(shared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    cluster, folder = pods.up(3, name="losing"), tmp_path_factory.mktemp("lost") / "run"
    try:
        process = started(cluster, folder, "--seconds", 600, *BATCH, restarts=2, min_pods=2)
        train(folder)
        at, agent = time.time(), agent_of(cluster, 1)
        for pid in (parent(agent), agent):
            os.kill(pid, signal.SIGKILL)
        said = ended(process)
        remains = left(folder)
        again = started(cluster, folder, "--seconds", 600, *BATCH, restarts=2, min_pods=2)
        said_again = ended(again)
        yield Lost(folder, process.returncode, said, at, remains, (again.returncode, said_again))
    finally:
        cluster.down()


def test_a_run_that_lost_a_pod_ends_well_on_the_two_that_are_left(lost: Lost) -> None:
    assert lost.status == 0, lost.said
    assert (lost.record["status"], lost.record["pods"]) == ("ok", 2)
    assert len(lost.record["ranks"]) == 2


def test_its_effective_batch_is_what_it_was(lost: Lost) -> None:
    kept = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert [lost.record[name] for name in kept] == [24, 4, 3]


def test_the_record_says_how_often_it_went_on(lost: Lost) -> None:
    assert (lost.record["restarts"], lost.record["attempt"]) == (1, 1)


def test_the_attempt_that_lost_the_pod_is_kept(lost: Lost) -> None:
    first = json.loads((lost.folder / "attempts" / "0.json").read_text())
    assert (first["status"], first["pod"], first["pods"], first["restarts"]) == ("pod_lost", "pod2", 3, 0)


def test_the_lost_pod_is_found_in_ten_seconds(lost: Lost) -> None:
    assert 0 < lost.journal["found_unix_seconds"] - lost.killed_unix_seconds < FOUND_SECONDS


def test_what_is_done_about_it_is_said_in_one_line(lost: Lost) -> None:
    (line,) = [line for line in lost.said.splitlines() if "restart 1 of 2" in line]
    assert "pod_lost: pod2 (" in line
    assert line.endswith("restart 1 of 2 on pod1, pod3 with --gradient_accumulation_steps 3")


def test_nothing_of_either_attempt_is_left(lost: Lost) -> None:
    assert not lost.left


def test_the_same_launch_called_again_finds_its_run_finished(lost: Lost) -> None:
    status, said = lost.again
    assert status == 0 and "this run is finished; nothing to do" in said


def test_an_error_of_a_rank_is_no_reason_to_go_on(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--fail_rank", 1, *BATCH, restarts=3)
    said = ended(process)
    assert process.returncode == 1 and "restart 1" not in said
    assert not (tmp_path / "run" / "attempts").exists()


@pytest.fixture(scope="module")
def interrupted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose rank 2 was killed, and which got Ctrl-C when it had gone on; and what its launch said."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    process = started(cluster, folder, "--seconds", 600, "--seconds_again", 600, *BATCH, restarts=3)
    first = train(folder)
    os.kill(first[2], signal.SIGKILL)
    until(lambda: not set(train(folder)) & set(first))
    process.send_signal(signal.SIGINT)
    return folder, ended(process)


def test_a_killed_rank_costs_no_pod(interrupted: tuple[Path, str]) -> None:
    found = record(interrupted[0])
    assert (found["restarts"], found["pods"], found["gradient_accumulation_steps"]) == (1, 3, 2), interrupted[1]


def test_ctrl_c_in_a_later_attempt_ends_it_all(interrupted: tuple[Path, str]) -> None:
    folder, said = interrupted
    assert record(folder)["status"] == "interrupted" and "restart 2" not in said and not left(folder)


def test_with_too_few_pods_left_it_ends_and_says_so(shared_home: Path, tmp_path: Path) -> None:
    small = pods.up(2, name="few")
    try:
        process = started(small, tmp_path / "run", "--seconds", 600, *BATCH, restarts=3, min_pods=2)
        until(lambda: (tmp_path / "run" / "pid.1").is_file())
        os.kill(agent_of(small, 1), signal.SIGKILL)
        said = ended(process)
    finally:
        small.down()
    assert process.returncode == 1 and record(tmp_path / "run")["status"] == "pod_lost"
    assert "does not go on by itself: 1 pods are left, --min-pods 2" in said
