"""The job files of `slurm/`, each submitted to a real SLURM as a user does."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.full.conftest import ROOT, TINY
from tests.full.launches import RANK, record, train, until
from tests.full.slurm_cluster import SlurmCluster

STEPS = 100
SMALL = ["--per_device_train_batch_size", 4, "--threads", 1]
WAIT_SECONDS = 600.0
SRUN = """\
#!/usr/bin/env bash
# Stands for Pyxis, which adds these flags to srun: keeps them, and runs the rest outside of any container.
words=()
for word in "$@"; do
    case $word in --container-*=*|--no-container-mount-home) echo "$word" >>"$SHIM_LOG" ;; *) words+=("$word") ;; esac
done
exec {srun} "${{words[@]}}"
"""
NVIDIA_SMI = """\
#!/usr/bin/env bash
if [ "$1" = --list-gpus ]; then echo "GPU 0: of a test"; exit; fi
echo "$$" >>"$SHIM_LOG"
echo "timestamp, index, utilization.gpu [%], memory.used [MiB]"
while :; do echo "2026/01/02 03:04:05.678, 0, 42 %, 1234 MiB"; sleep 0.2; done
"""


class Jobs:
    """Submits job files from a folder of the test's own."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.variables = {"PROJECT": str(ROOT), "PYTHON": sys.executable}

    def submit(self, file: str, *arguments: object, options: tuple[str, ...] = (), **variables: object) -> int:
        """Submit one, with further environment variables; returns its number."""
        environment = {**self.cluster.environment, **self.variables, **{k: str(v) for k, v in variables.items()}}
        argv = ["sbatch", "--parsable", *options, str(ROOT / "slurm" / file), *map(str, arguments)]
        done = subprocess.run(
            argv, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def rank(self, file: str, name: str, *arguments: object, **more: Any) -> int:
        """Submit one that runs the stand-in rank into a run folder of this name."""
        return self.submit(file, RANK, "--outputdir", self.folder / name, *arguments, **more)

    def begun(self, name: str) -> None:
        """Wait until the stand-in rank of a run trains."""
        train(self.folder / name, ranks=1)

    def end(self, number: int, state: str = "COMPLETED") -> str:
        """Wait for a job's end, which must be of this state; returns its log."""
        found = self.cluster.wait_for(number)
        log = (self.folder / f"slurm-{number}.out").read_text()
        assert found == state, log[-3000:]
        return log

    def program(self, name: str, text: str) -> Path:
        """Put a program first on the jobs' PATH; returns the log that it writes (`SHIM_LOG`)."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        log = self.folder / f"{name}.log"
        self.variables |= {"PATH": f"{path.parent}:{self.cluster.environment['PATH']}", "SHIM_LOG": str(log)}
        return log


@pytest.fixture
def jobs(slurm: SlurmCluster, tmp_path: Path) -> Jobs:
    return Jobs(slurm, tmp_path)


CAUSAL = [
    "--task", "lm", "--model_name_or_path", "gpt-tiny", "--init", "random", "--tokenizer_name", "gpt-tiny",
    "--max_seq_length", 32, "--max_train_steps", 3, "--max_eval_steps", 2, "--save_steps", 0,
]  # fmt: skip


@pytest.fixture(scope="module")
def ended(slurm: SlurmCluster, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """Jobs that take long or are asked to end: what each said, and its run folder. They wait together."""
    jobs = Jobs(slurm, tmp_path_factory.mktemp("ended"))
    text = jobs.folder / "text"
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_text("The history of small models is short.\nIt has many words.\n" * 300)
    flags = [*TINY, "--max_steps", STEPS, "--eval_steps", 1000, "--dataset_path", prepared, *SMALL]
    numbers = {
        "limit": jobs.submit("train-singlenode.sbatch", "textsql_train.py", *flags, "--outputdir", "limit"),
        "causal": jobs.submit("baseline.sbatch", "causal_train.py", *CAUSAL, "--data", text, "--outputdir", "causal"),
        "preempted": jobs.rank("train-singlenode.sbatch", "preempted", "--seconds", 60, "--deaf"),
        "deaf": jobs.rank("train-singlenode.sbatch", "deaf", "--seconds", 60, "--no_save", SAVE_SECONDS=1),
        "slots": jobs.rank("train.sbatch", "slots", "--seconds", 2, SLOTS=2),
        "failed": jobs.rank("train-singlenode.sbatch", "failed", "--seconds", 60, "--fail_rank", 1, SLOTS=2),
        "last": jobs.rank("train-singlenode.sbatch", "last", "--seconds", 60, "--deaf", MAX_RESTARTS=0),
        "cancelled": jobs.rank("train-singlenode.sbatch", "cancelled", "--seconds", 60, "--deaf"),
    }
    # SIGUSR1 to the batch script is what --signal=B: sends. The run is opened, and a second or more from its first
    # step: it is asked until it listens.
    until((jobs.folder / "limit" / "config.json").exists, WAIT_SECONDS)
    slurm.ask("scancel", "--signal=USR1", "--batch", numbers["limit"])
    # SIGTERM to the steps alone is how a preemption begins.
    usr1 = ("--signal=USR1", "--batch")
    asked = {"preempted": ("--signal=TERM",), "deaf": usr1, "last": usr1, "cancelled": ()}
    for name, how in asked.items():
        jobs.begun(name)
        slurm.ask("scancel", *how, numbers[name])
    states = {"failed": "FAILED", "last": "FAILED", "cancelled": "CANCELLED"}
    ends = {name: jobs.end(number, states.get(name, "COMPLETED")) for name, number in numbers.items()}
    return {name: (log, jobs.folder / name) for name, log in ends.items()}


def test_a_job_that_is_asked_to_end_saves_requeues_and_resumes_unless_its_user_or_a_limit_forbids(
    ended: dict[str, tuple],
) -> None:
    log, folder = ended["limit"]
    first = json.loads((folder / "attempts" / "0.json").read_text())
    assert (first["status"], record(folder)["status"]) == ("interrupted", "ok")
    assert 0 < first["steps"] < record(folder)["steps"] == STEPS, log
    assert record(folder)["losses"][0]["step"] == first["steps"] + 1
    log, folder = ended["preempted"]
    assert "requeued, to go on from the newest checkpoint" in log and (folder / "saved").exists()
    assert record(folder)["status"] == "ok" and record(ended["deaf"][1])["status"] == "ok"
    # Both attempts are in one log, also where ranks did not listen.
    assert log.count("rank 0 trains") == 2 and ended["deaf"][0].count("rank 0 trains") == 2
    assert "restarted 0 times; not requeued" in ended["last"][0] and "requeued" not in ended["cancelled"][0]


def test_each_slot_of_each_node_is_a_rank_and_one_that_fails_ends_the_others(ended: dict[str, tuple]) -> None:
    found = record(ended["slots"][1])
    hosts = [rank["host"] for rank in found["ranks"]]
    assert found["world_size"] == 4 and hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert record(ended["failed"][1])["status"] == "oom"


def test_the_baseline_has_the_workshops_resources_and_arguments_may_come_by_the_environment(jobs: Jobs) -> None:
    words = f"--outputdir {jobs.folder}/run --said here"
    number = jobs.submit("baseline.sbatch", SCRIPT=RANK, ARGUMENTS=words, SLOTS=4)
    said = jobs.cluster.ask("scontrol", "--oneliner", "show", "job", number)
    assert "TimeLimit=12:00:00" in said and "mem=32G" in said and "gpu:1" in said
    assert "trains 'here'" in jobs.end(number)
    assert record(jobs.folder / "run")["world_size"] == 1


def test_the_baseline_trains_a_causal_model_without_deepspeed(ended: dict[str, tuple], jobs: Jobs) -> None:
    found = record(ended["causal"][1])
    assert (found["status"], found["technique"], found["steps"], found["task"]) == ("ok", "none", 3, "lm")
    assert "take train-singlenode.sbatch" in jobs.end(jobs.rank("baseline.sbatch", "run", "--deepspeed=x"), "FAILED")


@pytest.mark.parametrize(("file", "ranks"), [("train-pyxis.sbatch", 2), ("train-singlenode-pyxis.sbatch", 1)])
def test_container_flags_stand_on_srun(jobs: Jobs, file: str, ranks: int) -> None:
    log = jobs.program("srun", SRUN.format(srun=shutil.which("srun")))
    jobs.end(jobs.rank(file, "run", "--seconds", 2, IMAGE="docker://a/b:c", MOUNT="/tmp"))
    assert set(log.read_text().split()) == {
        "--container-image=docker://a/b:c", f"--container-workdir={jobs.folder}", "--no-container-mount-home",
        f"--container-mounts={ROOT}:{ROOT},{jobs.folder}:{jobs.folder},/tmp:/tmp",
    }  # fmt: skip
    assert record(jobs.folder / "run")["world_size"] == ranks


def test_gpu_memory_is_logged_while_it_trains_and_no_longer(jobs: Jobs) -> None:
    pids = jobs.program("nvidia-smi", NVIDIA_SMI)
    number = jobs.rank("train-singlenode.sbatch", "run", "--seconds", 1, options=("--nodelist=pod1",))
    jobs.end(number)
    header, *rows = (jobs.folder / f"slurm-{number}.memory.pod1.csv").read_text().splitlines()
    assert header.split(", ")[3] == "memory.used [MiB]" and rows
    assert not any(Path("/proc", pid).exists() for pid in pids.read_text().split())


def test_what_a_node_lacks_is_named(jobs: Jobs) -> None:
    one = "train-singlenode.sbatch"
    lacking: list[tuple[str, object, dict[str, str], str]] = [
        (one, RANK, {"MOUNT": "/nowhere"}, "MOUNT /nowhere: not there"),
        (one, RANK, {"CUDA_VERSION": "0.1"}, "CUDA_VERSION 0.1: no /usr/local/cuda-0.1"),
        (one, RANK, {"PYTHON": "/nowhere"}, "PYTHON /nowhere: not there"),
        (one, RANK, {"PROJECT": "/nowhere"}, "/nowhere/slurm/job.sh"),
        ("train-pyxis.sbatch", RANK, {"IMAGE": "/no.sqsh"}, "/no.sqsh: not there; make it with slurm/setup-pyxis"),
        ("train.sbatch", "nowhere.py", {}, "nowhere.py: no such script"),
    ]
    numbers = [
        jobs.submit(file, script, "--outputdir", jobs.folder / "run", **variables)
        for file, script, variables, _ in lacking
    ]
    for number, (*_, said) in zip(numbers, lacking, strict=True):
        assert said in jobs.end(number, "FAILED")


def pyxis(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up with a docker and an enroot that keep their words."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, does in (("docker", ""), ("enroot", 'touch "$3"')):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s|" {name} "$@" >>{folder}/said\n{does}\n')
        (programs / name).chmod(0o755)
    path = variables.pop("PATH", f"{programs}:{os.environ['PATH']}")
    argv = [shutil.which("bash") or "bash", str(ROOT / "slurm" / "setup-pyxis.sh"), *map(str, arguments)]
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_image_is_built_and_converted(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").touch()
    out = tmp_path / "zeropods.sqsh"
    done = pyxis(tmp_path, out, DOCKERFILE=f"{tmp_path}/Dockerfile", CUDA_VERSION="12.4", TORCH_CUDA_ARCH_LIST="9.0")
    assert (done.returncode, out.exists()) == (0, True), done.stderr
    said = (tmp_path / "said").read_text()
    assert "--build-arg|CUDA_VERSION=12.4|--build-arg|TORCH_CUDA_ARCH_LIST=9.0|" in said
    assert "enroot|import|--output|" in said and "|dockerd://zeropods:cuda12.4|" in said


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("image.sqsh",), {}, "expected an absolute path that ends in .sqsh"),
        (("/tmp/image.sqsh",), {"DOCKERFILE": "/nowhere"}, "DOCKERFILE /nowhere: not there"),
        (("/tmp/image.sqsh",), {"PATH": "/usr/bin:/bin"}, ": not there; run this where Docker and Enroot are"),
    ],
)
def test_a_set_up_that_cannot_be_is_one_line(tmp_path: Path, arguments: Any, variables: Any, said: str) -> None:
    done = pyxis(tmp_path, *arguments, **variables)
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
