"""A double of CML's `cml.workers_v1`, written from Cloudera's documentation and code, not from CML itself.

Source: "Workers API", https://docs.cloudera.com/machine-learning/ . Workers are real processes with CML's
variables and an address each on 127.0.2.K, and run their code as IPython does in CML. What a real CML does beyond that
page is not known here.
"""

import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import pytest

STOP_SECONDS = 60.0
"""Seconds in which everything in a worker has to end; what is left is killed."""
REFUSAL = "workers.cml.example is forbidden:\n exceeded quota: requests.cpu=1, limited: requests.cpu=2"
"""What Kubernetes says of a worker beyond the quota, on more than one line."""
NO_LABEL = "accelerator label is not there"
BEFORE_IT_RUNS = ("scheduling", "starting")
"""Words for the status of a worker that waits for a machine, and of one whose machine fetches the image."""
KERNEL = """
import signal, sys, tempfile
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

# A container passes the signal on, and ends with its last process.
signal.signal(signal.SIGTERM, lambda *_: None)
config = Config()
config.HistoryManager.enabled = False
with tempfile.TemporaryDirectory() as folder:
    shell = InteractiveShell.instance(config=config, ipython_dir=folder)
    cell = shell.run_cell(sys.argv[1])
sys.exit(not cell.success)
"""
"""Runs its argument as the kernel of a worker does: the worker has failed if the code has raised."""
OLDER = ("name", "accelerator_label_id", "resource_profile_id", "resource_group_id")
"""Parameters that older versions of CML do not have."""


class CmlDouble:
    """The functions of the module that are used; no more than `quota` workers run at once, the others are pending.

    No more than `limit` are created at all: one beyond, or with an accelerator label that is not among `labels`, comes
    back without an id, with the reason in the field `reason_in`.

    Args:
        is_old: whether it has the parameters of an older version only.
    """

    def __init__(
        self,
        quota: int = 100,
        limit: int = 100,
        reason_in: str = "message",
        labels: Collection[int] = (),
        is_old: bool = False,
    ) -> None:
        self.quota, self.limit, self.reason_in, self.labels, self.is_old = quota, limit, reason_in, labels, is_old
        self.is_broken = False
        """Whether `stop_workers` fails."""
        self.launching_gives: Any = None
        """What `launch_workers` returns, or raises, in place of launching any."""
        self.calls: list[dict[str, Any]] = []
        """What each call of `launch_workers` was given."""
        self._workers: dict[str, dict[str, Any]] = {}
        self._refused: list[dict[str, Any]] = []
        self._waiting: dict[str, tuple[str, dict[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it what `import cml.workers_v1` gives, in a session at 127.0.2.254."""
        package, module = types.ModuleType("cml"), types.ModuleType("cml.workers_v1")
        for name in ("launch_workers", "list_workers", "stop_workers"):
            setattr(module, name, getattr(self, name))
        if self.is_old:
            module.launch_workers = self.launch_older  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cml", package)
        monkeypatch.setitem(sys.modules, "cml.workers_v1", module)
        monkeypatch.setenv("CDSW_ENGINE_ID", "session0000000")
        monkeypatch.setenv("CDSW_IP_ADDRESS", "127.0.2.254")

    def launch_older(
        self,
        n: int,
        cpu: float,
        memory: float,
        nvidia_gpu: int = 0,
        kernel: str = "python3",
        script: str = "",
        code: str = "",
        env: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """`launch_workers` with the signature of an older version."""
        return self.launch_workers(n, cpu, memory, nvidia_gpu, kernel, script, code, env=env)

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
        if isinstance(self.launching_gives, Exception):
            raise self.launching_gives
        if self.launching_gives is not None:
            return self.launching_gives
        assert code and not script
        env = dict(env or {})
        call = {
            "n": n, "cpu": cpu, "memory": memory, "nvidia_gpu": nvidia_gpu, "code": code, "env": env, "name": name,
            "accelerator_label_id": accelerator_label_id, "resource_profile_id": resource_profile_id,
        }  # fmt: skip
        self.calls.append(call)
        has_label = accelerator_label_id is None or accelerator_label_id in self.labels
        made = []
        for _ in range(n):
            if len(self._workers) < self.limit and has_label:
                worker = self._launch(code, env)
                made.append({"id": worker, "app_url": f"https://{worker}.cml.example"})
            else:
                number = len(self._refused) + 1
                refused = {"engineId": f"refused{number:07}", self.reason_in: REFUSAL if has_label else NO_LABEL}
                self._refused.append(refused)
                made.append(dict(refused))
        return made

    def list_workers(self) -> list[dict[str, Any]]:
        """All workers of the session, those that have ended and those that were never created among them."""
        self._go_on()
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
            if process is not None:
                _end(process)
            self._workers[worker].update(status="stopped", finished_at=_now())

    def status(self, worker: str) -> str:
        """The word for a worker's status."""
        return str(next(known["status"] for known in self.list_workers() if known.get("id") == worker))

    def lose(self, worker: str) -> None:
        """End a worker as if its machine were gone."""
        _end(self._processes[worker])
        self._workers[worker].update(status="failed", finished_at=_now())

    def _launch(self, code: str, env: Mapping[str, str]) -> str:
        number = len(self._workers) + 1
        worker = f"cml{number:011}"
        # Of the session's variables a worker has none: what it shares with it is the home folder.
        usual = {"HOME": os.environ["HOME"], "PATH": "/usr/local/bin:/usr/bin:/bin"}
        place = {"CDSW_ENGINE_ID": worker, "CDSW_IP_ADDRESS": f"127.0.2.{number}", "CDSW_MASTER_IP": "127.0.2.254"}
        self._waiting[worker] = code, {**usual, **env, **place}
        self._workers[worker] = {
            "id": worker, "status": BEFORE_IT_RUNS[0], "ip_address": "unknown", "created_at": _now(),
            "running_at": None, "finished_at": None, "exit_code": None,
        }  # fmt: skip
        return worker

    def _go_on(self) -> None:
        """Bring each worker for which there is room to its next status."""
        running = sum(process.poll() is None for process in self._processes.values())
        for worker in list(self._waiting)[: max(0, self.quota - running)]:
            status = self._workers[worker]["status"]
            if status != BEFORE_IT_RUNS[-1]:
                self._workers[worker]["status"] = BEFORE_IT_RUNS[BEFORE_IT_RUNS.index(status) + 1]
                continue
            code, environment = self._waiting.pop(worker)
            self._processes[worker] = subprocess.Popen(
                [sys.executable, "-c", KERNEL, code], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._workers[worker].update(status="running", running_at=_now(), ip_address=environment["CDSW_IP_ADDRESS"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker's kernel and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
