"""A session of Cloudera Machine Learning as a pod, and CML workers beside it.

Source: Cloudera's documentation, "Workers API" (https://docs.cloudera.com/machine-learning/).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.agent import ORDERS
from zeropods.pods.backends.local import WORKER_SCRIPT, LocalWorkers, Place, Settings, Worker
from zeropods.pods.hostfile import own_address

MODULES = ("cml.workers_v1", "cdsw")
"""The newer and the older module, which have the same functions."""
SESSION_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_PROJECT")
REASONS = ("reason", "status_reason", "status_message", "message", "k8sMessage")
"""Names of the fields in which CML may say why a worker waits or could not be created; older versions use the last."""
WAITING = {
    "scheduling": "CML looks for a machine with {size}",
    "starting": "its machine fetches the runtime's image, which can take minutes on a new one",
}
"""What a worker waits for, by words for its status; with any other word it waits for room."""
ENDED = frozenset(
    {"succeeded", "success", "failed", "failure", "error", "stopped", "killed", "timedout", "terminated", "exited"}
)
"""Words for the status of a worker that has ended; they vary with CML's version."""


class CmlWorkers(LocalWorkers):
    """One agent in this session, the others on CML workers.

    CML's module is called only with the parameters that its documentation names.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self._module = cml_module()

    def master_address(self) -> str:
        return own_address()

    @cached_property
    def places(self) -> Sequence[Place]:
        return [Place(own_address(), self.settings.slots, gpus=self.gpus_of(0))]

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
            # Run as a command, with this very Python, since a CML worker's own kernel may not have our packages.
            code=f"!{shlex.join([sys.executable, str(WORKER_SCRIPT)])}",
            env={ORDERS: json.dumps({**orders, "slots": self.settings.slots, "gpus": self.gpus_of(1)})},
        )
        created = [str(worker["id"]) for worker in started if worker.get("id")]
        refused = [worker for worker in started if not worker.get("id")]
        if refused:
            count = f"{len(refused)} of {len(started)} workers"
            size = size_told(self.settings)
            remedy = f"ask for fewer pods or less than {size} each, or have the quota raised"
            self.failure = f"CML cannot create {count}: {reason_of(refused[0]) or 'it does not say why'}; {remedy}"
        return (*here, *created)

    def list(self) -> Sequence[Worker]:
        return [*super().list(), *self._theirs()]

    def stop(self, ids: Sequence[str]) -> None:
        super().stop(ids)
        running = [worker.id for worker in self._theirs() if worker.id in ids and not worker.has_ended]
        # Without ids, CML would stop all workers of the session.
        if running:
            self._module.stop_workers(*running)

    def _theirs(self) -> Sequence[Worker]:
        # A worker that was never created may be listed too, and has no id.
        return [described(listed, self.settings) for listed in self._module.list_workers() if listed.get("id")]


def described(listed: Mapping[str, Any], asked: Settings) -> Worker:
    """A worker as CML describes it, whatever words its version uses."""
    status, code = str(listed.get("status") or "unknown").lower(), listed.get("exit_code")
    has_ended, url = bool(listed.get("finished_at")) or status in ENDED, listed.get("app_url")
    state, says = f"is {status}", f"see {url}" if url else "it wrote nothing"
    if has_ended:
        state = f"ended with status {status}" if code is None else f"ended with exit code {code}"
    elif status != "running":
        size = size_told(asked)
        usual = f"it waits for {size}; the quota is used up, or no machine is free"
        says = reason_of(listed) or WAITING.get(status, usual).format(size=size)
    return Worker(str(listed["id"]), has_ended, f"worker {listed['id']} {state}; {says}")


def reason_of(listed: Mapping[str, Any]) -> str | None:
    """Why a worker waits or could not be created, in CML's words on one line; None where it does not say."""
    for key in REASONS:
        if listed.get(key):
            return " ".join(str(listed[key]).split())
    return None


def size_told(asked: Settings) -> str:
    """What each worker needs."""
    return f"{asked.cpu:g} cores, {asked.memory:g} GiB and {asked.nvidia_gpu} GPUs"


def cml_module() -> ModuleType:
    """CML's module; `UserError` where it is not installed."""
    for name in MODULES:
        with suppress(ImportError):
            return import_module(name)
    remedy = "run this in a CML session, or choose --backend local"
    raise UserError(f"backend cml: neither {' nor '.join(MODULES)} can be imported; {remedy}")


def is_session() -> bool:
    """Whether this process runs in a CML session that can start workers."""
    with suppress(UserError):
        return any(map(os.environ.get, SESSION_VARIABLES)) and bool(cml_module())
    return False
