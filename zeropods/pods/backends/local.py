"""Workers as processes of this machine: each has an address, a log and a session of its own."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from ipaddress import IPv4Address
from pathlib import Path
from typing import ClassVar

from zeropods import files
from zeropods.errors import UserError
from zeropods.files import ROOT
from zeropods.pods.agent import ORDERS
from zeropods.pods.backends.base import RECORDS, Backend, Settings, Worker, WorkerProcess
from zeropods.pods.gpus import own_gpus, shared_gpus
from zeropods.pods.machine import this_machine
from zeropods.pods.processes import Process, end

SSH_PORT = 2222
"""Port on which CML's own sshd listens, and ours where it can."""
WORKER_SCRIPT = ROOT / "worker_p.py"
WORKER_LOGS = "logs"
WORKER_STOP_SECONDS = 15.0
"""Seconds from SIGTERM to SIGKILL: an agent takes up to 10 to end everything under it."""
MOST_LOCAL_PODS = 500
"""Largest number of pods on one machine: each takes a few processes and ports."""


@dataclass(frozen=True)
class Place:
    """Where and how a process of this machine starts an agent."""

    address: str
    slots: int | None
    """Number of slots; None for one per GPU, at least 1."""
    user: str | None = None
    """The account under which the pod runs; None for this user's."""
    gpus: str | None = None
    """The pod's GPUs, as a value of CUDA_VISIBLE_DEVICES; None for those that it sees."""
    before: tuple[str, ...] = ()
    """Arguments before the agent's command, which make another program start it."""
    after: tuple[str, ...] = ()
    """Arguments of the agent."""


class ProcessWorkers(Backend):
    """Workers that are processes of this machine, one at each place; their cores and memory are not
    limited.

    Args:
        folder: the cluster's folder; it holds a record and a log for each worker.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self._popens: dict[str, subprocess.Popen[bytes]] = {}
        """The processes that this object has started, by the worker's id."""

    @property
    @abstractmethod
    def places(self) -> Sequence[Place]:
        """One place per worker."""

    def accounts(self) -> Mapping[str, str]:
        return {place.address: place.user for place in self.places if place.user is not None}

    def gpus_of(self, number: int) -> str | None:
        """GPUs of the pod with this number, counted from 0, as in `Place.gpus`."""
        if not self.settings.gpus:
            return None
        return self.settings.gpus[number]

    def start(self, orders: Mapping[str, object]) -> tuple[str, ...]:
        # Its mode does not matter: only this user can read what is in a cluster's folder.
        (self.folder / WORKER_LOGS).mkdir(exist_ok=True)
        for place in self.places:
            self._start_at(place, orders)
        return tuple(self._popens)

    def list(self) -> Sequence[Worker]:
        workers = []
        for record in self.processes():
            has_ended = record.find() is None
            state = self._how_it_ended(record.id) if has_ended else "is running"
            place = f"worker {record.id} ({record.address})"
            description = f"{place} {state}; {self._last_line(record.id)}"
            workers.append(Worker(record.id, has_ended, description))
        return workers

    def stop(self, ids: Sequence[str]) -> None:
        end(self._running, WORKER_STOP_SECONDS)
        # Reaps those that this process has started.
        for popen in self._popens.values():
            popen.poll()

    def _start_at(self, place: Place, orders: Mapping[str, object]) -> None:
        """Start the worker of a place, and write down which process it is."""
        worker = secrets.token_hex(8)
        variables = {
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
                env={**os.environ, **variables},
            )
        self._popens[worker] = popen
        # It has not been reaped yet, so its pid is still its own.
        start_time = Process(popen.pid).create_time()
        record = WorkerProcess(worker, place.address, popen.pid, start_time, this_machine().id)
        files.write_json(self.folder / RECORDS / f"{worker}.json", asdict(record))

    def _running(self) -> Sequence[Process]:
        """The processes of the workers that have not ended."""
        processes = (record.find() for record in self.processes())
        return [process for process in processes if process is not None]

    def _how_it_ended(self, worker: str) -> str:
        """How a worker that has ended did so, in words."""
        popen = self._popens.get(worker)
        if popen is None:
            # Another process started it, and only that one gets the exit code.
            return "has ended (exit code unknown)"
        return f"ended with exit code {popen.poll()}"

    def _last_line(self, worker: str) -> str:
        """What a worker wrote last, in words."""
        log = self._log(worker).read_text(encoding="utf-8", errors="replace")
        for line in reversed(log.split("\n")):
            if line.strip():
                return f"its last line: {line.strip()}"
        return "it wrote nothing"

    def _log(self, worker: str) -> Path:
        return self.folder / WORKER_LOGS / f"{worker}.log"


class LocalWorkers(ProcessWorkers):
    """Pods of this machine, at loopback addresses, which share its GPUs."""

    has_processes_here = True
    shares_folder = True
    can_be_killed = True
    network: ClassVar[str | None] = "loopback"

    @classmethod
    def gpus_of_pods(cls, count: int, slots: int | None) -> tuple[str, ...]:
        return shared_gpus(count, slots)

    @classmethod
    def slots_of_pods(cls, count: int) -> int:
        return max(1, own_gpus() // count)

    def master_address(self) -> str:
        return "127.0.0.1"

    @cached_property
    def places(self) -> Sequence[Place]:
        """One place per worker, from 127.A.B.1 on; A and B are random, so that other clusters have
        others."""
        count = self.settings.count
        if count > MOST_LOCAL_PODS:
            expected = f"expected at most {MOST_LOCAL_PODS} pods on a machine"
            raise UserError(f"--count {count}; {expected}")
        # A is not 0, where 127.0.0.1 is, nor 255, so that the last address is in 127.0.0.0/8 too.
        a_and_b = random.SystemRandom().randrange(1 << 8, (1 << 16) - (1 << 8))
        first = IPv4Address(f"127.{a_and_b >> 8}.{a_and_b & 255}.1")
        places = []
        for number in range(count):
            address = str(first + number)
            places.append(Place(address, self.settings.slots, gpus=self.gpus_of(number)))
        return places
