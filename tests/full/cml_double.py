"""A double of CML's `cml.workers_v1`, written from Cloudera's documentation and code, not from CML itself.

Source: "Workers API", https://docs.cloudera.com/machine-learning/ . Workers are real processes with CML's
variables and an address each on 127.0.2.K. What a real CML does beyond that page is not known here.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import pytest

STOP_SECONDS = 10.0
REFUSAL = "workers.cml.example is forbidden:\n exceeded quota: requests.cpu=1, limited: requests.cpu=2"
"""What Kubernetes says of a worker beyond the quota, on more than one line."""


class CmlDouble:
    """The functions of the module that are used; no more than `quota` workers run at once, the others are pending.

    No more than `limit` are created at all: one beyond comes back without an id, with the reason in the field
    `reason_in`.
    """

    def __init__(self, quota: int = 100, limit: int = 100, reason_in: str = "message") -> None:
        self.quota, self.limit, self.reason_in = quota, limit, reason_in
        self.is_broken = False
        """Whether `stop_workers` fails."""
        self.calls: list[dict[str, Any]] = []
        """What each call of `launch_workers` was given."""
        self._workers: dict[str, dict[str, Any]] = {}
        self._refused: list[dict[str, Any]] = []
        self._waiting: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it what `import cml.workers_v1` gives, in a session at 127.0.2.254."""
        package, module = types.ModuleType("cml"), types.ModuleType("cml.workers_v1")
        for name in ("launch_workers", "list_workers", "stop_workers"):
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
        name: str = "",
        accelerator_label_id: int | None = None,
        resource_profile_id: int | None = None,
        resource_group_id: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        assert code.startswith("!") and not script
        env = dict(env or {})
        self.calls.append({"n": n, "script": script, "code": code, "env": env})
        made = []
        for _ in range(n):
            if len(self._workers) < self.limit:
                worker = self._launch(shlex.split(code[1:]), env)
                made.append({"id": worker, "app_url": f"https://{worker}.cml.example"})
            else:
                number = len(self._refused) + 1
                refused = {"engineId": f"refused{number:07}", self.reason_in: REFUSAL}
                self._refused.append(refused)
                made.append(dict(refused))
        self._start_waiting()
        return made

    def list_workers(self) -> list[dict[str, Any]]:
        self._start_waiting()
        for worker, process in self._processes.items():
            described = self._workers[worker]
            if process.poll() is not None and described["finished_at"] is None:
                described["status"] = "failed" if process.returncode else "succeeded"
                described["exit_code"] = process.returncode
                described["finished_at"] = _now()
        return [dict(worker) for worker in (*self._workers.values(), *self._refused)]

    def stop_workers(self, *ids: str) -> None:
        """Stop these workers, or all of them where none is named."""
        if self.is_broken:
            raise ConnectionError("CML does not answer")
        for worker in ids or self._workers:
            self._waiting.pop(worker, None)
            process = self._processes.get(worker)
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(STOP_SECONDS)
            self._workers[worker].update(status="stopped", finished_at=_now())

    def status(self, worker: str) -> str:
        """The word for a worker's status."""
        return str(next(known["status"] for known in self.list_workers() if known.get("id") == worker))

    def _launch(self, command: list[str], env: Mapping[str, str]) -> str:
        number = len(self._workers) + 1
        worker = f"cml{number:011}"
        usual = {name: value for name, value in os.environ.items() if not name.startswith("CDSW_")}
        place = {"CDSW_ENGINE_ID": worker, "CDSW_IP_ADDRESS": f"127.0.2.{number}", "CDSW_MASTER_IP": "127.0.2.254"}
        self._waiting[worker] = command, {**usual, **env, **place}
        self._workers[worker] = {
            "id": worker, "status": "scheduling", "ip_address": "unknown", "created_at": _now(), "running_at": None,
            "finished_at": None, "exit_code": None,
        }  # fmt: skip
        return worker

    def _start_waiting(self) -> None:
        running = sum(process.poll() is None for process in self._processes.values())
        for worker in list(self._waiting)[: max(0, self.quota - running)]:
            command, environment = self._waiting.pop(worker)
            self._processes[worker] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._workers[worker].update(status="running", running_at=_now(), ip_address=environment["CDSW_IP_ADDRESS"])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
