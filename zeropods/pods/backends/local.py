"""CML's four calls over processes of this machine: each worker has an address, a log and a session of its own."""

from __future__ import annotations

import ipaddress
import itertools
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from zeropods.errors import UserError
from zeropods.pods.backends.workers import Worker, WorkerRecords, has_ended, now, status_of
from zeropods.pods.processes import Process, deferred, end, find_process, from_record, is_alive, to_record
from zeropods.pods.sshd import account
from zeropods.pods.state import ROOT
from zeropods.programs import is_free

# Addresses for pods of this machine: on the loopback interface, or this machine's own.

SSH_PORT = 2222
"""Where CML's own sshd listens, and ours where it can."""


class Network(Protocol):
    """Gives pods addresses."""

    def open(self) -> None:
        """Make what all pods share."""
        ...

    def master_address(self) -> str:
        """Where pods reach the process that starts them; the network is open."""
        ...

    def user(self, address: str) -> str:
        """The account under which the pod at an address runs."""
        ...

    def claim(self, n: int) -> list[str]:
        """Addresses for n pods; nobody else is given them before `settled`."""
        ...

    def settled(self) -> None:
        """The pods serve at their addresses, or never will."""
        ...

    def command(self, address: str, argv: list[str]) -> list[str]:
        """The command as it is run at an address."""
        ...

    def close(self) -> None:
        """Remove all that was made; what is gone already is no error."""
        ...


class Loopback:
    """127.0.1.1, 127.0.1.2 and so on: a pod differs from another by its address alone."""

    def __init__(self, taken: Callable[[], set[str]]) -> None:
        self._taken = taken
        self._claims: list[socket.socket] = []

    def open(self) -> None: ...

    def close(self) -> None: ...

    def settled(self) -> None:
        while self._claims:
            self._claims.pop().close()

    def master_address(self) -> str:
        return "127.0.0.1"

    def user(self, address: str) -> str:
        return account()

    def command(self, address: str, argv: list[str]) -> list[str]:
        return argv

    def claim(self, n: int) -> list[str]:
        """Addresses that no other cluster has or is about to have, with nothing on sshd's usual port."""
        candidates = map(str, ipaddress.ip_network("127.0.0.0/16").hosts())
        usable = (a for a in candidates if not a.startswith("127.0.0.") and not a.endswith((".0", ".255")))
        found = list(itertools.islice(filter(self._is_claimed, usable), n))
        if len(found) < n:
            raise UserError(f"127.0.1.1 ... 127.0.255.254: {len(found)} free addresses; {n} are needed")
        return found

    def _is_claimed(self, address: str) -> bool:
        claim = _claim(address)
        if claim is None:
            return False
        # Asked after the claim: whoever gave it up just now has pods there.
        if address in self._taken() or not is_free(address, SSH_PORT):
            claim.close()
            return False
        self._claims.append(claim)
        return True


class OwnAddress:
    """This machine's one address, for a session that is itself a pod."""

    def __init__(self, address: str) -> None:
        self._address = address

    def open(self) -> None: ...

    def close(self) -> None: ...

    def master_address(self) -> str:
        return self._address

    def user(self, address: str) -> str:
        return account()

    def command(self, address: str, argv: list[str]) -> list[str]:
        return argv

    def settled(self) -> None: ...

    def claim(self, n: int) -> list[str]:
        if n > 1:
            raise UserError(f"{n} pods at {self._address}; a machine with one address is one pod")
        return [self._address] * n


