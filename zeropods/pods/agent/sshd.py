"""The pod's own ssh daemon: unprivileged, one port of one address, one key that may log in, nothing forwarded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from zeropods.errors import UserError
from zeropods.pods.agent.sshd_config import AUTHORIZED_KEYS, config_text, session_environment
from zeropods.pods.agent.subreaper import end_with_parent
from zeropods.ports import is_free

EXTRA_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Where sshd is installed, and an ordinary user's PATH does not look."""
BANNER_SECONDS = 15.0
PAUSE_SECONDS = 0.05
CONFIG, LOG = "sshd_config", "sshd.log"
RUN_FOLDER = Path("/run/sshd")


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
        if not is_free(self._address, port):
            raise UserError(f"{self._address}:{port}: taken meanwhile by another process; start the cluster again")
        program = find_sshd()
        environment = session_environment(self._address)
        self._write(AUTHORIZED_KEYS, f"{authorized_key}\n")
        self._write(CONFIG, config_text(self._folder, self._address, port, environment))
        if os.geteuid() == 0:
            RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
        self._process = self._spawn(program)
        await self._await_banner(port)

    def last_words(self) -> str:
        """The last line of its log."""
        with suppress(OSError, IndexError):
            return (self._folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")[-2].strip()
        return "it said nothing"

    def kill(self) -> None:
        """End the daemon; its sessions live on."""
        if self._process is not None:
            self._process.kill()

    def _spawn(self, program: str) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        # sshd starts itself again for each connection, elsewhere: both paths have to be absolute.
        argv = [program, "-D", "-f", str(self._folder / CONFIG), "-E", str(self._folder / LOG)]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGKILL),
        )

    async def _await_banner(self, port: int) -> None:
        assert self._process is not None
        place = f"{self._address}:{port}"
        deadline = time.monotonic() + BANNER_SECONDS
        while True:
            answers = await _has_banner(self._address, port)
            if self._process.poll() is not None:
                raise UserError(f"{place}: sshd ended at its start: {self.last_words()}")
            if answers:
                return
            if time.monotonic() > deadline:
                raise UserError(f"{place}: sshd said nothing in {BANNER_SECONDS:.0f} s: {self.last_words()}")
            await asyncio.sleep(PAUSE_SECONDS)

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)


def find_sshd() -> str:
    """Absolute path of the program."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *EXTRA_FOLDERS])
    found = shutil.which("sshd", path=path)
    if found is None:
        raise UserError("sshd: not found; install it on the pods (Debian: apt-get install openssh-server)")
    return os.path.abspath(found)


async def _has_banner(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(BANNER_SECONDS):
            reader, writer = await asyncio.open_connection(address, port, limit=1024)
            try:
                return (await reader.read(4)).startswith(b"SSH-")
            finally:
                writer.close()
    except OSError:
        return False
