"""A launch as data: its command, its environment, what it refuses."""

import subprocess
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.launch.command import (
    FORWARDED,
    Launch,
    check_plain,
    exported_variables,
    flag_values,
    launcher_variables,
    remote_argument,
    runner_argv,
    runner_environment,
    shell_line,
    typed_flags,
)
from zeropods.pods.hostfile import Host

LAUNCH = Launch(
    script=Path("/project/textsql_train.py"),
    arguments=("--deepspeed", "zero1.json"),
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


@pytest.mark.parametrize("argument", ["a\nb", "a\0b", "\udcff"])
def test_an_argument_that_is_no_line_of_text_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match="no line of UTF-8"):
        remote_argument(argument)


@pytest.mark.parametrize("path", ["/a\nb", "/a$b", "/a%n", "/a'b"])
def test_a_folder_that_pdsh_would_break_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="does not pass pdsh; move it to a path without"):
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
            ("A", value, "does not pass a remote shell")
            for value in ("a b\nc", "$HOME", '"', "50%", "\\", " a", "\udcff")
        ),
    ],
)
def test_a_variable_that_cannot_be_exported_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"--export {name}: .*{said}"):
        exported_variables([name], {})


def test_the_launchers_environment_has_our_ssh_and_no_secret() -> None:
    here = {"MLFLOW_TRACKING_PASSWORD": "x", "MLFLOW_TRACKING_URI": "http://here", "PATH": "/bin"}
    environment = runner_environment(LAUNCH, Path("/tmp/environment"), here)
    assert environment["PDSH_SSH_ARGS_APPEND"] == "-F /project/.zeropods/pods/ssh_config"
    assert (environment["DS_ENV_FILE"], environment["PATH"]) == ("/tmp/environment", "/bin")
    assert "MLFLOW_TRACKING_PASSWORD" not in environment and environment["MLFLOW_TRACKING_URI"] == "http://here"
    with pytest.raises(UserError, match="NCCL_X: DeepSpeed forwards it"):
        runner_environment(LAUNCH, Path("/tmp/environment"), {"NCCL_X": "a$HOME"})


def test_flags_are_read_in_both_forms_and_typed_by_what_they_look_like() -> None:
    words = ["--a", "1", "--b-c=2=3", "--flag", "--d", "1e-3", "--a", "-9", "--e", "True"]
    assert flag_values(words) == {"a": "-9", "b_c": "2=3", "flag": "", "d": "1e-3", "e": "True"}
    assert typed_flags("/theirs.py", words) == {"a": -9, "b_c": "2=3", "flag": "", "d": 0.001, "e": True}
