"""ssh: keys, client configuration, and each pod's own unprivileged daemon, which accepts one key and forwards nothing.

pdsh's ssh and plain ssh share one configuration, in which the host keys of all pods are pinned.
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
from zeropods.pods.gpus import POD_GPUS, VISIBLE
from zeropods.pods.hostfile import interface
from zeropods.pods.processes import FORKS_VARIABLE
from zeropods.programs import end_with_parent, own_programs_first, required_programs

SAID_SECONDS = 30.0
CONNECT_SECONDS = 2
ALIVE_SECONDS = 2
ALIVE_MISSES = 3
"""Number of keep-alive messages without an answer that end a connection: a peer that is cut off ends it after
`ALIVE_SECONDS` x `ALIVE_MISSES`; without this it would never end."""
ALWAYS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "StrictHostKeyChecking": "yes",
    "ControlMaster": "no",
    "LogLevel": "ERROR",
}
"""Options of every connection, with our own configuration or the user's: ask nothing, trust no unknown key."""
PINNED = {
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "GlobalKnownHostsFile": "/dev/null",
    "ServerAliveInterval": str(ALIVE_SECONDS),
    "ServerAliveCountMax": str(ALIVE_MISSES),
}
"""Options that keep the user's own agent and known hosts out of a cluster; -F keeps out any other configuration."""
HOST_KEY, AUTHORIZED_KEYS, CONFIG, LOG = "host_key", "authorized_keys", "sshd_config", "sshd.log"
FORKS = "forks"
"""Name of the socket of the pod's fork server, in the same folder."""
RUN_FOLDER = Path("/run/sshd")
CML_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "CDSW_PROJECT")
"""CML's variables that an ssh session on a pod gets, and no others of CML's: `CDSW_API_KEY` is a secret."""
START_SECONDS = 15.0
LISTENS = "Server listening"
"""Part of the line in sshd's log that says that it listens."""
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
"""Options that differ from sshd's own defaults; there is no PAM, no tunnel and no environment of the user's."""


# Keys


