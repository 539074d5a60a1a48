"""`zeropods launch --launcher slurm` against a real SLURM: what becomes of a job becomes of its run."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.launches import RANK, record, train, until
from tests.full.slurm_cluster import SlurmCluster
from zeropods.errors import UserError
from zeropods.launch.script_call import ScriptCall
from zeropods.launch.slurm import JOB, SlurmError, job_now, plan_slurm, run_slurm
from zeropods.launch.supervisor import Supervision

WAIT_SECONDS = 600.0


@pytest.fixture
def here(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, for commands of this process."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    return slurm


def launched(folder: Path, *arguments: object, pods: int = 1, **asked: Any) -> dict:
    """The record of a launch of the stand-in rank, and the lines that it showed."""
    shown: list[str] = []
    call = ScriptCall.of(RANK, ["--outputdir", str(folder), *map(str, arguments)])
    submission = plan_slurm(call, pods=pods, **asked)
    return {**run_slurm(submission, Supervision(show=shown.append)).to_json(), "shown": shown}


def command(cluster: SlurmCluster, *arguments: object) -> subprocess.Popen[str]:
    """`zeropods launch --launcher slurm`, as a user calls it."""
    argv = [sys.executable, "-m", "zeropods", "launch", "--launcher", "slurm", "--json", *map(str, arguments)]
    return subprocess.Popen(
        argv, cwd=ROOT, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def job_of(folder: Path) -> int:
    return int(json.loads((folder / JOB).read_text())["job"])


def test_two_nodes_train_one_model_once(here: SlurmCluster, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*TINY, "--max_steps", 2, "--eval_steps", 2, "--dataset_path", prepared, "--outputdir", folder]
    process = command(here, "--num-pods", 2, "--", "textsql_train.py", *flags)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said[-3000:]
    assert "submitted; its log: " in said and ": RUNNING on pod" in said
    found, number = record(folder), job_of(folder)
    assert (found["status"], found["technique"], found["pods"], found["slots"]) == ("ok", "ddp", 2, 1)
    assert len({rank["host"] for rank in found["ranks"]} & {"pod1", "pod2", "pod3"}) == 2
    call = ScriptCall.of("textsql_train.py", [*map(str, flags)])
    assert run_slurm(plan_slurm(call, pods=2)).status == "ok"
    assert job_of(folder) == number


def test_arguments_reach_the_script_unchanged(here: SlurmCluster, tmp_path: Path) -> None:
    said = """a  b $HOME "c" 'd' * %j"""
    found = launched(tmp_path / "run %j", "--said", said)
    assert found["status"] == "ok"
    assert any(line.endswith(f"trains {said!r}") for line in found["shown"])


def test_a_rank_that_fails_fails_the_run_with_its_reason_and_node_and_a_rejected_job_leaves_it_so(
    here: SlurmCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    found = launched(folder, "--fail_rank", 1, "--seconds", 1, pods=2)
    assert (found["status"], found["reason"]) == ("oom", "rank 1: no memory left")
    assert found["pod"] == found["ranks"][1]["host"]
    assert found["last_lines"] and all(line.startswith(f"{found['pod']}: ") for line in found["last_lines"])
    before = (folder / "record.json").read_bytes()
    with pytest.raises(SlurmError):
        launched(folder, options=("--time=soon",))
    assert (folder / "record.json").read_bytes() == before
    # One that SLURM does not know is no error.
    assert job_now(4_000_000)["JobState"] == "FORGOTTEN"


def test_the_rank_that_was_killed_is_named_with_its_node(here: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = command(here, "--num-pods", 2, "--", RANK, "--outputdir", folder, "--seconds", 60)
    os.kill(train(folder, ranks=2)[1], signal.SIGKILL)
    until(lambda: (folder / "ranks" / "1.exit").is_file(), WAIT_SECONDS)
    (folder / "enough").touch()
    assert process.wait(WAIT_SECONDS) == 1
    found = record(folder)
    killed, well = found["exits"]
    assert (killed["rank"], killed["status"], well["rank"], well["status"]) == (1, -signal.SIGKILL, 0, 0)
    assert (found["status"], found["rank"], found["pod"]) == ("failed", 1, killed["host"])
    assert found["reason"].startswith("rank 1 left no measurement: killed by SIGKILL, perhaps by the kernel")
    assert not (folder / "ranks" / "1.exit").exists()


def test_a_cancelled_job_is_an_interrupted_run_and_one_that_takes_too_long_is_cancelled(
    here: SlurmCluster, tmp_path: Path
) -> None:
    limits = {"CANCELLED": (), "SIGINT": (), "took longer than 4 s": ("--timeout", 4)}
    runs = {
        by: command(here, *limit, "--", RANK, "--outputdir", tmp_path / by, "--seconds", 60)
        for by, limit in limits.items()
    }
    for by in ("CANCELLED", "SIGINT"):
        train(tmp_path / by, ranks=1)
    here.ask("scancel", job_of(tmp_path / "CANCELLED"))
    os.killpg(runs["SIGINT"].pid, signal.SIGINT)
    for by, process in runs.items():
        ended = (1, "timeout") if limits[by] else (130, "interrupted")
        assert (process.wait(WAIT_SECONDS), record(tmp_path / by)["status"]) == ended
        assert by in record(tmp_path / by)["reason"]
        assert here.state(job_of(tmp_path / by)) == "CANCELLED"


def test_a_node_that_fails_is_a_lost_pod(here: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = ["--sbatch-option=--nodelist=pod2", "--sbatch-option=--no-requeue"]
    process = command(here, *job, "--", RANK, "--outputdir", folder, "--seconds", 60)
    train(folder, ranks=1)
    here.ask("scontrol", "update", "NodeName=pod2", "State=DOWN", "Reason=test")
    assert process.wait(WAIT_SECONDS) == 1
    # It comes back by itself once its daemon is heard again.
    until(lambda: "pod2 idle" in here.ask("sinfo", "--noheader", "--Node", "--format=%N %t"), WAIT_SECONDS)
    found = record(folder)
    assert found["status"] == "pod_lost" and "NODE_FAIL" in found["reason"]


def test_a_job_whose_follower_was_killed_is_followed_again_by_the_same_launch(
    here: SlurmCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = command(here, "--", RANK, "--outputdir", folder, "--seconds", "60")
    train(folder, ranks=1)
    process.kill()
    process.wait(WAIT_SECONDS)
    number = job_of(folder)
    with pytest.raises(SlurmError, match=r"job \d+ uses this folder with other arguments; scancel"):
        launched(folder, "--seconds", "5")
    threading.Timer(1.0, (folder / "enough").touch).start()
    assert launched(folder, "--seconds", "60")["status"] == "ok"
    assert job_of(folder) == number


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"partition": "nowhere"}, SlurmError, r"sbatch: .*[Ii]nvalid partition"),
        (
            {"options": ("--mem=900G",)},
            SlurmError,
            r"sbatch: Memory specification .*; .*configuration is not available",
        ),
        ({"pods": 4}, UserError, "4 nodes: SLURM has only 3 in all partitions"),
        # SLURM 24.11 refuses it at once; an earlier one takes the job, which then never starts.
        (
            {"cpus_per_slot": 999},
            UserError,
            r"failed: job \d+ cannot start as requested: PartitionConfig"
            r"|sbatch: .*CPU count per node can not be satisfied",
        ),
        ({}, UserError, r"(?s)failed: SLURM's job .*MOUNT /nowhere: not there"),
    ],
)
def test_what_slurm_cannot_give_is_refused_and_a_job_that_cannot_begin_says_why(
    here: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], error: type[Exception],
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("MOUNT", "/nowhere")
    with pytest.raises(error, match=said):
        launched(tmp_path / "run", **asked)
