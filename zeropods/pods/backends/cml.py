"""A session of Cloudera Machine Learning as a pod, and CML workers beside it.

Source: Cloudera's documentation, "Workers API" (https://docs.cloudera.com/machine-learning/).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.agent import ORDERS
from zeropods.pods.backends.local import WORKER_SCRIPT, LocalWorkers, Settings, Worker
from zeropods.pods.hostfile import own_address

MODULES = ("cml.workers_v1", "cdsw")
"""The newer and the older name of the same functions."""
SESSION_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_PROJECT")
ENDED = frozenset(
    {"succeeded", "success", "failed", "failure", "error", "stopped", "killed", "timedout", "terminated", "exited"}
)
"""The words that a status can be when a worker is over; they vary with CML's version."""
REASONS = ("reason", "status_reason", "status_message", "message")
"""Under these names CML may say why a worker waits."""


class CmlWorkers(LocalWorkers):
    """One agent in this session, the others on CML workers.

    CML's module is called only with the parameters that its documentation names.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self._module = require_module()

    def master_address(self) -> str:
        return own_address()

    def claim(self) -> Sequence[str]:
        return [own_address()]

    def start(self, orders: Mapping[str, Any]) -> tuple[str, ...]:
        here = super().start(orders)
        if self.settings.count == 1:
            return here
        started = self._module.launch_workers(
            n=self.settings.count - 1,
            cpu=self.settings.cpu,
            memory=self.settings.memory,
            nvidia_gpu=self.settings.nvidia_gpu,
            script="",
            # As a command, and this very Python: a CML worker's own kernel may not have our packages.
            code=f"!{shlex.join([sys.executable, str(WORKER_SCRIPT)])}",
            env={ORDERS: json.dumps(orders)},
        )
        return (*here, *(str(worker["id"]) for worker in started))

    def list(self) -> Sequence[Worker]:
        return [*super().list(), *map(described, self._module.list_workers())]

    def stop(self, ids: Sequence[str]) -> None:
        super().stop(ids)
        theirs = [worker for worker in map(described, self._module.list_workers()) if worker.id in ids]
        running = [worker.id for worker in theirs if not worker.has_ended]
        if running:
            self._module.stop_workers(*running)


def described(listed: Mapping[str, Any]) -> Worker:
    """A worker from CML's description, whatever the version's words."""
    status = str(listed.get("status") or "unknown").lower()
    return Worker(
        id=str(listed["id"]),
        status=status,
        has_ended=bool(listed.get("finished_at")) or status in ENDED,
        address=listed.get("ip_address") or "",
        exit_code=listed.get("exit_code"),
        app_url=listed.get("app_url") or "",
        reason=next((str(listed[name]) for name in REASONS if listed.get(name)), ""),
    )


def require_module() -> ModuleType:
    """CML's module; `UserError` where it is not installed."""
    module = _module()
    if module is None:
        raise UserError(
            f"backend cml: neither {' nor '.join(MODULES)} can be imported; run this in a CML session, "
            "or choose --backend local"
        )
    return module


def is_session() -> bool:
    """Whether this process runs in a CML session that can start workers."""
    return any(map(os.environ.get, SESSION_VARIABLES)) and _module() is not None


def _module() -> ModuleType | None:
    for name in MODULES:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None
