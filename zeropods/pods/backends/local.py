"""Workers as processes of this machine: each has an address, a log and a session of its own."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import ROOT
from zeropods.pods.agent import ORDERS
from zeropods.pods.machine import this_machine
from zeropods.pods.processes import Process, end, find_process, is_alive
from zeropods.pods.ssh import account

SSH_PORT = 2222
"""Port on which CML's own sshd listens, and ours where it can."""
WORKER_SCRIPT = ROOT / "worker_p.py"
RECORDS, LOGS = "workers", "logs"
STOP_SECONDS = 15.0
"""Seconds from SIGTERM to SIGKILL: an agent takes up to 10 to end everything under it."""
MOST = 500
"""Largest number of pods on one machine: each takes a few processes and ports."""
CLOCK_SECONDS = 10.0
"""Largest shift, in seconds, of a process's start time when the clock is set."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: two calls of `up` with different settings mean two clusters."""

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
    """Path of the ssh configuration with which they are reached; None for the user's usual one."""
    gpus: tuple[str, ...] = ()
    """GPUs of each pod, as values of CUDA_VISIBLE_DEVICES; () where each sees the GPUs that there are."""


@dataclass(frozen=True)
class Worker:
    """A worker as its backend describes it now."""

    id: str
    has_ended: bool
    told: str
    """Which worker it is, what it does or how it ended, and what it said or where to read that."""


@dataclass(frozen=True)
class Place:
    """Where and how a process of this machine starts an agent."""

    address: str
    slots: int | None
    """Number of slots; None for one per GPU, at least 1."""
    user: str = field(default_factory=account)
    """The account under which the pod runs."""
    gpus: str | None = None
    """The pod's GPUs, as a value of CUDA_VISIBLE_DEVICES; None for those that it sees."""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Arguments before and after the agent's command."""


@dataclass(frozen=True)
class WorkerProcess:
    """A worker's record on disk, by which any process of this user on its machine can find its process again later."""

    id: str
    address: str
    pid: int
    started: float
    """Start time of the process, in seconds since 1970."""
    machine: str | None = None
    """Id of the machine on which it runs; None in a record of an earlier version."""

    def find(self) -> Process | None:
        """The process; None where it has ended, and on any other machine than its own."""
        if self.machine not in (None, this_machine().id):
            # A process of this machine may have the same id, and sessions that start together the same start time.
            return None
        process = find_process(self.pid)
        if process is None or not is_alive(process) or abs(process.create_time() - self.started) > CLOCK_SECONDS:
            return None
        return process


class LocalWorkers:
    """The workers of one cluster. Other backends are subclasses of this one.

    Args:
        folder: the cluster's folder; it holds a record and a log for each worker.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.failure: str | None = None
        """Why `start` could not create a worker; None where it has created all."""
        self._popens: dict[str, subprocess.Popen[bytes]] = {}

    def master_address(self) -> str:
        """Address at which pods reach the process that starts them."""
        return "127.0.0.1"

    @cached_property
    def places(self) -> Sequence[Place]:
        """One place per worker, from 127.A.B.1 on; A and B are random, so that other clusters have others."""
        if self.settings.count > MOST:
            raise UserError(f"--count {self.settings.count}; expected at most {MOST} pods on a machine")
        drawn = random.SystemRandom().randrange(1 << 8, (1 << 16) - (1 << 8))
        first = IPv4Address(f"127.{drawn >> 8}.{drawn & 255}.1")
        slots = self.settings.slots
        return [Place(str(first + number), slots, gpus=self.gpus_of(number)) for number in range(self.settings.count)]

    def gpus_of(self, number: int) -> str | None:
        """GPUs of the pod with this number, counted from 0, as `Place.gpus`."""
        return self.settings.gpus[number] if self.settings.gpus else None

    def start(self, orders: Mapping[str, Any]) -> tuple[str, ...]:
        """Start an agent on each worker, with the fields of `Orders` that it needs; return the workers' ids.

        Where a worker could not be created, `failure` says why, and the ids are those of the others.

        The workers here are processes of this machine; their cores and memory are not limited.
        """
        # Only this user can read what is in a cluster's folder.
        (self.folder / LOGS).mkdir(exist_ok=True)
        for place in self.places:
            worker = secrets.token_hex(8)
            told = {
                ORDERS: json.dumps({**orders, "slots": place.slots, "gpus": place.gpus}),
                "CDSW_IP_ADDRESS": place.address,
                "CDSW_ENGINE_ID": worker,
                "CDSW_MASTER_IP": self.master_address(),
            }
            with open(self._log(worker), "ab") as log:
                popen = subprocess.Popen(
                    [*place.before, sys.executable, str(WORKER_SCRIPT), *place.after],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd=ROOT,
                    env={**os.environ, **told},
                )
            self._popens[worker] = popen
            # It has not been reaped yet, so its pid is still its own.
            began = Process(popen.pid).create_time()
            record = WorkerProcess(worker, place.address, popen.pid, began, this_machine().id)
            files.write_json(self.folder / RECORDS / f"{worker}.json", asdict(record))
        return tuple(self._popens)

    def list(self) -> Sequence[Worker]:
        """All workers of the cluster, as they are now."""
        found = []
        for each in self.processes():
            has_ended, state, popen = each.find() is None, "is running", self._popens.get(each.id)
            if has_ended:
                # The exit code of a worker that another process started is not known.
                state = "has ended (exit code unknown)" if popen is None else f"ended with exit code {popen.poll()}"
            said = self._log(each.id).read_text(encoding="utf-8", errors="replace").split("\n")
            last = next(
                (f"its last line: {line.strip()}" for line in reversed(said) if line.strip()), "it wrote nothing"
            )
            found.append(Worker(each.id, has_ended, f"worker {each.id} ({each.address}) {state}; {last}"))
        return found

    def stop(self, ids: Sequence[str]) -> None:
        """End the workers with these ids and all that are processes of this machine, and wait until these are gone."""
        end(lambda: filter(None, (each.find() for each in self.processes())), STOP_SECONDS)
        for popen in self._popens.values():
            popen.poll()

    def processes(self) -> Sequence[WorkerProcess]:
        """The workers that were started as processes of this machine, whether they run or not."""
        found = sorted((self.folder / RECORDS).glob("*.json"))
        return [WorkerProcess(**json.loads(path.read_text(encoding="utf-8"))) for path in found]

    def _log(self, worker: str) -> Path:
        return self.folder / LOGS / f"{worker}.log"
