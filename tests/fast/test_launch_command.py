"""A launch as data: its command, its environment, what it refuses."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropods.errors import UserError
from zeropods.launch.command import (
    Launch,
    check_plain,
    exported_variables,
    find_script,
    flag_values,
    remote_argument,
    run_folder_of,
    runner_argv,
    runner_environment,
    typed,
    write_environment,
)
from zeropods.pods.hostfile import Host

HOSTS = (Host("10.0.0.1", 2), Host("10.0.0.2", 2))
LAUNCH = Launch(
    script=Path("/project/textsql_train.py"),
    arguments=("--deepspeed", "zero1.json"),
    folder=Path("/project/runs/a"),
    hosts=HOSTS,
    master_port=29511,
    ssh_config=Path("/project/.zeropods/pods/ssh_config"),
    ssh_port=2222,
)
TEXTS = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=30)


def test_the_command_is_deepspeeds_own_over_pdsh() -> None:
    argv = runner_argv(LAUNCH, Path("/tmp/hostfile"))
    assert argv[1:3] == ["-m", "deepspeed.launcher.runner"]
    flags = dict(pairwise(argv))
    assert (flags["--hostfile"], flags["--launcher"], flags["--num_nodes"]) == ("/tmp/hostfile", "pdsh", "2")
    assert (flags["--master_addr"], flags["--master_port"], flags["--ssh_port"]) == ("10.0.0.1", "29511", "2222")
    assert argv[-3:] == ["/project/textsql_train.py", "--deepspeed", "zero1.json"]


def test_one_pod_is_reached_over_ssh_too() -> None:
    assert "--force_multi" in runner_argv(LAUNCH, Path("/tmp/hostfile"))


def test_without_pods_each_slot_of_this_machine_gets_a_process() -> None:
    alone = Launch(script=Path("/a.py"), arguments=(), folder=Path("/r"), hosts=HOSTS, master_port=1, launcher="none")
    argv = runner_argv(alone, Path())
    assert "deepspeed.launcher.launch" in argv and alone.world_size == 4


def test_pdsh_gets_the_clusters_ssh_configuration() -> None:
    environment = runner_environment(LAUNCH, Path("/tmp/environment"), {"PATH": "/bin"})
    assert environment["PDSH_SSH_ARGS_APPEND"] == "-F /project/.zeropods/pods/ssh_config"
    assert (environment["DS_ENV_FILE"], environment["PATH"]) == ("/tmp/environment", "/bin")


def test_a_launch_is_a_json_document() -> None:
    assert json.loads(json.dumps(LAUNCH.to_json()))["hosts"][1] == {"address": "10.0.0.2", "slots": 2}


def through_deepspeed(argument: str) -> str:
    """An argument after DeepSpeed's quoting, pdsh's replacing of %% and a remote shell."""
    sent = remote_argument(argument)
    if " " in sent:
        sent = '"{}"'.format(sent.replace('"', '\\"'))
    command = f"printf %s {sent.replace('%%', '%')}"
    return subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout.decode()


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_an_argument_reaches_the_script_unchanged(argument: str) -> None:
    assert through_deepspeed(argument) == argument


@pytest.mark.parametrize("argument", ["$HOME", "a b", 'say "no"', "`id`", "a;b", "it's", "\\ $(id)", "50%", "*", ""])
def test_a_shell_finds_nothing_to_do_in_an_argument(argument: str) -> None:
    assert through_deepspeed(argument) == argument


@pytest.mark.parametrize("argument", ["a\nb", "a\0b", "\udcff"])
def test_an_argument_that_is_no_line_of_text_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match="no line of UTF-8"):
        remote_argument(argument)


@pytest.mark.parametrize("path", ["/my runs", "/a;b", "/a%n", "/a'b"])
def test_a_folder_that_deepspeed_would_break_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="does not pass DeepSpeed's launcher"):
        check_plain("working folder", path)


def test_variables_are_those_asked_for_and_the_usual_ones_that_are_set() -> None:
    here = {"A": "1", "B": "2", "HF_HOME": "/cache"}
    assert exported_variables(["A"], {"X": "y"}, here) == {"HF_HOME": "/cache", "A": "1", "X": "y"}


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "my_password", "API_KEY"])
def test_a_secret_is_not_exported(name: str) -> None:
    with pytest.raises(UserError, match=f"--export {name}: sounds like a secret.*file"):
        exported_variables([name], {}, {name: "x"})


def test_a_file_that_holds_a_secret_is_exported() -> None:
    assert exported_variables(["HF_TOKEN_PATH"], {}, {"HF_TOKEN_PATH": "/t"}) == {"HF_TOKEN_PATH": "/t"}


def test_what_deepspeed_would_forward_is_no_secret() -> None:
    environment = {"MLFLOW_TRACKING_PASSWORD": "x", "MLFLOW_TRACKING_URI": "http://here", "HF_TOKEN": "y"}
    kept = runner_environment(LAUNCH, Path("/tmp/environment"), environment)
    assert "MLFLOW_TRACKING_PASSWORD" not in kept and kept["MLFLOW_TRACKING_URI"] == "http://here"


def test_what_deepspeed_would_forward_passes_a_shell() -> None:
    with pytest.raises(UserError, match="NCCL_X: DeepSpeed forwards it"):
        runner_environment(LAUNCH, Path("/tmp/environment"), {"NCCL_X": "a$HOME"})


def test_what_zeropods_sets_is_not_exported() -> None:
    with pytest.raises(UserError, match="ZEROPODS_RUN: is set by zeropods itself"):
        exported_variables(["ZEROPODS_RUN"], {}, {"ZEROPODS_RUN": "x"})


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(UserError, match="--export NOWHERE: not set here"):
        exported_variables(["NOWHERE"], {}, {})


@pytest.mark.parametrize("value", ["a b\nc", "$HOME", '"', "`id`", "50%", "\\", " a", "a ", "\udcff"])
def test_a_value_that_a_shell_would_read_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"--export A: .* does not pass a remote shell"):
        exported_variables(["A"], {}, {"A": value})


def test_the_environment_file_is_as_deepspeed_reads_it(tmp_path: Path) -> None:
    write_environment(tmp_path / "env", {"A": "1", "B": "x=y z"})
    lines = (tmp_path / "env").read_text().splitlines(keepends=True)
    assert dict(line.rstrip("\n").split("=", maxsplit=1) for line in lines) == {"A": "1", "B": "x=y z"}


def test_flags_are_read_in_both_forms() -> None:
    values = flag_values(["--a", "1", "--b=2=3", "--flag", "--c", "x", "--a", "9"])
    assert values == {"a": "9", "b": "2=3", "flag": "", "c": "x"}


def test_values_are_what_they_look_like() -> None:
    values = typed({"a": "1", "b": "1e-3", "c": "True", "d": "zero1.json"})
    assert values == {"a": 1, "b": 0.001, "c": True, "d": "zero1.json"}


def test_a_negative_value_is_a_value() -> None:
    assert flag_values(["--max_steps", "-1"]) == {"max_steps": "-1"}


def test_the_run_folder_is_the_scripts_own_default_where_none_is_given(tmp_path: Path) -> None:
    from zeropods.train.arguments import TextToSQLArguments

    assert run_folder_of([], tmp_path) == tmp_path / TextToSQLArguments().outputdir


def test_a_script_is_found_in_the_project_from_any_folder(tmp_path: Path) -> None:
    project = Path(__file__).resolve().parents[2]
    assert find_script("textsql_train.py", tmp_path, project) == project / "textsql_train.py"


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.py: no such script"):
        find_script("nowhere.py", tmp_path, tmp_path)