def make_key(path: Path, comment: str) -> str:
    """Write a new ed25519 key without passphrase to `path` (mode 600), and its public half to `path`.pub.

    Args:
        comment: text at the end of the public file's line, which says whose key it is.

    Returns:
        The public key without its comment: `ssh-ed25519 AAAA...`.

    Raises:
        UserError: ssh-keygen is missing or fails; it does not overwrite a key.
    """
    argv = [*required_programs("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    said_by(argv, f"{path}: ssh-keygen failed", "is the folder there and writable?")
    return " ".join(path.with_name(f"{path.name}.pub").read_text(encoding="utf-8").split()[:2])


def said_by(argv: Sequence[str], place: str, remedy: str) -> str:
    """Run a program and return what it prints; `UserError` with its complaint where it fails or takes too long."""
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(argv, stdin=nothing, capture_output=True, text=True, timeout=SAID_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise UserError(f"{place}: {reason}; {remedy}") from None
    return done.stdout


# The client


def known_hosts_text(entries: Iterable[tuple[str, int, str]]) -> str:
    """Text of `known_hosts` from (address, port other than 22, key `ssh-ed25519 AAAA...`); a host may have several."""
    return "".join(f"[{address}]:{port} {key}\n" for address, port, key in entries)


def ssh_config_text(addresses: Iterable[str], port: int, key: Path, known_hosts: Path, user: str) -> str:
    """One `Host` block for pods of the cluster; it does not affect other hosts.

    Args:
        key, known_hosts: paths in a folder that `pdsh_ssh_arguments` has accepted.
    """
    options = {
        # The name of a domain account contains a backslash.
        "User": '"' + user.replace("\\", "\\\\") + '"',
        "Port": str(port),
        "IdentityFile": str(key),
        "UserKnownHostsFile": str(known_hosts),
        **ALWAYS,
        **PINNED,
    }
    return "".join([f"Host {' '.join(addresses)}\n", *(f"    {name} {value}\n" for name, value in options.items())])


def ssh_argv(ssh_config: Path | None, address: str, command: Sequence[str], **options: object) -> list[str]:
    """The argument list that runs `command` on a host, whose shell reads it as the same arguments.

    Args:
        ssh_config: None for the user's own configuration, to which `ALWAYS` still applies.
        options: further ssh options.
    """
    chosen = () if ssh_config is None else ("-F", str(ssh_config))
    given = (word for name, value in {**ALWAYS, **options}.items() for word in ("-o", f"{name}={value}"))
    return ["ssh", "-T", *chosen, *given, "--", address, shlex.join(command)]


def pdsh_ssh_arguments(ssh_config: Path) -> str:
    """Value of `PDSH_SSH_ARGS_APPEND` with which pdsh's ssh reads this configuration.

    pdsh splits at blanks, does not know quotes, and expands %h and the like (tried with 2.34); ssh expands others.

    Raises:
        UserError: the path holds such characters.
    """
    path = str(ssh_config.absolute())
    if not PLAIN.fullmatch(path):
        remedy = "set ZEROPODS_HOME to a folder of letters, digits and . _ - / only"
        raise UserError(f"{path}: pdsh cannot handle this path; {remedy}")
    return f"-F {path}"


# The daemon


async def start_sshd(
    folder: Path, address: str, ports: Sequence[int], authorized_key: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a daemon, a child of this process that the kernel kills when this process ends; return it and its port.

    Args:
        folder: absolute path of a folder of mode 700 that holds the host key; configuration and log are written there.
        ports: ports to try; the first free one is taken.

    Raises:
        UserError: sshd is not installed or does not come up.
    """
    (folder / AUTHORIZED_KEYS).write_text(f"{authorized_key}\n", encoding="utf-8")
    if os.geteuid() == 0:
        RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
    parent, nothing, [program] = os.getpid(), subprocess.DEVNULL, required_programs("sshd")
    # sshd executes itself again for each connection, in another folder: all paths have to be absolute.
    argv = [os.path.abspath(program), "-D", "-f", str(folder / CONFIG), "-E", str(folder / LOG)]
    session = {
        # This Python and its programs come first, then the agent's own PATH.
        "PATH": own_programs_first(),
        "ZEROPODS_POD": address,
        FORKS_VARIABLE: str(folder / FORKS),
        **{name: os.environ.get(name) or None for name in ("LD_LIBRARY_PATH", *CML_VARIABLES)},
        # Sessions see the GPUs that the agent sees, also where it sees none because the value is empty.
        VISIBLE: os.environ.get(VISIBLE),
        POD_GPUS: os.environ.get(VISIBLE),
        # gloo would take the interface that the host name resolves to, which on Debian is loopback.
        "GLOO_SOCKET_IFNAME": interface(address),
    }
    options = {
        "ListenAddress": address,
        "HostKey": f'"{folder / HOST_KEY}"',
        "AuthorizedKeysFile": f'"{folder / AUTHORIZED_KEYS}"'.replace("%", "%%"),
        "AllowUsers": account(),
        # One line, since sshd heeds only the first one.
        "SetEnv": " ".join(f'"{name}={value}"' for name, value in session.items() if value is not None),
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
                # Returned only now: a daemon that ends earlier, because its port is taken, must not end the pod.
                return process, port
            if time.monotonic() > deadline:
                raise UserError(f"{address}: sshd not listening after {START_SECONDS:.0f} s: {sshd_last_words(folder)}")
            await asyncio.sleep(PAUSE_SECONDS)
    raise UserError(f"{address}: sshd ended as soon as it was started: {sshd_last_words(folder)}")


def sshd_last_words(folder: Path) -> str:
    """The last line of the daemon's log that reports an error, else the last line."""
    lines = _said(folder).splitlines() or ["it logged nothing"]
    return next((line for line in reversed(lines) if "error:" in line or "fatal:" in line), lines[-1]).strip()


def _said(folder: Path) -> str:
    log = folder / LOG
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def account() -> str:
    """Name of this user's account, the only one that may log in."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        line = f"user {os.geteuid()}: is not in /etc/passwd, and sshd refuses such users"
        raise UserError(line) from None
