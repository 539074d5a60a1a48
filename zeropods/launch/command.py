"""A launch as data: what is run where, and the command that does it."""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.launch.exported import without_secrets
from zeropods.pods.hostfile import Host
from zeropods.pods.ssh import pdsh_ssh_arguments

LAUNCHERS = ("pdsh", "slurm", "none")
PLAIN = re.compile(r"[\w@%+=:,./-]+")
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
    """DeepSpeed's launcher over pdsh, or on this machine alone."""
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
    """DeepSpeed's launcher of one machine: a process a slot, without ssh. It ends its children when it is ended."""
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


def runner_environment(launch: Launch, env_file: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of DeepSpeed's launcher, which runs here and starts pdsh.

    Args:
        environment: this process's, with the programs of its Python first on PATH.
    """
    ssh = {} if launch.ssh_config is None else {"PDSH_SSH_ARGS_APPEND": pdsh_ssh_arguments(launch.ssh_config)}
    return {**without_secrets(environment), **ssh, "PDSH_RCMD_TYPE": "ssh", "DS_ENV_FILE": str(env_file)}


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
    if not PLAIN.fullmatch(str(path)) or "%" in str(path):
        allowed = "letters, digits and . _ - / +"
        raise UserError(f"{what} {str(path)!r}: does not pass DeepSpeed's launcher; move it to a path of {allowed}")
