"""A launch as data: what is run where, with which flags and environment, and the command that does it."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from zeropods import files
from zeropods.batch import PASSES, ROWS, Batch
from zeropods.errors import UserError
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import pdsh_ssh_arguments

LAUNCHERS = ("pdsh", "slurm", "none")
RUN = "ZEROPODS_RUN"
"""Marks every process of a run: by it the agents find and end them. Its value is the run's lease."""
OURS = "ZEROPODS_"
FORWARDED = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_CACHE",
    "HF_TOKEN_PATH",
    "TORCH_EXTENSIONS_DIR",
    "OMP_WAIT_POLICY",
)
"""Settings that ranks need as the user has them here; DeepSpeed itself forwards PYTHON*, NCCL* and a few more."""
FORWARDED_BY_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of names that DeepSpeed's launcher exports unasked (deepspeed/launcher/runner.py)."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
UNSAFE = re.compile(r"[\"'`$\\\n\r\0%]|[\ud800-\udfff]|^\s|\s$")
"""What a remote shell, pdsh or DeepSpeed would read as something else; and what is not UTF-8."""
PLAIN = re.compile(r"[\w@+=:,./-]+")
"""What DeepSpeed's launcher and the shells beyond it leave as it is."""
BREAKS = re.compile(r"[\n\0\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run of a script on some pods. Paths are absolute: every pod sees the same project folder."""

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    """The run folder, the script's `--outputdir`."""
    hosts: tuple[Host, ...]
    master_port: int
    """Where rank 0 listens for the other ranks."""
    launcher: str = "pdsh"
    ssh_config: Path | None = None
    ssh_port: int | None = None
    exported: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank, beside what DeepSpeed forwards itself. Nothing secret."""
    export: tuple[str, ...] = ()
    """Names of those among them that the user asked for."""
    restarts: int = 0
    """How often it has gone on by itself, this attempt included."""
    asked: Launch | None = None
    """What was asked for, where it goes on by itself: on fewer pods, with other flags."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run` prints and the run folder keeps."""
        return {
            "script": str(self.script),
            "arguments": list(self.arguments),
            "folder": str(self.folder),
            "hosts": [{"address": host.address, "slots": host.slots} for host in self.hosts],
            "master_port": self.master_port,
            "launcher": self.launcher,
            "exported": self.exported,
        }


def runner_argv(launch: Launch, hostfile: Path) -> list[str]:
    """The command of DeepSpeed's launcher: over pdsh, or on this machine alone."""
    if launch.launcher == "none":
        return _local_argv(launch)
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", str(hostfile)),
        *("--launcher", "pdsh"),
        *("--num_nodes", str(len(launch.hosts))),
        *("--master_addr", launch.hosts[0].address),
        *("--master_port", str(launch.master_port)),
        *(() if launch.ssh_port is None else ("--ssh_port", str(launch.ssh_port))),
        # Its check ignores the ssh options and has no deadline; the preflight has seen every pod.
        "--no_ssh_check",
        # One host would run here, without ssh.
        "--force_multi",
        str(launch.script),
        *map(remote_argument, launch.arguments),
    ]


def _local_argv(launch: Launch) -> list[str]:
    """DeepSpeed's launcher of one machine: a process per slot, without ssh. It ends its children when it is ended."""
    slots = {"localhost": list(range(launch.world_size))}
    world_info = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch"),
        f"--world_info={world_info}",
        "--master_addr=127.0.0.1",
        f"--master_port={launch.master_port}",
        str(launch.script),
        *launch.arguments,
    ]


def remote_argument(argument: str) -> str:
    """An argument as DeepSpeed's launcher needs it, so that the script on the pod gets it unchanged.

    The launcher joins arguments with blanks for a remote shell; one with a blank it puts into double
    quotes, in which only `"` is escaped (deepspeed/launcher/multinode_runner.py). pdsh replaces `%n`
    and the like.
    """
    if BREAKS.search(argument):
        raise UserError(f"argument {argument!r}: no line of UTF-8; does not pass a remote shell; put it into a file")
    percent = argument.replace("%", "%%")
    if " " not in argument:
        return shlex.quote(percent) if percent else "''"
    return re.sub(r"([\\$`])", r"\\\1", percent)


def check_plain(what: str, path: Path | str) -> None:
    """Refuse a path that DeepSpeed's launcher passes to the remote shell without quotes."""
    if not PLAIN.fullmatch(str(path)):
        allowed = "letters, digits and . _ - / +"
        raise UserError(f"{what} {str(path)!r}: does not pass DeepSpeed's launcher; move it to a path of {allowed}")


# The environment of the launcher and of every rank


