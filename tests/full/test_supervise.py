"""Runs over real pods, sshd and pdsh that end in every way, and what is left of them: a record, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full.launches import agent_of, ended, left, parent, processes, record, started, train, until
from zeropods import pods
from zeropods.pods.cluster import Cluster

LEFT_SECONDS = 15
FOUND_SECONDS, STOPPED_SECONDS = 10, 20


@pytest.fixture
def mortal(shared_home: Path) -> Iterator[Cluster]:
    """Three pods of a test that harms them."""
    up = pods.up(3, name="mortal")
    yield up
    up.down()


def test_a_run_that_ends_well_has_a_record_of_all_its_ranks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = tmp_path / "run"
    process = started(cluster, folder)
    said = ended(process)
    assert process.returncode == 0 and record(folder)["status"] == "ok", said
    assert [rank["host"] for rank in record(folder)["ranks"]] == [pod.address for pod in cluster.pods]
    assert {"pod1: rank 0 trains", "pod2: rank 1 trains", "pod3: rank 2 trains"} <= set(said.splitlines())
    seen = json.loads((folder / "config.json").read_text())["identity"]["seen"]
    assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert seen["ZEROPODS_POD"] == cluster.pods[0].address
    assert not [name for name in seen if "SECRET" in name] and not left(folder)
    # It is not run again, and not by another call.
    before = (folder / "record.json").stat().st_mtime_ns
    again, other = started(cluster, folder), started(cluster, folder, "--seconds", 1)
    assert "this run is finished; nothing to do" in ended(again) and again.returncode == 0
    assert "holds a finished run on 3 pods with other arguments" in ended(other) and other.returncode == 1
    assert (folder / "record.json").stat().st_mtime_ns == before


def test_a_failing_rank_gives_the_reason_and_the_pod(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--fail_rank", 1)
    said = ended(process)
    assert process.returncode == 1
    found = record(tmp_path / "run")
    assert (found["status"], found["pod"], found["reason"]) == ("oom", "pod2", "rank 1: no memory left")
    assert "oom: pod2: rank 1: no memory left" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("signum", "how"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGHUP, ()), (signal.SIGINT, ("--deaf",))],
    ids=["Ctrl-C", "SIGTERM", "terminal closed", "ranks that do not hear"],
)
def test_an_interrupted_run_ends_everywhere(
    cluster: Cluster, tmp_path: Path, signum: signal.Signals, how: tuple[str, ...]
) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 600, *how)
    train(tmp_path / "run")
    process.send_signal(signum)
    ended(process)
    found = record(tmp_path / "run")
    assert process.returncode != 0 and (found["status"], found["reason"]) == ("interrupted", signum.name)
    assert not left(tmp_path / "run")


def test_two_launches_do_not_touch_each_other(cluster: Cluster, tmp_path: Path) -> None:
    other = started(cluster, tmp_path / "other", "--seconds", 9)
    process = started(cluster, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    train(tmp_path / "other")
    second = started(cluster, tmp_path / "run")
    assert "in use by process" in ended(second).splitlines()[-1] and second.returncode == 1
    process.send_signal(signal.SIGINT)
    ended(process)
    said = ended(other)
    assert other.returncode == 0 and record(tmp_path / "other")["status"] == "ok", said


def test_a_killed_launcher_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    process.kill()
    process.wait()
    until(lambda: not left(tmp_path / "run"), LEFT_SECONDS)


def test_a_killed_pdsh_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 600, "--deaf")
    train(tmp_path / "run")
    (pdsh,) = processes("pdsh", "-w", tmp_path / "run")[:1]
    os.kill(pdsh, signal.SIGKILL)
    until(lambda: not left(tmp_path / "run"), LEFT_SECONDS + 1)
    ended(process)
    assert process.returncode == 1 and record(tmp_path / "run")["status"] == "failed"


def test_a_killed_rank_ends_the_run_and_its_pod_is_named(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 600)
    os.kill(train(tmp_path / "run")[2], signal.SIGKILL)
    ended(process)
    found = record(tmp_path / "run")
    assert (process.returncode, found["status"], found["pod"]) == (1, "failed", "pod3")
    assert "rank 2 left no measurement" in found["reason"] and not left(tmp_path / "run")


def test_a_killed_pod_is_found_and_named_and_the_others_are_stopped(mortal: Cluster, tmp_path: Path) -> None:
    process = started(mortal, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    os.kill(agent_of(mortal, 1), signal.SIGKILL)
    seconds = until(lambda: process.poll() is not None, STOPPED_SECONDS + FOUND_SECONDS)
    said = ended(process)
    found = record(tmp_path / "run")
    assert (found["status"], found["pod"]) == ("pod_lost", "pod2"), said
    assert mortal.pods[1].address in found["reason"]
    assert seconds < STOPPED_SECONDS and not left(tmp_path / "run")


def test_a_frozen_pod_is_found_and_its_ranks_end_when_it_thaws(mortal: Cluster, tmp_path: Path) -> None:
    process = started(mortal, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    agent = agent_of(mortal, 2)
    os.kill(agent, signal.SIGSTOP)
    try:
        ended(process)
    finally:
        os.kill(agent, signal.SIGCONT)
    found = record(tmp_path / "run")
    assert (found["status"], found["pod"]) == ("pod_lost", "pod3")
    until(lambda: not left(tmp_path / "run"), LEFT_SECONDS)


def test_a_dead_pod_is_named_before_anything_starts(mortal: Cluster, tmp_path: Path) -> None:
    os.kill(agent_of(mortal, 0), signal.SIGKILL)
    process = started(mortal, tmp_path / "run")
    said = ended(process)
    assert process.returncode == 1 and "pod1" in said.splitlines()[-1]
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_pod_whose_agent_and_warden_are_killed_leaves_no_rank(mortal: Cluster, tmp_path: Path) -> None:
    process = started(mortal, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    agent = agent_of(mortal, 1)
    for pid in (parent(agent), agent):
        os.kill(pid, signal.SIGKILL)
    ended(process)
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["pod"]) == ("pod_lost", "pod2")
    assert not left(tmp_path / "run")


def test_pods_that_are_brought_down_in_mid_run_are_the_reason(mortal: Cluster, tmp_path: Path) -> None:
    process = started(mortal, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    mortal.down()
    ended(process)
    assert record(tmp_path / "run")["status"] == "pod_lost" and not left(tmp_path / "run")


def test_a_launcher_that_was_stopped_for_a_while_blames_no_pod(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 14)
    train(tmp_path / "run")
    process.send_signal(signal.SIGSTOP)
    signal.sigtimedwait([], 8.5)
    process.send_signal(signal.SIGCONT)
    said = ended(process)
    assert record(tmp_path / "run")["status"] == "ok", said


@pytest.mark.parametrize(
    "how",
    [("--leave_behind",), ("--early_rank", 1, "--seconds", 14)],
    ids=["leaves something behind", "ends well before the others"],
)
def test_a_rank_holds_or_ends_nothing(cluster: Cluster, tmp_path: Path, how: tuple[object, ...]) -> None:
    process = started(cluster, tmp_path / "run", *how)
    said = ended(process)
    assert process.returncode == 0 and record(tmp_path / "run")["status"] == "ok", said
