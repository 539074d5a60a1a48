"""A launch as a SLURM job: sbatch's command, what scontrol says of a job, what a state means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.launch.command import Launch
from zeropods.launch.slurm import Submission, job_environment, sbatch_argv
from zeropods.launch.slurm_job import Job, JobLog, read_job, verdict_of
from zeropods.pods.hostfile import Host

ROOT = Path(__file__).resolve().parents[2]
SUBMISSION = Submission(
    launch=Launch(
        script=ROOT / "textsql_train.py",
        arguments=("--deepspeed", "zero1.json", "--said", "a b"),
        folder=Path("/runs/a 100%"),
        hosts=(Host("node0", 8), Host("node1", 8)),
        master_port=0,
        launcher="slurm",
    ),
    partition="gpu",
    time_limit="1:00:00",
)
LINE = (
    "JobId=17 JobName=zeropods-a UserId=a(1) Priority=1 Account=(null) QOS=(null) JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode={code}:0 RunTime=00:00:04 "
    "TimeLimit=00:10:00 TimeMin=N/A NodeList=pod[1-2] BatchHost=pod1 Command=/a b JobState=NO WorkDir=/c"
)
JOB = Job(number=17, state="FAILED", reason=None, exit_status=1, restarts=0, nodes="pod1", time_limit="00:10:00")


def test_the_command_submits_the_projects_own_job_file() -> None:
    argv = sbatch_argv(SUBMISSION)
    place = argv.index(str(ROOT / "slurm" / "train.sbatch"))
    assert argv[:2] == ["sbatch", "--parsable"]
    assert argv[place + 1 :] == [str(ROOT / "textsql_train.py"), "--deepspeed", "zero1.json", "--said", "a b"]


def test_a_slot_gets_a_gpu_and_its_cpus() -> None:
    argv = sbatch_argv(SUBMISSION)
    assert {"--nodes=2", "--gpus-per-node=8", "--cpus-per-task=32"} <= set(argv)


def test_where_there_are_no_gpus_none_are_asked_for() -> None:
    assert "--gpus-per-node=0" in sbatch_argv(replace(SUBMISSION, has_gpus=False))


def test_only_what_was_given_is_asked_for() -> None:
    argv = sbatch_argv(SUBMISSION)
    assert {"--partition=gpu", "--time=1:00:00"} <= set(argv) and not any("--account" in word for word in argv)


def test_further_options_come_last_and_win() -> None:
    argv = sbatch_argv(replace(SUBMISSION, options=("--nodes=3",)))
    assert argv.index("--nodes=3") > argv.index("--nodes=2")


def test_sbatch_replaces_nothing_in_the_logs_path() -> None:
    assert "--output=/runs/a 100%%/launch.log" in sbatch_argv(SUBMISSION)


def test_a_jobs_name_is_plain() -> None:
    assert "--job-name=zeropods-a-100-" in sbatch_argv(SUBMISSION)


def test_a_job_begins_without_the_variables_of_the_one_that_submits_it() -> None:
    here = {"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "1", "SLURM_CONF": "/c", "SBATCH_QOS": "q", "HF_HOME": "/h"}
    kept = job_environment(SUBMISSION, here)
    assert (kept["SLURM_CONF"], kept["SBATCH_QOS"], kept["HF_HOME"], kept["SLOTS"]) == ("/c", "q", "/h", "8")
    assert "SLURM_JOB_ID" not in kept and "SLURM_RESTART_COUNT" not in kept


def test_a_job_is_read_from_scontrols_line() -> None:
    job = read_job(LINE.format(state="RUNNING", reason="None", code=0))
    assert job == replace(JOB, state="RUNNING", exit_status=0, restarts=2, nodes="pod[1-2]")


def test_what_is_no_job_is_refused() -> None:
    with pytest.raises(UserError, match="scontrol show job: 'nothing'; expected a line"):
        read_job("nothing")


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("COMPLETED", None), ("FAILED", None), ("CANCELLED", "interrupted"), ("PREEMPTED", "interrupted"),
        ("TIMEOUT", "timeout"), ("DEADLINE", "timeout"), ("NODE_FAIL", "pod_lost"), ("OUT_OF_MEMORY", "oom"),
    ],
)  # fmt: skip
def test_a_state_has_a_status(state: str, status: str | None) -> None:
    assert verdict_of(replace(JOB, state=state)).status == status


def test_a_time_limit_is_named() -> None:
    assert verdict_of(replace(JOB, state="TIMEOUT")).reason == "SLURM's job 17: TIMEOUT: its time limit was 00:10:00"


def test_a_job_that_saved_and_was_not_requeued_was_interrupted() -> None:
    assert verdict_of(replace(JOB, exit_status=75)).status == "interrupted"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"])
def test_a_job_that_may_go_on_has_not_ended(state: str) -> None:
    assert not replace(JOB, state=state).has_ended


def test_a_log_is_read_as_it_grows_with_its_nodes_names(tmp_path: Path) -> None:
    path, shown = tmp_path / "log", list[str]()
    path.write_text("of an earlier job\n")
    log = JobLog(path, shown.append)
    with open(path, "a") as file:
        file.write("0: one\n 1: two\nsrun: three\n1: no")
        file.flush()
        log.nodes = ("pod1", "pod2")
        log.read()
        file.write("t yet\n")
    log.read()
    assert shown == ["pod1: one", "pod2: two", "srun: three", "pod2: not yet"]
    assert log.tail("pod2") == ["pod2: two", "pod2: not yet"]


def launched(*words: str) -> int:
    return main(["launch", *words, "--", "textsql_train.py"])


def test_without_slurm_a_launch_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert launched("--launcher", "slurm") == 1
    said = capsys.readouterr().err
    assert "sinfo: not on PATH; run this where SLURM's commands are" in said and said.count("\n") == 1


def test_a_dry_run_needs_no_slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert launched("--launcher", "slurm", "--num-pods", "2", "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert "--nodes=2" in said["argv"] and said["exported"]["SLOTS"] == "1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--partition", "p"), "--partition: is for --launcher slurm"),
        (("--launcher", "slurm", "--name", "n"), "it chooses the nodes"),
        (("--launcher", "slurm", "--export", "HOME"), "gets the whole environment"),
        (("--launcher", "slurm", "--slots", "0"), "expected at least 1"),
        (("--launcher", "slurm", "--cpus-per-slot", "0"), "expected at least 1"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(*words) == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("3",), ("quick", "full")])
@pytest.mark.parametrize("script", ["t4x4.sh", "a100x8.sh"])
def test_a_cloud_script_is_told_what_to_do(script: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [ROOT / "cloud" / script, *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1 and f"{script}: expected quick (1) or full (2)" in done.stderr


@pytest.mark.parametrize("what", ["1", "full"])
@pytest.mark.parametrize(("script", "gpus"), [("t4x4.sh", 4), ("a100x8.sh", 8)])
def test_a_cloud_scripts_flags_are_those_of_the_script(script: str, gpus: int, what: str, tmp_path: Path) -> None:
    counted = tmp_path / "nvidia-smi"
    counted.write_text("#!/bin/sh\n" + "echo 'GPU 0: of a test'\n" * gpus)
    counted.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DRY_RUN": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "cloud" / script, what], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "causal_train.py --task lm --data" in done.stdout, done.stderr


def test_a_cloud_script_counts_the_gpus(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [ROOT / "cloud" / "t4x4.sh", "full"], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1 and "GPUs here; expected 4" in done.stderr
