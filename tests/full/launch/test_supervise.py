"""Runs over real pods, sshd and pdsh that end in every way, and what is left of them: a record, and nothing else.

Runs that need the same pods and wait for different things go on side by side.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from psutil import Process

from tests.full.launches import (
    RANK,
    ROOT,
    WAIT_SECONDS,
    agent_of,
    ended,
    left,
    processes,
    processes_of_pod,
    record,
    started,
    train,
    until,
)
from zeropods import pods
from zeropods.pods.cluster import Cluster

ASIDE_SECONDS = 7.2
"""For so long a pod is not asked: longer than one may be silent, shorter than the lease of a run."""
INTERRUPTED = {
    "SIGINT": (signal.SIGINT, ()),
    "SIGTERM": (signal.SIGTERM, ()),
    "SIGHUP": (signal.SIGHUP, ()),
    "deaf": (signal.SIGINT, ("--deaf",)),
}
"""A signal to the launcher by the name of a run, and how its ranks behave."""


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


def test_a_launch_shows_its_steps_in_a_pipe_and_none_of_deepspeed_s_banners(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    call = ["launch", "--name", cluster.name, "--num-pods", "2", "--", RANK, "--outputdir", folder, "--seconds", "24"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zeropods", *map(str, call)], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    train(folder, ranks=2)
    # As the trainer of a real run logs a step.
    with open(folder / "train.log", "a") as log:
        log.write("2026-01-02 03:04:05,678 INFO zeropods.train.meter step 7 loss 3.25\n")
    _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, said
    assert "train: 7 steps, loss 3.25 (" in said and "pod1: rank 0 trains" in said
    assert "[INFO] [launch.py:" in (folder / "launch.log").read_text()
    assert "[INFO]" not in said


def test_interrupted_runs_end_everywhere_and_touch_no_other(cluster: Cluster, tmp_path: Path) -> None:
    other = started(cluster, tmp_path / "other", "--seconds", 600)
    runs = {name: started(cluster, tmp_path / name, "--seconds", 600, *how) for name, (_, how) in INTERRUPTED.items()}
    for name in ("other", *runs):
        train(tmp_path / name)
    second = started(cluster, tmp_path / "other")
    assert "in use by process" in ended(second).splitlines()[-1] and second.returncode == 1
    for name, process in runs.items():
        process.send_signal(INTERRUPTED[name][0])
    for name, process in runs.items():
        ended(process)
        found = record(tmp_path / name)
        assert (found["status"], found["reason"]) == ("interrupted", INTERRUPTED[name][0].name)
        assert process.returncode != 0 and not left(tmp_path / name)
    (tmp_path / "other" / "enough").touch()
    said = ended(other)
    assert other.returncode == 0 and record(tmp_path / "other")["status"] == "ok", said


Harmed = dict[str, tuple[subprocess.Popen[str], str]]


@pytest.fixture(scope="module")
def harmed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Harmed]:
    """Runs of which a process is killed or stopped, or which end badly by themselves: each with what it said."""
    folder = tmp_path_factory.mktemp("harmed")
    long = ("--seconds", 600)
    runs = {
        "launcher": started(cluster, folder / "launcher", *long),
        "pdsh": started(cluster, folder / "pdsh", *long, "--deaf"),
        "rank": started(cluster, folder / "rank", *long),
        "aside": started(cluster, folder / "aside", *long),
        "fails": started(cluster, folder / "fails", "--fail_rank", 1),
        "leaves": started(cluster, folder / "leaves", "--leave_behind"),
    }
    ranks = {name: train(folder / name) for name in runs}
    runs["launcher"].kill()
    for victim in (processes("pdsh", "-w", folder / "pdsh")[0], ranks["rank"][2]):
        os.kill(victim, signal.SIGKILL)
    runs["aside"].send_signal(signal.SIGSTOP)
    signal.sigtimedwait([], ASIDE_SECONDS)
    runs["aside"].send_signal(signal.SIGCONT)
    signal.sigtimedwait([], 1.0)
    (folder / "aside" / "enough").touch()
    return folder, {name: (process, ended(process)) for name, process in runs.items()}


def test_a_killed_launcher_leaves_nothing_and_its_run_goes_on_when_it_is_called_again(
    harmed: tuple[Path, Harmed], cluster: Cluster
) -> None:
    folder = harmed[0] / "launcher"
    until(lambda: not left(folder))
    first, again = train(folder), started(cluster, folder, "--seconds", 600)
    until(lambda: not set(train(folder)) & set(first))
    (folder / "enough").touch()
    said = ended(again)
    assert (record(folder)["status"], record(folder)["attempt"]) == ("ok", 1), said


@pytest.mark.parametrize(
    ("name", "status", "pod", "reason"),
    [
        ("pdsh", "failed", None, ""),
        ("rank", "failed", "pod3", "rank 2 left no measurement"),
        ("fails", "oom", "pod2", "rank 1: no memory left"),
    ],
)
def test_what_ended_a_run_is_said_with_its_pod(
    harmed: tuple[Path, Harmed], name: str, status: str, pod: str | None, reason: str
) -> None:
    folder, (process, said) = harmed[0] / name, harmed[1][name]
    found = record(folder)
    assert (process.returncode, found["status"]) == (1, status), said
    assert pod is None or found["pod"] == pod
    assert reason in found["reason"] and found["reason"] in said
    until(lambda: not left(folder))


@pytest.mark.parametrize("name", ["aside", "leaves"])
def test_a_launcher_that_was_stopped_and_a_process_left_behind_harm_no_run(
    harmed: tuple[Path, Harmed], name: str
) -> None:
    process, said = harmed[1][name]
    assert process.returncode == 0 and record(harmed[0] / name)["status"] == "ok", said


def test_a_frozen_pod_is_lost_or_left_out_and_its_ranks_end_when_it_thaws_and_so_is_one_that_is_brought_down(
    mortal: Cluster, tmp_path: Path
) -> None:
    frozen, down, without = tmp_path / "frozen", tmp_path / "down", tmp_path / "without"
    process = started(mortal, frozen, "--seconds", 600)
    train(frozen)
    agent = agent_of(mortal, 0)
    os.kill(agent, signal.SIGSTOP)
    try:
        ended(process)
        said = ended(started(mortal, without, *BATCH, min_pods=2))
    finally:
        os.kill(agent, signal.SIGCONT)
    assert (record(frozen)["status"], record(frozen)["pod"]) == ("pod_lost", "pod1")
    (line,) = [line for line in said.splitlines() if "begins on" in line]
    assert line.startswith(f"{without}: pod_lost: pod1: no answer: ")
    assert line.endswith("; begins on pod2, pod3 with --gradient_accumulation_steps 3")
    found = record(without)
    assert (found["status"], found["pods"], found["effective_batch_size"], found["restarts"]) == ("ok", 2, 24, 0), said
    until(lambda: not left(frozen))
    process = started(mortal, down, "--seconds", 600)
    train(down)
    mortal.down()
    ended(process)
    assert record(down)["status"] == "pod_lost" and not left(down)


# Runs that lose a pod or a rank, and go on by themselves.


BATCH = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)


def test_a_run_that_lost_a_pod_ends_well_on_the_two_that_are_left_and_not_on_one(
    mortal: Cluster, tmp_path: Path
) -> None:
    folder, few, later = tmp_path / "run", tmp_path / "few", tmp_path / "next"
    how = ("--seconds", 600, "--seconds_again", 3, *BATCH)
    process = started(mortal, folder, *how, restarts=2, min_pods=2)
    train(folder)
    killed_at = time.time()
    for pid in processes_of_pod(mortal, 2):
        os.kill(pid, signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0 and not left(folder), said
    again = started(mortal, folder, *how, restarts=2, min_pods=2)
    process = started(mortal, few, "--seconds", 600, *BATCH, pods=2, restarts=3, min_pods=2)
    assert "this run is finished; nothing to do" in ended(again) and again.returncode == 0
    train(few, 2)
    os.kill(agent_of(mortal, 1), signal.SIGKILL)
    assert "not restarted: too few pods are left (1, --min-pods 2)" in ended(process)
    lost = record(few)
    assert process.returncode == 1 and (lost["status"], lost["pod"]) == ("pod_lost", "pod2")
    assert mortal.pods[1].address in lost["reason"] and not left(few)
    process = started(mortal, later, pods=2)
    (refused,) = ended(process).splitlines()
    remedies = "see 'zeropods pods check'.*'zeropods pods up', or begin on those that answer: --min-pods N"
    assert re.search(f"pod2: no answer: .*Connection refused; {remedies}", refused) and process.returncode == 1
    assert "; too few pods are left (1, --min-pods 2);" in ended(started(mortal, later, *BATCH, pods=2, min_pods=2))
    assert not (later / "config.json").exists()
    begun = ended(started(mortal, later, *BATCH, pods=2, min_pods=1))
    assert "pod2: no answer" in begun and "; begins on pod1 with --gradient_accumulation_steps 4\n" in begun
    assert (record(later)["status"], record(later)["pods"], record(later)["effective_batch_size"]) == ("ok", 1, 16)
    found = record(folder)
    assert (found["status"], found["pods"], len(found["ranks"])) == ("ok", 2, 2)
    assert (found["restarts"], found["attempt"]) == (1, 1)
    kept = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert [found[name] for name in kept] == [24, 4, 3]
    first = json.loads((folder / "attempts" / "0.json").read_text())
    assert (first["status"], first["pod"], first["pods"], first["restarts"]) == ("pod_lost", "pod3", 3, 0)
    (entry,) = json.loads((folder / "restarts.json").read_text())["restarts"]
    assert (first["rank"], entry["pod"], entry["rank"]) == (2, "pod3", 2)
    # How soon, on a machine that does nothing else, is what the trials of `make soak` measure.
    assert killed_at < entry["found_unix_seconds"]
    (line,) = [line for line in said.splitlines() if "restart 1 of 2" in line]
    assert "pod_lost: pod3 (" in line
    assert line.endswith("restart 1 of 2 on pod1, pod2 with --gradient_accumulation_steps 3")


def test_a_killed_rank_costs_no_pod_and_ctrl_c_in_a_later_attempt_ends_it_all(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(cluster, folder, "--seconds", 600, "--seconds_again", 600, *BATCH, restarts=3)
    first = train(folder)
    os.kill(first[2], signal.SIGKILL)
    until(lambda: not set(train(folder)) & set(first))
    process.send_signal(signal.SIGINT)
    said, found = ended(process), record(folder)
    assert (found["restarts"], found["pods"], found["gradient_accumulation_steps"]) == (1, 3, 2), said
    assert found["status"] == "interrupted" and "restart 2" not in said and not left(folder)


def test_a_restart_asks_a_pod_again_that_lives_and_does_not_answer_over_ssh(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(cluster, folder, "--seconds", 600, "--seconds_again", 600, *BATCH, restarts=1)
    first = train(folder)
    (sshd,) = [child for child in Process(agent_of(cluster, 1)).children() if child.name() == "sshd"]
    sshd.suspend()
    try:
        os.kill(first[2], signal.SIGKILL)
        assert process.stderr is not None
        line = next(line for line in process.stderr if "asked again" in line)
    finally:
        sshd.resume()
    until(lambda: not set(train(folder)) & set(first))
    (folder / "enough").touch()
    said, found = ended(process), record(folder)
    limit = rf"{folder}: pod2: no answer over ssh, but agents answer; asked again, for \d+ s at most\n"
    assert re.fullmatch(limit, line)
    assert (process.returncode, found["status"], found["restarts"], found["pods"]) == (0, "ok", 1, 3), said
