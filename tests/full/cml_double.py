"""A double of CML's `cml.workers_v1`, written from Cloudera's documentation, not from CML itself.

Source: "Workers API", https://docs.cloudera.com/machine-learning/ . Workers are real processes with CML's
variables and an address each on 127.0.2.K. What a real CML does beyond that page is not known here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import pytest

STOP_SECONDS = 10.0


class CmlDouble:
    """The four functions of the module; no more than `quota` workers run at once, the others are pending."""

    def __init__(self, quota: int = 100) -> None:
        self.quota = quota
        self._workers: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it what `import cml.workers_v1` gives, in a session at 127.0.2.254."""
        package, module = types.ModuleType("cml"), types.ModuleType("cml.workers_v1")
        for name in ("launch_workers", "list_workers", "await_workers", "stop_workers"):
            setattr(module, name, getattr(self, name))
        monkeypatch.setitem(sys.modules, "cml", package)
        monkeypatch.setitem(sys.modules, "cml.workers_v1", module)
        monkeypatch.setenv("CDSW_ENGINE_ID", "session0000000")
        monkeypatch.setenv("CDSW_IP_ADDRESS", "127.0.2.254")

    def launch_workers(
        self,
        n: int,
        cpu: float,
        memory: float,
        nvidia_gpu: int = 0,
        kernel: str = "python3",
        script: str = "",
        code: str = "",
        env: Mapping[str, str] = types.MappingProxyType({}),
    ) -> list[dict[str, Any]]:
        command = [sys.executable, script] if script else [sys.executable, "-c", code]
        if code.startswith("!") and not script:
            command = ["/bin/sh", "-c", code[1:]]
        made = [self._launch(command, dict(env)) for _ in range(n)]
        self._start_waiting()
        return [{"id": worker, "app_url": f"https://{worker}.cml.example"} for worker in made]

    def list_workers(self) -> list[dict[str, Any]]:
        self._start_waiting()
        for worker, process in self._processes.items():
            described = self._workers[worker]
            if process.poll() is not None and described["finished_at"] is None:
                described["status"] = "failed" if process.returncode else "succeeded"
                described["exit_code"] = process.returncode
                described["finished_at"] = _now()
        return [dict(worker) for worker in self._workers.values()]

    def await_workers(
        self, ids: Any = (), wait_for_completion: bool = True, timeout_seconds: float = 60
    ) -> dict[str, list[dict[str, Any]]]:
        wanted = {worker if isinstance(worker, str) else worker["id"] for worker in ids}
        good = "succeeded" if wait_for_completion else "running"
        deadline = time.monotonic() + (timeout_seconds or float("inf"))
        while True:
            found = [worker for worker in self.list_workers() if worker["id"] in wanted]
            settled = [worker for worker in found if worker["status"] == good or worker["finished_at"]]
            if len(settled) == len(found) or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        return {
            "workers": [worker for worker in found if worker["status"] == good],
            "failures": [worker for worker in found if worker["status"] != good],
        }

    def stop_workers(self, *ids: str) -> None:
        for worker in ids:
            self._waiting.pop(worker, None)
            self._stop(worker)
            self._workers[worker].update(status="stopped", finished_at=_now())

    def _launch(self, command: list[str], env: dict[str, str]) -> str:
        number = len(self._workers) + 1
        worker = f"cml{number:011}"
        address = f"127.0.2.{number}"
        self._waiting[worker] = (
            command,
            {
                **{name: value for name, value in os.environ.items() if not name.startswith("CDSW_")},
                **env,
                "CDSW_ENGINE_ID": worker,
                "CDSW_IP_ADDRESS": address,
                "CDSW_MASTER_IP": "127.0.2.254",
            },
        )
        self._workers[worker] = {
            "id": worker,
            "status": "pending",
            "ip_address": "",
            "created_at": _now(),
            "running_at": None,
            "finished_at": None,
            "exit_code": None,
        }
        return worker

    def _start_waiting(self) -> None:
        running = sum(process.poll() is None for process in self._processes.values())
        for worker in list(self._waiting)[: max(0, self.quota - running)]:
            command, environment = self._waiting.pop(worker)
            self._processes[worker] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._workers[worker].update(status="running", running_at=_now(), ip_address=environment["CDSW_IP_ADDRESS"])

    def _stop(self, worker: str) -> None:
        process = self._processes.get(worker)
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
