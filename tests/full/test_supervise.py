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


def test_a_run_that_ends_well_has_a_record_of_all_its_ranks(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run")
    said = ended(process)
    assert process.returncode == 0, said
    assert record(tmp_path / "run")["status"] == "ok"
    assert [rank["host"] for rank in record(tmp_path / "run")["ranks"]] == [pod.address for pod in cluster.pods]
    assert not left(tmp_path / "run")


def test_output_carries_the_pods_names(cluster: Cluster, tmp_path: Path) -> None:
    said = ended(started(cluster, tmp_path / "run")).splitlines()
    assert {"pod1: rank 0 trains", "pod2: rank 1 trains", "pod3: rank 2 trains"} <= set(said)


def test_ranks_find_what_they_need_in_their_environment(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended(started(cluster, tmp_path / "run"))
    seen = json.loads((tmp_path / "run" / "config.json").read_text())["identity"]["seen"]
    assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert seen["ZEROPODS_POD"] == cluster.pods[0].address
    assert not [name for name in seen if "SECRET" in name]


def test_a_failing_rank_gives_the_reason_and_the_pod(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--fail_rank", 1)
    said = ended(process)
    assert process.returncode == 1
    found = record(tmp_path / "run")
    assert (found["status"], found["pod"], found["reason"]) == ("oom", "pod2", "rank 1: no memory left")
    assert "oom: pod2: rank 1: no memory left" in said.splitlines()[-1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_everywhere_and_harms_no_other(
    cluster: Cluster, tmp_path: Path, signum: signal.Signals
) -> None:
    other = started(cluster, tmp_path / "other", "--seconds", 9)
    process = started(cluster, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    train(tmp_path / "other")
    process.send_signal(signum)
    ended(process)
    assert process.returncode != 0 and record(tmp_path / "run")["status"] == "interrupted"
    assert not left(tmp_path / "run")
    said = ended(other)
    assert other.returncode == 0 and record(tmp_path / "other")["status"] == "ok", said


def test_ranks_that_do_not_hear_are_ended_too(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 600, "--deaf")
    train(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    ended(process)
    assert record(tmp_path / "run")["status"] == "interrupted" and not left(tmp_path / "run")


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


def test_a_closed_terminal_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    process.send_signal(signal.SIGHUP)
    ended(process)
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["reason"]) == ("interrupted", "SIGHUP")
    assert not left(tmp_path / "run")


def test_a_launcher_that_was_stopped_for_a_while_blames_no_pod(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--seconds", 14)
    train(tmp_path / "run")
    process.send_signal(signal.SIGSTOP)
    signal.sigtimedwait([], 8.5)
    process.send_signal(signal.SIGCONT)
    said = ended(process)
    assert record(tmp_path / "run")["status"] == "ok", said


def test_what_a_rank_leaves_behind_does_not_hold_the_launcher(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--leave_behind")
    said = ended(process)
    assert process.returncode == 0 and record(tmp_path / "run")["status"] == "ok", said


def test_a_rank_that_ends_well_before_the_others_ends_nothing(cluster: Cluster, tmp_path: Path) -> None:
    process = started(cluster, tmp_path / "run", "--early_rank", 1, "--seconds", 14)
    said = ended(process)
    assert process.returncode == 0 and record(tmp_path / "run")["status"] == "ok", said


def test_a_folder_in_use_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    first = started(cluster, tmp_path / "run", "--seconds", 600)
    train(tmp_path / "run")
    second = started(cluster, tmp_path / "run")
    said = ended(second)
    first.send_signal(signal.SIGTERM)
    ended(first)
    assert second.returncode == 1 and "in use by process" in said.splitlines()[-1]


def test_a_finished_run_is_not_run_again(cluster: Cluster, tmp_path: Path) -> None:
    ended(started(cluster, tmp_path / "run"))
    before = record(tmp_path / "run"), (tmp_path / "run" / "record.json").stat().st_mtime_ns
    process = started(cluster, tmp_path / "run")
    assert "this run is finished; nothing to do" in ended(process) and process.returncode == 0
    assert (record(tmp_path / "run"), (tmp_path / "run" / "record.json").stat().st_mtime_ns) == before


def test_a_finished_run_with_other_arguments_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    ended(started(cluster, tmp_path / "run"))
    process = started(cluster, tmp_path / "run", "--seconds", 1)
    assert "holds a finished run on 3 pods with other arguments" in ended(process) and process.returncode == 1
