"""ssh: keys, what clients are told, and each pod's own unprivileged daemon, which knows one key and forwards nothing.

pdsh's ssh and plain ssh use one configuration, in which the host keys of all pods are pinned.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeropods.errors import UserError
from zeropods.files import PLAIN
from zeropods.pods.hostfile import interface
from zeropods.pods.processes import FORKS_VARIABLE
from zeropods.programs import end_with_parent, own_programs_first, required_programs

SAID_SECONDS = 30.0
CONNECT_SECONDS = 2
ALIVE_SECONDS = 2
ALIVE_MISSES = 3
"""A peer that is cut off ends the connection after `ALIVE_SECONDS` x `ALIVE_MISSES`; without this it never ends."""
ALWAYS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "StrictHostKeyChecking": "yes",
    "ControlMaster": "no",
    "LogLevel": "ERROR",
}
"""Options of every connection, with an own configuration or with the user's: ask nothing, trust no unknown key."""
PINNED = {
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "GlobalKnownHostsFile": "/dev/null",
    "ServerAliveInterval": str(ALIVE_SECONDS),
    "ServerAliveCountMax": str(ALIVE_MISSES),
}
"""Nothing of the user's own agent or known hosts has a part in a cluster; nor has any other configuration, with -F."""
HOST_KEY, AUTHORIZED_KEYS, CONFIG, LOG = "host_key", "authorized_keys", "sshd_config", "sshd.log"
FORKS = "forks"
"""The socket of the pod's fork server, in the same folder."""
RUN_FOLDER = Path("/run/sshd")
CML_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "CDSW_PROJECT")
"""What a session is told of its pod. Of CML's variables no other: `CDSW_API_KEY` is a secret."""
START_SECONDS = 15.0
LISTENS = "Server listening"
"""In the line of its log that says so."""
PAUSE_SECONDS = 0.05
SSHD_OPTIONS = """\
PidFile none
StrictModes no
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitUserRC no
DisableForwarding yes
LoginGraceTime 20
MaxStartups 100:30:200
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 3
"""
"""What differs from sshd's own defaults: no PAM, no tunnel, no environment of the user's."""


# Keys


