"""A launch as data: its command, its environment, what it refuses; the same as a SLURM job."""

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made import SETTINGS, a_pod
from zeropods.cli import main
from zeropods.errors import UserError
from zeropods.launch.command import (
    AGENTS,
    FORWARDED,
    PDSH,
    Launch,
    check_plain,
    exported_variables,
    identity,
    launch_line,
    launcher_variables,
    plan_alone,
    plan_launch,
    remote_argument,
    runner_argv,
    runner_environment,
    shell_line,
    variables_of_ranks,
)
from zeropods.launch.logs import RunLog
from zeropods.launch.script_call import ConfigFile, ScriptCall
from zeropods.launch.slurm import plan_slurm, verdict_of
from zeropods.pods.cluster import Cluster
from zeropods.pods.hostfile import Host
from zeropods.pods.machine import this_machine
from zeropods.train.flags import TextToSQLArguments

LAUNCH = Launch(
    call=ScriptCall(Path("/project/textsql_train.py"), ("--deepspeed", "zero1.json")),
    folder=Path("/project/runs/a"),
    hosts=(Host("10.0.0.1", 2), Host("10.0.0.2", 2)),
    master_port=29511,
    ssh_config=Path("/project/.zeropods/pods/ssh_config"),
)


def test_the_command_can_be_pasted_into_a_shell() -> None:
    argv = runner_argv(LAUNCH, Path("/tmp/my hostfile"))
    line = shell_line(argv, launcher_variables(LAUNCH))
    said = subprocess.run(
        ["bash", "-c", f"env() {{ printf '%s\\0' \"$@\"; }}; env {line}"], capture_output=True, check=True
    )
    words = said.stdout.decode().split("\0")[:-1]
    assert words[:2] == ["PDSH_RCMD_TYPE=ssh", "PDSH_SSH_ARGS_APPEND=-F /project/.zeropods/pods/ssh_config"]
    assert Path(words[2]).name == "deepspeed" and words[3:] == argv[4:]
    assert "\n    --launcher pdsh \\\n" in line


def test_a_launch_on_the_usual_set_is_another_one_once_that_set_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / TextToSQLArguments.dataset_path / "manifest.json"
    manifest.parent.mkdir()
    launch = replace(LAUNCH, call=ScriptCall.of("textsql_train.py", ()))
    datasets = []
    for key in ("one", "two"):
        manifest.write_text(json.dumps({"content_key": key}))
        datasets.append(identity(launch)["dataset"])
    assert datasets == ["one", "two"]


def test_what_a_remote_shell_or_pdsh_would_break_is_refused() -> None:
    for argument in ("a\nb", "a\0b", "\udcff"):
        with pytest.raises(UserError, match="contains a line break or is not UTF-8"):
            remote_argument(argument)
    for path in ("/a\nb", "/a$b", "/a%n", "/a'b"):
        with pytest.raises(UserError, match=r"pdsh cannot handle .*; use a path without that character"):
            check_plain("working folder", path)


def test_variables_are_those_asked_for_and_the_usual_ones_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FORWARDED:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"A": "1", "B": "2", "HF_HOME": "/cache", "HF_TOKEN_PATH": "/t"}.items():
        monkeypatch.setenv(name, value)
    expected = {"HF_HOME": "/cache", "HF_TOKEN_PATH": "/t", "A": "1", "X": "y"}
    assert exported_variables(["A"], {"X": "y"}) == expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, "x", "sounds like a secret.*file") for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "my_password")),
        *(
            ("A", value, "would be changed by a remote shell")
            for value in ("a b\nc", "$HOME", '"', "50%", "\\", " a", "\udcff")
        ),
        ("A", "https://me:x@mirror", "its address holds a user"),
    ],
)
def test_a_variable_that_cannot_be_exported_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"--export {name}: .*{said}"):
        exported_variables([name], {})


