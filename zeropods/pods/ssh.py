"""ssh: keys, client configuration, and each pod's own unprivileged daemon, which accepts one key
and forwards nothing.

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

OUTPUT_SECONDS = 30.0
"""Seconds that a program such as ssh-keygen has for its work."""
CONNECT_SECONDS = 2
ALIVE_SECONDS = 2
ALIVE_MISSES = 3
"""Number of keep-alive messages without an answer that end a connection: a peer that is cut off
ends it after `ALIVE_SECONDS` x `ALIVE_MISSES`; without this it would never end."""
ALWAYS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "StrictHostKeyChecking": "yes",
    "ControlMaster": "no",
    "LogLevel": "ERROR",
}
"""Options of every connection, with our own configuration or the user's: ask nothing, trust no
unknown key."""
PINNED = {
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "GlobalKnownHostsFile": "/dev/null",
    "ServerAliveInterval": str(ALIVE_SECONDS),
    "ServerAliveCountMax": str(ALIVE_MISSES),
}
"""Options that keep the user's own agent and known hosts out of a cluster; -F keeps out any other
configuration."""
SSH_FAILED = 255
"""ssh's own exit status where the connection failed."""
HOST_KEY = "host_key"
AUTHORIZED_KEYS = "authorized_keys"
SSHD_CONFIG = "sshd_config"
SSHD_LOG = "sshd.log"
FORKS = "forks"
"""Name of the socket of the pod's fork server, in the same folder."""
RUN_FOLDER = Path("/run/sshd")
"""Folder without which sshd, built as Debian does, does not start for root."""
CML_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "CDSW_PROJECT")
"""CML's variables that an ssh session on a pod gets, and no others of CML's: `CDSW_API_KEY` is a
secret."""
SSHD_START_SECONDS = 15.0
LISTENS = "Server listening"
"""Part of the line in sshd's log that says that it listens."""
SSHD_PAUSE_SECONDS = 0.05
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
"""Options that differ from sshd's own defaults; there is no PAM, no tunnel and no environment of
the user's."""


# Keys


def make_key(path: Path, comment: str) -> str:
    """Write a new ed25519 key without passphrase to `path` (mode 600), and its public half to
    `path`.pub.

    Args:
        comment: text at the end of the public file's line, which says whose key it is.

    Returns:
        The public key without its comment: `ssh-ed25519 AAAA...`.

    Raises:
        UserError: ssh-keygen is missing or fails; it does not overwrite a key.
    """
    argv = [*required_programs("ssh-keygen"), "-q", "-t", "ed25519"]
    argv += ["-N", "", "-C", comment, "-f", str(path)]
    output_of(argv, f"{path}: ssh-keygen failed", "is the folder there and writable?")
    public_key = path.with_name(f"{path.name}.pub").read_text(encoding="utf-8")
    kind, key = public_key.split()[:2]
    return f"{kind} {key}"


def output_of(argv: Sequence[str], fault: str, remedy: str) -> str:
    """Run a program and return what it prints; `UserError` where it fails or takes too long.

    Args:
        fault: how the error begins, which then says what the program wrote to stderr.
        remedy: how the error ends.
    """
    try:
        completed = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=OUTPUT_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        # Without stderr, as after the time limit, the error itself says what happened.
        complaint = str(getattr(error, "stderr", None) or error)
        reason = " ".join(complaint.split())
        raise UserError(f"{fault}: {reason}; {remedy}") from None
    return completed.stdout


# The client


def known_hosts_text(entries: Iterable[tuple[str, int, str]]) -> str:
    """Text of `known_hosts` with a line for each entry: address, port, which is not 22, and public
    key `ssh-ed25519 AAAA...`. A host may have several."""
    return "".join(f"[{address}]:{port} {key}\n" for address, port, key in entries)