def make_key(path: Path, comment: str) -> str:
    """Write a new ed25519 key without passphrase to `path` (mode 600), and its public half to `path`.pub.

    Args:
        comment: ends the public file's line; says whose key it is.

    Returns:
        The public key without its comment: `ssh-ed25519 AAAA...`.

    Raises:
        UserError: ssh-keygen is missing or fails; it overwrites no key.
    """
    argv = [*required_programs("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    said_by(argv, f"{path}: ssh-keygen failed", "is the folder there and writable?")
    return " ".join(path.with_name(f"{path.name}.pub").read_text(encoding="utf-8").split()[:2])


def said_by(argv: Sequence[str], place: str, remedy: str) -> str:
    """What a program prints; `UserError` with what it complains of, where it fails or takes too long."""
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(argv, stdin=nothing, capture_output=True, text=True, timeout=SAID_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise UserError(f"{place}: {reason}; {remedy}") from None
    return done.stdout


# The client


def known_hosts_text(entries: Iterable[tuple[str, int, str]]) -> str:
    """`known_hosts` from (address, port other than 22, host key `ssh-ed25519 AAAA...`); a host may have several."""
    return "".join(f"[{address}]:{port} {key}\n" for address, port, key in entries)


def ssh_config_text(addresses: Iterable[str], port: int, key: Path, known_hosts: Path, user: str) -> str:
    """One `Host` block for the cluster's pods; other hosts are not touched by it.

    Args:
        key, known_hosts: paths that `pdsh_ssh_arguments` has let pass.
    """
    options = {
        # An account of a domain has a backslash.
        "User": '"' + user.replace("\\", "\\\\") + '"',
        "Port": str(port),
        "IdentityFile": str(key),
        "UserKnownHostsFile": str(known_hosts),
        **ALWAYS,
        **PINNED,
    }
    return "".join([f"Host {' '.join(addresses)}\n", *(f"    {name} {value}\n" for name, value in options.items())])


def ssh_argv(ssh_config: Path | None, address: str, command: Sequence[str], **options: object) -> list[str]:
    """The argument list that runs `command` on a host, where a shell reads it as the same arguments.

    Args:
        ssh_config: None for the user's own configuration, in which `ALWAYS` still holds.
        options: more of ssh's options.
    """
    chosen = () if ssh_config is None else ("-F", str(ssh_config))
    given = (word for name, value in {**ALWAYS, **options}.items() for word in ("-o", f"{name}={value}"))
    return ["ssh", "-T", *chosen, *given, "--", address, shlex.join(command)]


def pdsh_ssh_arguments(ssh_config: Path) -> str:
    """`PDSH_SSH_ARGS_APPEND`, with which pdsh's ssh reads this configuration.

    pdsh cuts the value at blanks, knows no quotes, and expands %h and its like (2.34, tried); ssh expands others.

    Raises:
        UserError: the path holds such characters.
    """
    path = str(ssh_config.absolute())
    if not PLAIN.fullmatch(path):
        remedy = "set ZEROPODS_HOME to a folder of letters, digits and . _ - / only"
        raise UserError(f"{path}: pdsh cannot be told this path; {remedy}")
    return f"-F {path}"


# The daemon


async def start_sshd(
    folder: Path, address: str, ports: Sequence[int], authorized_key: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Start one daemon, a child of this process that the kernel kills with it; returns it and its port.

    Args:
        folder: absolute, mode 700; holds the host key, and takes configuration and log.
        ports: the first of them that nobody has is taken.

    Raises:
        UserError: it is not installed or does not come up.
    """
    (folder / AUTHORIZED_KEYS).write_text(f"{authorized_key}\n", encoding="utf-8")
    if os.geteuid() == 0:
        RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
    parent, nothing, [program] = os.getpid(), subprocess.DEVNULL, required_programs("sshd")
    # sshd starts itself again for each connection, elsewhere: all paths have to be absolute.
    argv = [os.path.abspath(program), "-D", "-f", str(folder / CONFIG), "-E", str(folder / LOG)]
    session = {
        # This Python and its programs come first, then what the agent has.
        "PATH": own_programs_first(),
        "ZEROPODS_POD": address,
        FORKS_VARIABLE: str(folder / FORKS),
        **{name: os.environ.get(name) for name in ("LD_LIBRARY_PATH", *CML_VARIABLES)},
        # gloo would take the interface of the host's name, which on Debian is loopback.
        "GLOO_SOCKET_IFNAME": interface(address),
    }
    options = {
        "ListenAddress": address,
        "HostKey": f'"{folder / HOST_KEY}"',
        "AuthorizedKeysFile": f'"{folder / AUTHORIZED_KEYS}"'.replace("%", "%%"),
        "AllowUsers": account(),
        # One line, since sshd heeds only the first one.
        "SetEnv": " ".join(f'"{name}={value}"' for name, value in session.items() if value),
    }
    for port in ports:
        lines = [f"{name} {value}\n" for name, value in {**options, "Port": port}.items()]
        (folder / CONFIG).write_text("".join([*lines, SSHD_OPTIONS]), encoding="utf-8")
        process = subprocess.Popen(
            argv,
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGKILL),
        )
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None:
            if LISTENS in _said(folder):
                # Only now: one that ends before, since its port is taken, does not end the pod.
                return process, port
            if time.monotonic() > deadline:
                raise UserError(f"{address}: sshd said nothing in {START_SECONDS:.0f} s: {sshd_last_words(folder)}")
            await asyncio.sleep(PAUSE_SECONDS)
    raise UserError(f"{address}: sshd ended at its start: {sshd_last_words(folder)}")


def sshd_last_words(folder: Path) -> str:
    """The last line of the daemon's log that tells of an error, or else the last one."""
    lines = _said(folder).splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if "error:" in line or "fatal:" in line), lines[-1]).strip()


def _said(folder: Path) -> str:
    log = folder / LOG
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def account() -> str:
    """This user's name, the only one that may log in."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        line = f"user {os.geteuid()}: has no line in /etc/passwd, and sshd refuses users without one"
        raise UserError(line) from None