def test_agents_pass_on_what_a_shell_would_change_but_no_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = """ $HOME "50%" `id` \\ """
    monkeypatch.setenv("A", odd)
    assert exported_variables(["A"], {}, AGENTS)["A"] == odd
    here = {"NCCL_X": odd}
    assert variables_of_ranks(BY_AGENTS, here)["NCCL_X"] == odd
    assert runner_environment(BY_AGENTS, Path("/tmp/environment"), here)["NCCL_X"] == odd
    for broken in ("a\nb", "a\rb", "\udcff"):
        monkeypatch.setenv("A", broken)
        with pytest.raises(UserError, match=r"^--export A: .* in its value cannot be passed on; put it into a file$"):
            exported_variables(["A"], {}, AGENTS)
        with pytest.raises(UserError, match=r"^NCCL_X: is passed on to the ranks, and .* in its value cannot be; set "):
            variables_of_ranks(BY_AGENTS, {"NCCL_X": broken})
    monkeypatch.setenv("HF_TOKEN", "x")
    with pytest.raises(UserError, match=r"--export HF_TOKEN: sounds like a secret, and others can read "):
        exported_variables(["HF_TOKEN"], {}, AGENTS)


def test_the_launchers_environment_has_our_ssh_and_no_secret() -> None:
    here = {"MLFLOW_TRACKING_PASSWORD": "x", "MLFLOW_TRACKING_URI": "http://here", "PATH": "/bin"}
    environment = runner_environment(LAUNCH, Path("/tmp/environment"), here)
    assert environment["PDSH_SSH_ARGS_APPEND"] == "-F /project/.zeropods/pods/ssh_config"
    assert (environment["DS_ENV_FILE"], environment["PATH"]) == ("/tmp/environment", "/bin")
    assert "MLFLOW_TRACKING_PASSWORD" not in environment and environment["MLFLOW_TRACKING_URI"] == "http://here"
    with_user = {**here, "MLFLOW_TRACKING_URI": "http://me:x@here"}
    assert "MLFLOW_TRACKING_URI" not in runner_environment(LAUNCH, Path("/tmp/environment"), with_user)
    with pytest.raises(UserError, match="NCCL_X: DeepSpeed forwards it"):
        runner_environment(LAUNCH, Path("/tmp/environment"), {"NCCL_X": "a$HOME"})


def test_flags_are_read_in_both_forms_and_typed_by_what_they_look_like() -> None:
    words = ("--a", "1", "--b-c=2=3", "--flag", "--d", "1e-3", "--a", "-9", "--e", "True")
    call = ScriptCall(Path("/theirs.py"), words)
    assert call.flag_texts == {"a": "-9", "b_c": "2=3", "flag": "", "d": "1e-3", "e": "True"}
    assert call.values == {"a": -9, "b_c": "2=3", "flag": "", "d": 0.001, "e": True}


def test_a_launch_reads_its_flags_and_its_configuration_once_whatever_else_of_it_changes(tmp_path: Path) -> None:
    configuration = tmp_path / "zero.json"
    configuration.write_text('{"zero_optimization": {"stage": 2}}')
    script = tmp_path / "theirs.py"
    script.touch()
    call = ScriptCall.of(script, ["--deepspeed", str(configuration)])
    planned = plan_alone(call, 2)
    configuration.unlink()
    moved = replace(planned, master_port=1)
    assert moved.call.deepspeed is planned.call.deepspeed and moved.call.values is planned.call.values
    assert moved.call.deepspeed == ConfigFile(str(configuration), {"zero_optimization": {"stage": 2}})
    with pytest.raises(UserError, match=r"zero\.json: no such file"):
        plan_alone(ScriptCall.of(script, call.arguments), 2)


# By the pods' agents.

BY_AGENTS = replace(
    LAUNCH, launcher=AGENTS, control_ports=(31_001, 31_002), secret_file=Path("/project/.zeropods/pods/secret")
)


def test_agents_are_told_the_ports_the_file_with_the_secret_and_the_script_s_words_as_they_are() -> None:
    argv = runner_argv(replace(BY_AGENTS, call=ScriptCall(Path("/project/my run.py"), ("--a", "$HOME\n"))), Path("/h"))
    assert argv[1:] == [
        *("-m", "zeropods.launch.over_agents", "--hostfile", "/h", "--control_ports", "31001,31002"),
        *("--secret_file", "/project/.zeropods/pods/secret", "--master_port", "29511"),
        *("/project/my run.py", "--a", "$HOME\n"),
    ]
    assert launcher_variables(BY_AGENTS) == {}