def _claim(address: str) -> socket.socket | None:
    """Keep other processes of this machine from an address until the socket is closed, or this process ends.

    A name in the abstract namespace (unix(7)) leaves no file.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0zeropods-{address}")
    except OSError:
        claim.close()
        return None
    return claim


# CML's four calls over processes of this machine: each worker has an address, a log and a session of its own.

RECORDS, LOGS = "workers", "logs"
STOP_SECONDS = 15.0
"""From SIGTERM to SIGKILL: an agent takes up to 10 to end everything under it."""
POLL_SECONDS = 0.1


class LocalWorkers:
    """Workers whose state lies on disk, so that any process of this user can list and stop them.

    The exit code of a worker is known where the process that started it has seen it, else it is None.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder = folder
        self._network = network
        self._records = WorkerRecords(folder / RECORDS)
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def launch_workers(
        self,
        n: int,
        cpu: float,
        memory: float,
        nvidia_gpu: int = 0,
        kernel: str = "python3",
        script: str = "",
        code: str = "",
        env: Mapping[str, str] | None = None,
        name: str = "",
    ) -> list[Worker]:
        """Start n processes. They share this machine: `cpu`, `memory` and `nvidia_gpu` are not enforced."""
        argv = _argv(script, code)
        with deferred():
            return [self._start(address, argv, env or {}, name) for address in self._network.claim(n)]

    def list_workers(self) -> list[Worker]:
        """All workers, in the order of their start."""
        return [self._current(record) for record in self._records.all()]

    def await_workers(
        self,
        workers: Sequence[Worker | str] = (),
        wait_for_completion: bool = True,
        timeout_seconds: float | None = None,
    ) -> dict[str, list[Worker]]:
        """Wait as CML does; no time limit for None or 0, all workers for none."""
        wanted = {worker if isinstance(worker, str) else worker["id"] for worker in workers}
        deadline = time.monotonic() + timeout_seconds if timeout_seconds else float("inf")
        while True:
            found = [worker for worker in self.list_workers() if not wanted or worker["id"] in wanted]
            if time.monotonic() >= deadline or not any(_may_change(worker, wait_for_completion) for worker in found):
                break
            time.sleep(POLL_SECONDS)
        good = "succeeded" if wait_for_completion else "running"
        return {
            "workers": [worker for worker in found if status_of(worker) == good],
            "failures": [worker for worker in found if status_of(worker) != good],
        }

    def stop_workers(self, *ids: str) -> None:
        """End workers, all of them for no id; when this returns they are gone."""
        stopped = [record for record in self._records.all() if not ids or record["id"] in ids]
        running = [record for record in stopped if not has_ended(self._current(record))]
        with deferred():
            end(filter(None, map(_process, running)), STOP_SECONDS)
            for record in running:
                self._reap(record["id"])
                self._records.write({**record, "status": "stopped", "finished_at": now()})

    def last_line(self, worker: str) -> str:
        """The last line that a worker wrote; empty where it wrote none."""
        path = self._folder / LOGS / f"{worker}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def addresses(self) -> set[str]:
        """Where workers run."""
        return {worker["ip_address"] for worker in self.list_workers() if not has_ended(worker)}

    def _start(self, address: str, argv: list[str], env: Mapping[str, str], name: str) -> Worker:
        worker = secrets.token_hex(8)
        place = {
            "CDSW_IP_ADDRESS": address,
            "CDSW_ENGINE_ID": worker,
            "CDSW_MASTER_IP": self._network.master_address(),
        }
        (self._folder / LOGS).mkdir(mode=0o700, parents=True, exist_ok=True)
        log = os.open(self._folder / LOGS / f"{worker}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = subprocess.Popen(
                self._network.command(address, argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, **env, **place},
            )
        finally:
            os.close(log)
        self._started[worker] = process
        # Not reaped yet, so that its number is still its own.
        known, started = find_process(process.pid), now()
        assert known is not None
        self._records.write(
            {
                "id": worker,
                "name": name,
                "app_url": None,
                "status": "running",
                "ip_address": address,
                "created_at": started,
                "running_at": started,
                "finished_at": None,
                "exit_code": None,
                "process": to_record(known),
            }
        )
        return {"id": worker, "app_url": None}

    def _current(self, record: Worker) -> Worker:
        """A record brought up to date; its end is written down once."""
        if not has_ended(record) and not _is_running(record):
            code = self._reap(record["id"])
            status = "stopped" if code is None else "failed" if code else "succeeded"
            record = {**record, "status": status, "finished_at": now(), "exit_code": code}
            self._records.write(record)
        return {name: value for name, value in record.items() if name != "process"}

    def _reap(self, worker: str) -> int | None:
        process = self._started.get(worker)
        return process.poll() if process else None


def _argv(script: str, code: str) -> list[str]:
    """The command of a worker; as in CML, code counts only where there is no script."""
    if script:
        return [sys.executable, script]
    if code.startswith("!"):
        return shlex.split(code[1:])
    if not code:
        raise UserError("launch_workers: neither script nor code; expected one of them")
    return [sys.executable, "-c", code]


def _may_change(worker: Worker, wait_for_completion: bool) -> bool:
    return not has_ended(worker) and (wait_for_completion or status_of(worker) != "running")


def _process(record: Worker) -> Process | None:
    return from_record(record["process"])


def _is_running(record: Worker) -> bool:
    process = _process(record)
    return process is not None and is_alive(process)