def exported_variables(
    names: Iterable[str], fixed: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables for every rank: `fixed` ones, those asked for by name, and FORWARDED ones that are set.

    They end up on command lines, so a name that sounds like a secret is refused, as is a value that
    does not pass a shell unchanged.
    """
    here = os.environ if environment is None else environment
    for name in names:
        if name.startswith(OURS):
            raise UserError(f"--export {name}: is set by zeropods itself; leave it out")
        if name not in here:
            raise UserError(f"--export {name}: not set here; give the name of a variable that is set")
    variables = {**{name: here[name] for name in (*FORWARDED, *names) if name in here}, **fixed}
    for name, value in variables.items():
        _check_variable(name, value)
    return variables


def _check_variable(name: str, value: str) -> None:
    if not NAME.fullmatch(name):
        raise UserError(f"--export {name!r}: no name of an environment variable; expected letters, digits and _")
    if _is_secret(name):
        raise UserError(
            f"--export {name}: sounds like a secret, and would be seen on command lines; "
            "put it into a file that the pods see, and export the file's path"
        )
    unsafe = UNSAFE.search(value)
    if unsafe:
        raise UserError(f"--export {name}: {unsafe[0]!r} in its value does not pass a remote shell; put it into a file")


def write_environment(path: Path, variables: Mapping[str, str]) -> None:
    """Write DeepSpeed's environment file: `NAME=VALUE` lines, no blank and no comment (they would raise)."""
    files.write_text(path, "".join(f"{name}={value}\n" for name, value in variables.items()))


def runner_environment(launch: Launch, env_file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of DeepSpeed's launcher, which runs here and starts pdsh.

    It holds nothing secret that the launcher would put on command lines. `UserError` names a variable that DeepSpeed
    forwards and whose value no remote shell leaves as it is.

    Args:
        environment: this process's, with the programs of its Python first on PATH.
    """
    kept = {}
    for name, value in environment.items():
        forwarded = name.startswith(FORWARDED_BY_DEEPSPEED)
        if forwarded and _is_secret(name):
            continue
        if forwarded and UNSAFE.search(value):
            raise UserError(f"{name}: DeepSpeed forwards it, and its value does not pass a remote shell; unset it")
        kept[name] = value
    if launch.ssh_config is not None:
        kept["PDSH_SSH_ARGS_APPEND"] = pdsh_ssh_arguments(launch.ssh_config)
    return {**kept, "PDSH_RCMD_TYPE": "ssh", "DS_ENV_FILE": str(env_file)}


def _is_secret(name: str) -> bool:
    return SECRET.search(name) is not None and not name.endswith(("_PATH", "_FILE"))


# A script's flags, read and written without loading the script


def train_arguments(**flags: Any) -> list[str]:
    """A script's arguments; a flag without a value is left out."""
    given = {name: value for name, value in flags.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def flag_values(arguments: Sequence[str]) -> dict[str, str]:
    """Values of `--name value` and `--name=value` by the name that a script's dataclass has; the last one wins."""
    values: dict[str, str] = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        name = _flag_name(argument)
        if name is not None:
            _, equals, value = argument.partition("=")
            values[name] = value if equals else ("" if following.startswith("--") else following)
    return values


def typed_flags(script: str | Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Flags by name with typed values: those of a script of ours with its defaults, else by what they look like."""
    from zeropods.train.arguments import arguments_of, parse_flags

    kind = arguments_of(script)
    if kind is None:
        return {name: _typed(text) for name, text in flag_values(arguments).items()}
    return asdict(parse_flags(kind, arguments))


def with_flags(arguments: Sequence[str], flags: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments with these flags, in the place of those of the same names."""
    kept: list[str] = []
    for before, word in pairwise(("", *arguments)):
        is_value = _flag_name(before) in flags and "=" not in before and not word.startswith("--")
        if _flag_name(word) not in flags and not is_value:
            kept.append(word)
    return (*kept, *(part for name, value in flags.items() for part in (f"--{name}", value)))


def batch_of(script: Path, arguments: Sequence[str]) -> Batch | None:
    """The batch of each rank of a call; None for another's script that is not told it by both flags."""
    said = typed_flags(script, arguments)
    rows, passes = said.get(ROWS), said.get(PASSES)
    if isinstance(rows, int) and isinstance(passes, int) and min(rows, passes) > 0:
        return Batch(rows, passes)
    return None


def run_folder_of(arguments: Sequence[str], working_folder: Path, script: str | Path = "textsql_train.py") -> Path:
    """The run folder that a script's arguments name; where they name none, the script's own default if it is ours."""
    from zeropods.train.arguments import TextToSQLArguments, arguments_of

    kind = arguments_of(script) or TextToSQLArguments
    return (working_folder / flag_values(arguments).get("outputdir", kind.outputdir)).resolve()


def find_script(name: str | Path, working_folder: Path, project: Path) -> Path:
    """A script of the working folder, else one of the project."""
    for folder in (working_folder, project):
        path = (folder / name).resolve()
        if path.is_file():
            return path
    raise UserError(f"{name}: no such script, neither in {working_folder} nor in {project}")


def _flag_name(word: str) -> str | None:
    """The name of a flag as a script's dataclass has it; None for another word."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else None


def _typed(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)