def test_an_argument_that_no_program_can_be_given_is_refused(tmp_path: Path) -> None:
    call = ScriptCall.of("textsql_train.py", ["--outputdir", str(tmp_path), "--said", "a\0b"])
    with pytest.raises(UserError, match=r"^argument 'a.x00b': contains NUL, which no program can be given; take it "):
        plan_alone(call, 1)


def test_ranks_by_agents_get_the_variables_that_deepspeed_forwards_over_pdsh() -> None:
    here = {"NCCL_DEBUG": "INFO", "MLFLOW_TRACKING_PASSWORD": "x", "PYTHONPATH": "/more", "CDSW_API_KEY": "x"}
    here["MLFLOW_TRACKING_URI"] = "http://me:x@here"
    exported = {"OMP_NUM_THREADS": "2"}
    of_ranks = variables_of_ranks(replace(BY_AGENTS, exported=exported), here)
    assert of_ranks == {"NCCL_DEBUG": "INFO", "PYTHONPATH": f"{Path.cwd()}:/more", "OMP_NUM_THREADS": "2"}
    # DeepSpeed's runner itself adds them to these.
    assert variables_of_ranks(replace(LAUNCH, exported=exported), here) == exported


def test_pdsh_is_taken_where_it_reaches_all_pods_and_else_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "programs").mkdir()
    for program in ("pdsh", "ssh"):
        (tmp_path / "programs" / program).touch(mode=0o755)
    with_sshd, without = a_pod(1), a_pod(2, ssh_port=None, host_key=None)
    both = Cluster(folder=tmp_path / "two", settings=SETTINGS, pods=(with_sshd, without), machine=this_machine())
    one = replace(both, pods=(with_sshd,))
    call = ScriptCall.of("textsql_train.py", ["--outputdir", str(tmp_path / "run")])
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    assert (plan_launch(one, call).launcher, plan_launch(both, call).launcher) == (PDSH, AGENTS)
    assert plan_launch(one, call, launcher=AGENTS).launcher == AGENTS
    with pytest.raises(UserError, match=r"^--launcher pdsh: there is no sshd on pod2; leave it out, so that "):
        plan_launch(both, call, launcher=PDSH)
    (tmp_path / "programs" / "pdsh").unlink()
    with pytest.raises(UserError, match=r"^--launcher pdsh: there is no pdsh here; leave it out, so that "):
        plan_launch(one, call, launcher=PDSH)
    monkeypatch.setenv("MINE", "1")
    planned = plan_launch(both, call, export=["MINE"])
    assert (planned.launcher, planned.control_ports) == (AGENTS, (30_001, 30_002))
    line = launch_line(planned, both, both.hostfile)
    words = "-m zeropods launch", "--name two", "--launcher agents", "--num-pods 2", "--export MINE", "-- "
    assert " \\\n    ".join(words) in line


def test_an_ended_launcher_of_an_agent_is_told_like_a_broken_session_of_pdsh(tmp_path: Path) -> None:
    lines = [
        "pdsh@here: 10.0.0.1: ssh exited with exit code 1",
        "agents: 10.0.0.2: launcher exited with exit code 255",
        "agents: 10.0.0.3: killed by signal 9",
        "agents: 10.0.0.4: something else",
    ]
    log = RunLog(tmp_path, names={f"10.0.0.{number}": f"pod{number}" for number in range(1, 5)})
    log.path.write_text("\n".join(lines))
    log.read(ended=True)
    assert log.session_statuses == {"pod1": 1, "pod2": 255, "pod3": 137}


# As a SLURM job.

ROOT = Path(__file__).resolve().parents[3]
JOB = {"JobId": "17", "Reason": "", "TimeLimit": "00:10:00"}