def ssh_config_text(
    addresses: Iterable[str], port: int, key: Path, known_hosts: Path, user: str
) -> str:
    """One `Host` block for pods of the cluster; it does not affect other hosts.

    Args:
        key: path of the private key. Neither this path nor that of `known_hosts` is quoted, so both
            consist of the characters that `pdsh_ssh_arguments` accepts.
        user: account on the pods.
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
    lines = [f"Host {' '.join(addresses)}\n"]
    lines += [f"    {name} {value}\n" for name, value in options.items()]
    return "".join(lines)


def ssh_argv(
    ssh_config: Path | None, address: str, command: Sequence[str], **options: object
) -> list[str]:
    """The argument list that runs `command` on a host; it is quoted, so that the host's shell takes
    it apart into the same arguments.

    Args:
        ssh_config: None for the user's own configuration, to which `ALWAYS` still applies.
        options: further ssh options, which take precedence over `ALWAYS`.
    """
    argv = ["ssh", "-T"]
    if ssh_config is not None:
        argv += ["-F", str(ssh_config)]
    for name, value in {**ALWAYS, **options}.items():
        argv += ["-o", f"{name}={value}"]
    return [*argv, "--", address, shlex.join(command)]


def pdsh_ssh_arguments(ssh_config: Path) -> str:
    """Value of `PDSH_SSH_ARGS_APPEND` with which pdsh's ssh reads this configuration.

    pdsh splits at blanks, does not know quotes, and expands %h and the like (tried with 2.34); ssh
    expands others.

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
    """Start a daemon and wait until it listens. It is a child of this process, and the kernel kills
    it when this process ends.

    Args:
        folder: absolute path of a folder of mode 700 that holds the host key; configuration and log
            are written there.
        address: address of the pod, at which it listens.
        ports: ports to try; the first free one is taken.
        authorized_key: public key that may log in.

    Returns:
        The daemon and its port.

    Raises:
        UserError: sshd is not installed or does not come up.
    """
    (folder / AUTHORIZED_KEYS).write_text(f"{authorized_key}\n", encoding="utf-8")
    if os.geteuid() == 0:
        RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
    [program] = required_programs("sshd")
    # sshd executes itself again for each connection, in another folder: all paths have to be
    # absolute.
    argv = [os.path.abspath(program), "-D"]
    argv += ["-f", str(folder / SSHD_CONFIG), "-E", str(folder / SSHD_LOG)]
    options = _sshd_options(folder, address)
    parent = os.getpid()
    for port in ports:
        lines = [f"{name} {value}\n" for name, value in options.items()]
        config = "".join([*lines, f"Port {port}\n", SSHD_OPTIONS])
        (folder / SSHD_CONFIG).write_text(config, encoding="utf-8")
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGKILL),
        )
        # Returned only when it listens: a daemon that ends earlier, because its port is taken, must
        # not end the pod.
        if await _wait_until_it_listens(process, folder, address):
            return process, port
    reason = "sshd ended as soon as it was started"
    raise UserError(f"{address}: {reason}: {sshd_last_words(folder)}")


def _sshd_options(folder: Path, address: str) -> dict[str, str]:
    """The options of a daemon that depend on its pod, but for the port."""
    variables = session_variables(folder, address)
    return {
        "ListenAddress": address,
        "HostKey": f'"{folder / HOST_KEY}"',
        # In this option sshd would expand %h and the like.
        "AuthorizedKeysFile": f'"{folder / AUTHORIZED_KEYS}"'.replace("%", "%%"),
        "AllowUsers": account(),
        # All on one line, since sshd heeds only the first `SetEnv`.
        "SetEnv": " ".join(f'"{name}={value}"' for name, value in variables.items()),
    }


def session_variables(folder: Path, address: str) -> dict[str, str]:
    """The environment variables that each session on a pod gets, and each program that its agent
    starts for the master.

    Args:
        folder: the private folder of the pod.
    """
    variables: dict[str, str | None] = {
        # This Python and its programs come first, then the agent's own PATH.
        "PATH": own_programs_first(),
        "ZEROPODS_POD": address,
        FORKS_VARIABLE: str(folder / FORKS),
    }
    for name in ("LD_LIBRARY_PATH", *CML_VARIABLES):
        variables[name] = os.environ.get(name) or None
    # Sessions see the GPUs that the agent sees, also where it sees none because the value is empty.
    variables[VISIBLE] = os.environ.get(VISIBLE)
    variables[POD_GPUS] = os.environ.get(VISIBLE)
    # gloo would take the interface that the host name resolves to, which on Debian is loopback.
    variables["GLOO_SOCKET_IFNAME"] = interface(address)
    return {name: value for name, value in variables.items() if value is not None}


async def _wait_until_it_listens(
    process: subprocess.Popen[bytes], folder: Path, address: str
) -> bool:
    """Wait until a daemon listens, and return whether it does; it does not where it has ended,
    because its port is taken. `UserError` where it has done neither after `SSHD_START_SECONDS`."""
    deadline = time.monotonic() + SSHD_START_SECONDS
    while process.poll() is None:
        if LISTENS in _log(folder):
            return True
        if time.monotonic() > deadline:
            reason = f"sshd not listening after {SSHD_START_SECONDS:.0f} s"
            raise UserError(f"{address}: {reason}: {sshd_last_words(folder)}")
        await asyncio.sleep(SSHD_PAUSE_SECONDS)
    return False


def sshd_last_words(folder: Path) -> str:
    """The last line of the daemon's log that reports an error, else the last line."""
    lines = _log(folder).splitlines() or ["it logged nothing"]
    errors = [line for line in lines if "error:" in line or "fatal:" in line]
    last = errors[-1] if errors else lines[-1]
    return last.strip()


def _log(folder: Path) -> str:
    """What the daemon has logged; nothing where it has written no log yet."""
    log = folder / SSHD_LOG
    if not log.is_file():
        return ""
    return log.read_text(encoding="utf-8", errors="replace")


def has_account() -> bool:
    """Whether this user has an account, without which sshd lets nobody in."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def account() -> str:
    """Name of this user's account, the only one that may log in; `UserError` where the user has
    none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        line = f"user {os.geteuid()}: is not in /etc/passwd, and sshd refuses such users"
        raise UserError(line) from None
