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

KEYGEN_SECONDS = 30.0
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
    try:
        subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=KEYGEN_SECONDS, check=True
        )
    except subprocess.SubprocessError as error:
        said = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise UserError(f"{path}: ssh-keygen failed: {said}; is the folder there and writable?") from None
    return " ".join(path.with_name(f"{path.name}.pub").read_text(encoding="utf-8").split()[:2])


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
    head = "Host " + " ".join(addresses)
    return "\n".join([head, *(f"    {name} {value}" for name, value in options.items())]) + "\n"


def ssh_argv(ssh_config: Path | None, address: str, command: Sequence[str], **options: object) -> list[str]:
    """The argument list that runs `command` on a host, where a shell reads it as the same arguments.

    Args:
        ssh_config: None for the user's own configuration, in which `ALWAYS` still holds.
        options: more of ssh's options.
    """
    argv = ["ssh", "-T", *(() if ssh_config is None else ("-F", str(ssh_config)))]
    for name, value in {**ALWAYS, **options}.items():
        argv += ["-o", f"{name}={value}"]
    return [*argv, "--", address, shlex.join(command)]


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


class Sshd:
    """One daemon, a child of this process that the kernel kills with it.

    Args:
        folder: absolute, mode 700; holds the host key, and takes configuration and log.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None until it is started."""
        return None if self._process is None else self._process.pid

    async def start(self, ports: Sequence[int], authorized_key: str) -> int:
        """Start it on the first of these ports that nobody has, which is returned.

        `UserError` if it is not installed or does not come up.
        """
        (self._folder / AUTHORIZED_KEYS).write_text(f"{authorized_key}\n", encoding="utf-8")
        if os.geteuid() == 0:
            RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
        parent, [program] = os.getpid(), required_programs("sshd")
        # sshd starts itself again for each connection, elsewhere: all paths have to be absolute.
        argv = [os.path.abspath(program), "-D", "-f", str(self._folder / CONFIG), "-E", str(self._folder / LOG)]
        for port in ports:
            (self._folder / CONFIG).write_text(self._config(port), encoding="utf-8")
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(parent, signal.SIGKILL),
            )
            deadline = time.monotonic() + START_SECONDS
            while process.poll() is None:
                if LISTENS in self._said():
                    # Only now: one that ends before, since its port is taken, does not end the pod.
                    self._process = process
                    return port
                if time.monotonic() > deadline:
                    raise UserError(f"{self._address}: sshd said nothing in {START_SECONDS:.0f} s: {self.last_words()}")
                await asyncio.sleep(PAUSE_SECONDS)
        raise UserError(f"{self._address}: sshd ended at its start: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of its log that tells of an error, or else the last one."""
        lines = self._said().splitlines() or ["it said nothing"]
        return next((line for line in reversed(lines) if "error:" in line or "fatal:" in line), lines[-1]).strip()

    def _said(self) -> str:
        log = self._folder / LOG
        return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""

    def kill(self) -> None:
        """End the daemon; its sessions live on."""
        if self._process is not None:
            self._process.kill()

    def _config(self, port: int) -> str:
        # This Python and its programs come first, then what the agent has.
        found = {
            "PATH": own_programs_first(),
            "ZEROPODS_POD": self._address,
            FORKS_VARIABLE: str(self._folder / FORKS),
        }
        kept = {name: os.environ.get(name) for name in ("LD_LIBRARY_PATH", *CML_VARIABLES)}
        # gloo would take the interface of the host's name, which on Debian is loopback.
        kept["GLOO_SOCKET_IFNAME"] = interface(self._address)
        session = found | {name: value for name, value in kept.items() if value}
        head = {
            "ListenAddress": self._address,
            "Port": str(port),
            "HostKey": f'"{self._folder / HOST_KEY}"',
            "AuthorizedKeysFile": f'"{self._folder / AUTHORIZED_KEYS}"'.replace("%", "%%"),
            "AllowUsers": account(),
            # One line, since sshd heeds only the first one.
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in session.items()),
        }
        return "".join(f"{name} {value}\n" for name, value in head.items()) + SSHD_OPTIONS


def account() -> str:
    """This user's name, the only one that may log in."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UserError(
            f"user {os.geteuid()}: has no line in /etc/passwd, and sshd refuses users without one"
        ) from None