def test_the_command_submits_the_projects_own_job_file_with_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["--max_steps", "5", "--said", "a b", "--outputdir", "/runs/a 100%"]
    asked = {"pods": 2, "slots": 8, "partition": "gpu", "options": ("--nodes=3",)}
    job = plan_slurm(ScriptCall.of(ROOT / "tests" / "full" / "rank.py", words), needs_slurm=False, **asked)
    place = job.argv.index(str(ROOT / "slurm" / "train.sbatch"))
    assert job.argv[:2] == ["sbatch", "--parsable"]
    assert job.argv[place + 1 :] == [str(ROOT / "tests" / "full" / "rank.py"), *words]
    assert {"--gpus-per-node=8", "--cpus-per-task=32", "--partition=gpu"} <= set(job.argv)
    assert not any("--account" in word for word in job.argv)
    # Further options come last and win; sbatch replaces nothing in the log's path.
    assert job.argv.index("--nodes=3") > job.argv.index("--nodes=2")
    assert {"--output=/runs/a 100%%/launch.log", "--job-name=zeropods-a-100-"} <= set(job.argv)
    # A job begins without the variables of the one that submits it.
    here = {"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "1", "SLURM_CONF": "/c", "SBATCH_QOS": "q", "HF_HOME": "/h"}
    kept = job.environment(here)
    assert (kept["SLURM_CONF"], kept["SBATCH_QOS"], kept["HF_HOME"], kept["SLOTS"]) == ("/c", "q", "/h", "8")
    assert "SLURM_JOB_ID" not in kept and "SLURM_RESTART_COUNT" not in kept


@pytest.mark.parametrize(
    ("state", "exit_status", "status"),
    [
        ("COMPLETED", 0, None), ("FAILED", 1, None), ("FAILED", 75, "interrupted"), ("CANCELLED", 1, "interrupted"),
        ("PREEMPTED", 1, "interrupted"), ("TIMEOUT", 1, "timeout"), ("DEADLINE", 1, "timeout"),
        ("NODE_FAIL", 1, "pod_lost"), ("OUT_OF_MEMORY", 1, "oom"),
    ],
)  # fmt: skip
def test_a_state_has_a_status(state: str, exit_status: int, status: str | None) -> None:
    assert verdict_of({**JOB, "JobState": state, "ExitCode": f"{exit_status}:0"}).status == status


def test_without_slurm_a_launch_is_one_line_and_a_dry_run_needs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    script = ["causal_train.py", "--task", "lm", "--data", "allenai/c4"]
    assert main(["launch", "--launcher", "slurm", "--", *script]) == 1
    said = capsys.readouterr().err
    assert "sinfo: not on PATH; run this where SLURM's commands are" in said and said.count("\n") == 1
    words = ["--launcher", "slurm", "--num-pods", "2", "--dry-run", "--json"]
    assert main(["launch", *words, "--", *script]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert "--nodes=2" in planned["argv"] and planned["exported"]["SLOTS"] == "1"


def cloud(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv, environment = [ROOT / "cloud" / script, *arguments], {**os.environ, **variables}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(("script", "gpus", "trainings"), [("t4x4.sh", 4, ("1", "full")), ("a100x8.sh", 8, ("1",))])
def test_a_cloud_script_is_told_what_to_do_and_counts_the_gpus(
    script: str, gpus: int, trainings: tuple[str, ...], tmp_path: Path
) -> None:
    for arguments in ((), ("3",), ("quick", "full")):
        assert f"{script}: expected quick (1) or full (2)" in cloud(script, *arguments).stderr
    counted = tmp_path / "nvidia-smi"
    counted.write_text("#!/bin/sh\n" + "echo 'GPU 0: of a test'\n" * (gpus + 1))
    counted.chmod(0o755)
    done = cloud(script, "full", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and f"{gpus + 1} GPUs here; expected {gpus}" in done.stderr
    # The full training on eight A100 is the next test's.
    for what in trainings:
        done = cloud(script, what, DRY_RUN="1", PYTHON=sys.executable)
        assert done.returncode == 0 and re.search(r"causal_train.py[\s\\]+--task lm", done.stdout), done.stderr
        (world,) = re.findall(r"--world_info=(\S+)", done.stdout)
        assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": list(range(gpus))}


def test_without_flash_attention_the_full_training_says_so_and_takes_sdpa(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").touch()
    for path, attention, said in (("", "sdpa", 1), (str(tmp_path), "flash_attention_2", 0)):
        done = cloud("a100x8.sh", "full", DRY_RUN="1", PYTHON=sys.executable, PYTHONPATH=path, ATTENTION="")
        assert f"--attn_implementation {attention} " in done.stdout and done.stderr.count("flash-attn") == said
