"""What the ssh client is told: pinned host keys, one configuration that pdsh's ssh and plain ssh both use."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods.hostfile import checked_address

CONNECT_SECONDS = 2
ALIVE_SECONDS = 2
ALIVE_MISSES = 3
"""A peer that is cut off ends the connection after `ALIVE_SECONDS` x `ALIVE_MISSES`; without this it never ends."""
ALWAYS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "PasswordAuthentication": "no",
    "StrictHostKeyChecking": "yes",
    "ControlMaster": "no",
}
"""Options of every connection, with an own configuration or with the user's: ask nothing, trust no unknown key."""
PINNED = {
    "ConnectionAttempts": "1",
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "GlobalKnownHostsFile": "/dev/null",
    "CheckHostIP": "no",
    "UpdateHostKeys": "no",
    "CanonicalizeHostname": "no",
    "ServerAliveInterval": str(ALIVE_SECONDS),
    "ServerAliveCountMax": str(ALIVE_MISSES),
    "LogLevel": "ERROR",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ControlPath": "none",
}
"""Nothing of the user's own agent, connections or known hosts has a part in a cluster."""


def known_hosts_text(entries: Iterable[tuple[str, int, str]]) -> str:
    """`known_hosts` from (address, port, host key `ssh-ed25519 AAAA...`); a host may have several keys."""
    lines = []
    for address, port, key in entries:
        name = checked_address(address) if port == 22 else f"[{checked_address(address)}]:{port}"
        lines.append(f"{name} {_one_line(key)}\n")
    return "".join(lines)


def ssh_config_text(addresses: Iterable[str], port: int, key: Path, known_hosts: Path, user: str) -> str:
    """One `Host` block for the cluster's pods; other hosts are not touched by it.

    Raises:
        UserError: an address is no address, or a path cannot be written in ssh's language.
    """
    options = {
        "User": _quoted(user),
        "Port": str(port),
        "IdentityFile": _quoted_path(key),
        "UserKnownHostsFile": _quoted_path(known_hosts),
        **ALWAYS,
        **PINNED,
    }
    head = "Host " + " ".join(checked_address(address) for address in addresses)
    return "\n".join([head, *(f"    {name} {value}" for name, value in options.items())]) + "\n"


def ssh_argv(
    ssh_config: Path | None, address: str, command: Sequence[str], *, port: int | None = None, log_level: str = "ERROR"
) -> list[str]:
    """The argument list that runs `command` on a host, where a shell reads it as the same arguments.

    Args:
        ssh_config: None for the user's own configuration, in which `ALWAYS` still holds.
        port: None for the configuration's.
        log_level: what ssh itself says on stderr; `VERBOSE` tells when it has logged in.
    """
    argv = ["ssh", "-T", "-o", f"LogLevel={log_level}"]
    if ssh_config is not None:
        argv += ["-F", str(ssh_config)]
    if port is not None:
        argv += ["-p", str(port)]
    for name, value in ALWAYS.items():
        argv += ["-o", f"{name}={value}"]
    return [*argv, "--", checked_address(address), shlex.join(command)]


def pdsh_ssh_arguments(ssh_config: Path) -> str:
    """`PDSH_SSH_ARGS_APPEND`, with which pdsh's ssh reads this configuration.

    pdsh cuts the value at blanks, knows no quotes, and expands %h and its like (2.34, tried).

    Raises:
        UserError: the path holds a blank.
    """
    path = str(ssh_config.absolute())
    if any(character.isspace() for character in path):
        raise UserError(f"{path}: pdsh cannot be told a path with blanks; set ZEROPODS_HOME to a folder without")
    return "-F " + path.replace("%", "%%")


def _quoted_path(path: Path) -> str:
    if "${" in str(path):
        raise UserError(f"{path}: ssh would read '${{' as a variable, and knows no escape; choose another folder")
    # ssh expands %h and its like in file names.
    return _quoted(str(path.absolute()).replace("%", "%%"))


def _quoted(text: str) -> str:
    return '"' + _one_line(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise UserError(f"{text!r}: has characters that an ssh configuration cannot hold; choose another name")
    return text
