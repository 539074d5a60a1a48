"""A double of CML's `cml.workers_v1`, written from Cloudera's documentation, not from CML itself.

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


class CmlDouble:
    """The functions of the module that are used; no more than `quota` workers run at once, the others are pending."""

    def __init__(self, quota: int = 100) -> None:
        self.quota = quota
        self.calls: list[dict[str, Any]] = []
        """What each call of `launch_workers` was given."""
        self._workers: dict[str, dict[str, Any]] = {}
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
        self, n: int, cpu: float, memory: float, nvidia_gpu: int, script: str, code: str, env: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        assert code.startswith("!") and not script
        self.calls.append({"n": n, "script": script, "code": code, "env": dict(env)})
        made = [self._launch(shlex.split(code[1:]), env) for _ in range(n)]
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

    def stop_workers(self, *ids: str) -> None:
        for worker in ids:
            self._waiting.pop(worker, None)
            process = self._processes.get(worker)
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(STOP_SECONDS)
            self._workers[worker].update(status="stopped", finished_at=_now())

    def _launch(self, command: list[str], env: Mapping[str, str]) -> str:
        number = len(self._workers) + 1
        worker = f"cml{number:011}"
        usual = {name: value for name, value in os.environ.items() if not name.startswith("CDSW_")}
        place = {"CDSW_ENGINE_ID": worker, "CDSW_IP_ADDRESS": f"127.0.2.{number}", "CDSW_MASTER_IP": "127.0.2.254"}
        self._waiting[worker] = command, {**usual, **env, **place}
        self._workers[worker] = {
            "id": worker, "status": "pending", "ip_address": "", "created_at": _now(), "running_at": None,
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
