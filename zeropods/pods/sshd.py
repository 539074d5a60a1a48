"""The pod's own ssh daemon: unprivileged, one port of one address, one key that may log in, nothing forwarded."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods.processes import end_with_parent
from zeropods.pods.this_pod import interface
from zeropods.programs import find_program, is_free, own_programs_first

HOST_KEY, AUTHORIZED_KEYS, CONFIG, LOG = "host_key", "authorized_keys", "sshd_config", "sshd.log"
RUN_FOLDER = Path("/run/sshd")
CML_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "CDSW_PROJECT")
"""What a session is told of its pod. Of CML's variables no other: `CDSW_API_KEY` is a secret."""
BANNER_SECONDS = 15.0
PAUSE_SECONDS = 0.05
KEYGEN_SECONDS = 30.0
FIXED = """\
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
LogLevel ERROR
PrintMotd no
PrintLastLog no
"""
"""What differs from sshd's own defaults: no PAM, no tunnel, no environment of the user's."""


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

    async def start(self, port: int, authorized_key: str) -> None:
        """Start it and wait for its banner; `UserError` if it is not installed or does not come up."""
        place = f"{self._address}:{port}"
        if not is_free(self._address, port):
            raise UserError(f"{place}: taken meanwhile by another process; start the cluster again")
        self._write(AUTHORIZED_KEYS, f"{authorized_key}\n")
        self._write(CONFIG, self._config(port))
        if os.geteuid() == 0:
            RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
        parent = os.getpid()
        # sshd starts itself again for each connection, elsewhere: all paths have to be absolute.
        self._process = subprocess.Popen(
            [find_sshd(), "-D", "-f", str(self._folder / CONFIG), "-E", str(self._folder / LOG)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGKILL),
        )
        deadline = time.monotonic() + BANNER_SECONDS
        while not await _has_banner(self._address, port):
            if self._process.poll() is not None:
                raise UserError(f"{place}: sshd ended at its start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise UserError(f"{place}: sshd said nothing in {BANNER_SECONDS:.0f} s: {self.last_words()}")
            await asyncio.sleep(PAUSE_SECONDS)

    def last_words(self) -> str:
        """The last line of its log."""
        with suppress(OSError, IndexError):
            return (self._folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")[-2].strip()
        return "it said nothing"

    def kill(self) -> None:
        """End the daemon; its sessions live on."""
        if self._process is not None:
            self._process.kill()

    def _config(self, port: int) -> str:
        environment = _session_environment(self._address)
        head = {
            "ListenAddress": self._address,
            "Port": str(port),
            "HostKey": _quoted(str(self._folder / HOST_KEY)),
            "AuthorizedKeysFile": _quoted(str(self._folder / AUTHORIZED_KEYS).replace("%", "%%")),
            "AllowUsers": account(),
            # One line, since sshd heeds only the first one.
            "SetEnv": " ".join(_quoted(f"{name}={value}") for name, value in environment.items()),
        }
        return "".join(f"{name} {value}\n" for name, value in head.items()) + FIXED

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)


def find_sshd() -> str:
    """Absolute path of the program."""
    found = find_program("sshd")
    if found is None:
        raise UserError("sshd: not found; install it on the pods (Debian: apt-get install openssh-server)")
    return os.path.abspath(found)


def account() -> str:
    """This user's name, the only one that may log in."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UserError(f"user {os.geteuid()}: has no line in /etc/passwd, and sshd refuses who has none") from None


def make_key(path: Path, comment: str) -> str:
    """Write a new ed25519 key without passphrase to `path` (mode 600), and its public half to `path`.pub.

    Args:
        comment: ends the public file's line; says whose key it is.

    Returns:
        The public key without its comment: `ssh-ed25519 AAAA...`.

    Raises:
        UserError: ssh-keygen is missing or fails, or `path` exists: a key is never overwritten.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path}: exists; a key is never overwritten: remove it, or choose another name")
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=KEYGEN_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError("ssh-keygen: not found; install it (Debian: apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"ssh-keygen: not done after {KEYGEN_SECONDS:.0f} s; is {path.parent} reachable?") from None
    if done.returncode != 0:
        said = " ".join((done.stderr + done.stdout).decode(errors="replace").split())
        raise UserError(f"{path}: ssh-keygen failed: {said or done.returncode}; is the folder there and writable?")
    return " ".join(path.with_name(f"{path.name}.pub").read_text(encoding="utf-8").split()[:2])


def _session_environment(address: str) -> dict[str, str]:
    """What every ssh session of this pod has: this Python and its programs come first, then what the agent has."""
    found = {"PATH": own_programs_first(os.environ.get("PATH")), "ZEROPODS_POD": address}
    kept = {name: os.environ.get(name) for name in ("LD_LIBRARY_PATH", *CML_VARIABLES)}
    # gloo would take the interface of the host's name, which on Debian is loopback.
    kept["GLOO_SOCKET_IFNAME"] = interface(address)
    return {**found, **{name: value for name, value in kept.items() if value}}


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        raise UserError(f"{text!r}: has characters that an sshd configuration cannot hold; choose another name")
    return f'"{text}"'


async def _has_banner(address: str, port: int) -> bool:
    with suppress(OSError):
        async with asyncio.timeout(BANNER_SECONDS):
            reader, writer = await asyncio.open_connection(address, port, limit=1024)
            try:
                return (await reader.read(4)).startswith(b"SSH-")
            finally:
                writer.close()
    return False
