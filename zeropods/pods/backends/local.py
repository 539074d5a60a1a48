"""Workers as processes of this machine: each has an address, a log and a session of its own."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import ROOT
from zeropods.pods.agent import ORDERS
from zeropods.pods.processes import Process, end, find_process, is_alive
from zeropods.pods.ssh import account

SSH_PORT = 2222
"""Where CML's own sshd listens, and ours where it can."""
WORKER_SCRIPT = ROOT / "worker_p.py"
RECORDS, LOGS = "workers", "logs"
STOP_SECONDS = 15.0
"""Time from SIGTERM to SIGKILL: an agent takes up to 10 to end everything under it."""
MOST, PODS_OF_A_SUBNET = 500, 250
"""Pods on one machine: each is a few processes and ports."""
CLOCK_SECONDS = 10.0
"""By so much the start of a process moves at most when the clock is set."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: two calls of `up` that differ in it mean two clusters."""

    count: int
    slots: int | None
    backend: str
    lease: str
    lease_seconds: float
    cpu: float
    memory: float
    nvidia_gpu: int
    hosts: tuple[str, ...] = ()
    """Lines of the user's hostfile, where the hosts are the user's own."""
    ssh_config: str | None = None
    """The ssh configuration by which they are reached; None for the user's usual one."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker as its backend describes it now."""

    id: str
    status: str
    """The backend's word, in small letters."""
    has_ended: bool
    address: str = ""
    exit_code: int | None = None
    """The worker's exit code; None where it is not known because another process started it."""
    last_line: str = ""
    """The last line of its log, where that can be read from here."""
    app_url: str = ""
    reason: str = ""
    """Why it waits, where the backend says that."""

    @property
    def is_pending(self) -> bool:
        """Whether it has still to start."""
        return not self.has_ended and self.status != "running"


@dataclass(frozen=True)
class WorkerProcess:
    """A worker on disk: how its process is known again later, by any process of this user."""

    id: str
    address: str
    pid: int
    started: float
    """Start of the process, in seconds since 1970."""

    def find(self) -> Process | None:
        """The process; None where it has ended."""
        process = find_process(self.pid)
        if process is None or not is_alive(process) or abs(process.create_time() - self.started) > CLOCK_SECONDS:
            return None
        return process


class LocalWorkers:
    """The workers of one cluster. Other backends are variations of this one.

    Args:
        folder: the cluster's; holds a record and a log for each worker.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self._popens: dict[str, subprocess.Popen[bytes]] = {}

    def master_address(self) -> str:
        """Where pods reach the process that starts them."""
        return "127.0.0.1"

    def user(self, address: str) -> str:
        """The account under which the pod at an address runs."""
        return account()

    def claim(self) -> Sequence[str]:
        """Addresses of the pods here, 127.A.B.1 and so on; A and B are drawn, so that other clusters have others."""
        n = self.settings.count
        if n > MOST:
            raise UserError(f"--count {n}; expected at most {MOST} pods on a machine")
        first = random.SystemRandom().randrange(1 << 8, 1 << 16)
        subnets = (number % (1 << 16) for number in range(first, first + 1 + n // PODS_OF_A_SUBNET))
        hosts = (f"127.{net >> 8}.{net & 255}.{host}" for net in subnets for host in range(1, PODS_OF_A_SUBNET + 1))
        return list(islice(hosts, n))

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run at an address."""
        return argv

    def slots(self, address: str) -> int | None:
        """Processes of the pod at an address; None for as many as it has GPUs."""
        return self.settings.slots

    def start(self, orders: Mapping[str, Any]) -> tuple[str, ...]:
        """Start an agent on each worker, told by the fields of `Orders` what it needs; returns their ids.

        Those here are processes of this machine, whose cores, memory and GPUs are not limited.
        """
        seconds, began, ids, there = orders["register_seconds"], time.monotonic(), list[str](), self.claim()
        for address in there:
            if time.monotonic() - began > seconds:
                said = f"{len(ids)} of {len(there)} pods were started in {seconds:g} s"
                raise UserError(f"{said}; give them more --seconds")
            ids.append(self._start(address, {**orders, "slots": self.slots(address)}))
        return tuple(ids)

    def list(self) -> Sequence[Worker]:
        """All workers."""
        return [self._described(each) for each in self.processes()]

    def stop(self, ids: Sequence[str]) -> None:
        """End the workers with these ids, and all that are processes of this machine; then they are gone."""
        end(lambda: filter(None, (each.find() for each in self.processes())), STOP_SECONDS)
        for popen in self._popens.values():
            popen.poll()

    def processes(self) -> Sequence[WorkerProcess]:
        """The workers that were started as processes of this machine, whether they run or not."""
        found = sorted((self.folder / RECORDS).glob("*.json"))
        return [WorkerProcess(**json.loads(path.read_text(encoding="utf-8"))) for path in found]

    def _start(self, address: str, orders: Mapping[str, Any]) -> str:
        worker = secrets.token_hex(8)
        place = {"CDSW_IP_ADDRESS": address, "CDSW_ENGINE_ID": worker, "CDSW_MASTER_IP": self.master_address()}
        # Nobody else can read what lies in a cluster's folder.
        self._log(worker).parent.mkdir(exist_ok=True)
        with open(self._log(worker), "ab") as log:
            popen = subprocess.Popen(
                self.command(address, [sys.executable, str(WORKER_SCRIPT)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, ORDERS: json.dumps(orders), **place},
            )
        self._popens[worker] = popen
        # Not reaped yet, so that its number is still its own.
        record = WorkerProcess(worker, address, popen.pid, Process(popen.pid).create_time())
        files.write_json(self.folder / RECORDS / f"{worker}.json", asdict(record))
        return worker

    def _described(self, worker: WorkerProcess) -> Worker:
        running = worker.find() is not None
        popen = self._popens.get(worker.id)
        said = self._log(worker.id).read_text(encoding="utf-8", errors="replace").split("\n")
        return Worker(
            id=worker.id,
            status="running" if running else "stopped",
            has_ended=not running,
            address=worker.address,
            exit_code=None if running or popen is None else popen.poll(),
            last_line=next((line.strip() for line in reversed(said) if line.strip()), ""),
        )

    def _log(self, worker: str) -> Path:
        return self.folder / LOGS / f"{worker}.log"
