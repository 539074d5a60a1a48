"""Runs over real pods that lose a pod or a rank, and go on by themselves."""

import json
import os
import signal
import time
from pathlib import Path

from tests.full.launches import agent_of, ended, left, processes_of_pod, record, started, train, until
from zeropods import pods
from zeropods.pods.cluster import Cluster

FOUND_SECONDS = 10
BATCH = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)


def test_a_run_that_lost_a_pod_ends_well_on_the_two_that_are_left_and_not_on_one(
    shared_home: Path, tmp_path: Path
) -> None:
    cluster, folder, few = pods.up(3, name="losing"), tmp_path / "run", tmp_path / "few"
    how = ("--seconds", 600, "--seconds_again", 3, *BATCH)
    try:
        process = started(cluster, folder, *how, restarts=2, min_pods=2)
        train(folder)
        killed_at = time.time()
        for pid in processes_of_pod(cluster, 2):
            os.kill(pid, signal.SIGKILL)
        said = ended(process)
        assert process.returncode == 0 and not left(folder), said
        again = started(cluster, folder, *how, restarts=2, min_pods=2)
        process = started(cluster, few, "--seconds", 600, *BATCH, pods=2, restarts=3, min_pods=2)
        assert "this run is finished; nothing to do" in ended(again) and again.returncode == 0
        train(few, 2)
        os.kill(agent_of(cluster, 1), signal.SIGKILL)
        assert "does not go on by itself: 1 pods are left, --min-pods 2" in ended(process)
    finally:
        cluster.down()
    assert process.returncode == 1 and record(few)["status"] == "pod_lost"
    found = record(folder)
    assert (found["status"], found["pods"], len(found["ranks"])) == ("ok", 2, 2)
    assert (found["restarts"], found["attempt"]) == (1, 1)
    kept = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert [found[name] for name in kept] == [24, 4, 3]
    first = json.loads((folder / "attempts" / "0.json").read_text())
    assert (first["status"], first["pod"], first["pods"], first["restarts"]) == ("pod_lost", "pod3", 3, 0)
    (entry,) = json.loads((folder / "restarts.json").read_text())["restarts"]
    assert 0 < entry["found_unix_seconds"] - killed_at < FOUND_SECONDS
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
