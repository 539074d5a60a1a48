"""One real pod for a test: warden, agent and sshd on a loopback address of its own, and their master."""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.full.launches import ROOT, until
from zeropods.pods.processes import PROC, Process, descendants, find_process, is_alive, send
from zeropods.pods.rendezvous import Rendezvous
from zeropods.pods.ssh import account, known_hosts_text, make_key, ssh_argv, ssh_config_text
from zeropods.pods.wire import WireError, ask_all
from zeropods.programs import free_port

WAIT_SECONDS = 30.0


class OnePod:
    """A pod that is up when this is made.

    Args:
        argv: the command that starts the worker.
        user: whose account logs in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lease: str = "idle",
        lease_seconds: float = 600.0,
        argv: Sequence[str] = (sys.executable, str(ROOT / "worker_p.py")),
        user: str | None = None,
    ) -> None:
        self.address = f"127.{random.randint(2, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"
        self.secret = secrets.token_bytes(32)
        self.log = folder / "worker.log"
        self._folder = folder
        lease_variables = {"ZEROPODS_LEASE": lease, "ZEROPODS_LEASE_SECONDS": str(lease_seconds)}
        with Rendezvous(secret=self.secret, count=1, address="127.0.0.1", port=None) as rendezvous:
            self.warden = self._start(argv, rendezvous.port, lease_variables)
            try:
                (self.registration,) = rendezvous.gather(WAIT_SECONDS, self._check_alive)
            except BaseException:
                self.clean_up()
                raise
        self.ssh_port = self.registration.ssh_port
        hosts = known_hosts_text([(self.address, self.ssh_port, self.registration.host_key)])
        (folder / "known_hosts").write_text(hosts)
        keys = (folder / "id_ed25519", folder / "known_hosts")
        (folder / "ssh_config").write_text(ssh_config_text([self.address], self.ssh_port, *keys, user or account()))

    @property
    def agent(self) -> Process:
        """The agent: the warden's only child."""
        (agent,) = Process(self.warden.pid).children()
        return agent

    @property
    def sshd(self) -> Process:
        """The agent's own daemon."""
        return next(child for child in self.agent.children() if child.name() == "sshd")

    @property
    def temporary(self) -> Path:
        """The folder of sshd's files."""
        # sshd writes its title over its arguments: they may end in blanks or in zeros.
        title = (PROC / str(self.sshd.pid) / "cmdline").read_bytes().decode()
        found = re.search(r"-f\W(\S+)/sshd_config", title)
        assert found, title
        return Path(found[1])

    def ask(self, **request: Any) -> dict[str, Any]:
        """The agent's answer; raises its `WireError`."""
        place = (self.address, self.registration.control_port)
        (answer,) = ask_all([place], self.secret, request, WAIT_SECONDS)
        if isinstance(answer, WireError):
            raise answer
        return answer

    def ssh_argv(self, command: str) -> list[str]:
        """The command line that lets the pod's shell run `command`."""
        return [*ssh_argv(self._folder / "ssh_config", self.address, [])[:-1], command]

    def ssh(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the pod to its end."""
        return subprocess.run(self.ssh_argv(command), capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)

    def ssh_session(self, command: str) -> subprocess.Popen[bytes]:
        """A shell command on the pod that goes on."""
        return subprocess.Popen(
            self.ssh_argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def processes(self) -> set[Process]:
        """Everything of this pod: below the warden, or with this pod's address in its environment."""
        return set(descendants(self.warden.pid)) | {
            process for process in psutil.process_iter() if self._is_ours(process)
        }

    def said(self) -> str:
        """What warden and agent have printed."""
        return self.log.read_text(encoding="utf-8")

    def clean_up(self) -> None:
        """End whatever a test has left of the pod."""
        with suppress(subprocess.TimeoutExpired):
            self.warden.terminate()
            self.warden.wait(WAIT_SECONDS)
        self.warden.kill()
        for process in self.processes():
            send(process, signal.SIGKILL)
        self.warden.wait(WAIT_SECONDS)

    def _start(self, argv: Sequence[str], port: int, lease: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **lease,
            "ZEROPODS_MASTER": f"127.0.0.1:{port}",
            "ZEROPODS_SECRET": self.secret.hex(),
            "ZEROPODS_SSH_PORTS": f"2222,{free_port(self.address)}",
            "ZEROPODS_AUTHORIZED_KEY": make_key(self._folder / "id_ed25519", "test"),
            "ZEROPODS_SLOTS": "1",
            "ZEROPODS_REGISTER_SECONDS": str(WAIT_SECONDS),
            "CDSW_IP_ADDRESS": self.address,
            "CDSW_ENGINE_ID": "worker-1",
        }
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _check_alive(self, _: frozenset[str]) -> None:
        assert self.warden.poll() is None, self.said()

    def _is_ours(self, process: Process) -> bool:
        try:
            return self.address.encode() in (PROC / str(process.pid) / "environ").read_bytes()
        except OSError:
            return False


def all_gone(processes: set[Process]) -> bool:
    """Whether none of them is there any more."""
    return not any(map(is_alive, processes))


def process_in(file: Path) -> Process:
    """The process that has written its number into a file, once it has."""
    until(lambda: file.is_file() and file.read_text().strip())
    process = find_process(int(file.read_text()))
    assert process is not None, "it has ended already"
    return process
