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
from zeropods.pods.backends.base import Settings, Worker
from zeropods.pods.backends.local import WORKER_SCRIPT, Place, ProcessWorkers
from zeropods.pods.hostfile import own_address

MODULES = ("cml.workers_v1", "cdsw")
"""The newer and the older module, which have the same functions."""
SESSION_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_PROJECT")
REASON_FIELDS = ("reason", "status_reason", "status_message", "message", "k8sMessage")
"""Names of the fields in which CML may say why a worker waits or could not be created; older
versions use the last."""
WAITS_FOR = {
    "scheduling": "CML looks for a machine with {size}",
    "starting": "its machine fetches the runtime's image, which can take minutes on a new one",
}
"""What a worker waits for, by words for its status."""
WAITS_FOR_ROOM = "it waits for {size}; the quota is used up, or no machine is free"
"""What it waits for with any other word."""
ENDED_STATUSES = frozenset(
    {
        "succeeded", "success", "failed", "failure", "error", "stopped", "killed", "timedout",
        "terminated", "exited",
    }
)  # fmt: skip
"""Words for the status of a worker that has ended; they vary with CML's version."""


class CmlWorkers(ProcessWorkers):
    """One agent in this session, the others on CML workers.

    CML's module is called only with the parameters that its documentation names.
    """

    has_processes_here = False
    shares_folder = True

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self._module = cml_module()

    @classmethod
    def is_for_here(cls) -> bool:
        """Whether this process runs in a session of CML that can start workers."""
        return is_session()

    @classmethod
    def check_request(cls, nvidia_gpu: int | None) -> None:
        """Refuse to start workers outside of a session; any number of GPUs may be asked for."""
        cml_module()

    def master_address(self) -> str:
        return own_address()

    @cached_property
    def places(self) -> Sequence[Place]:
        """The place of the agent in this session."""
        return [Place(own_address(), self.settings.slots, gpus=self.gpus_of(0))]

    def start(self, orders: Mapping[str, object]) -> tuple[str, ...]:
        in_session = super().start(orders)
        if self.settings.count == 1:
            return in_session
        orders_of_workers = {**orders, "slots": self.settings.slots, "gpus": self.gpus_of(1)}
        launched = self._module.launch_workers(
            n=self.settings.count - 1,
            cpu=self.settings.cpu,
            memory=self.settings.memory,
            nvidia_gpu=self.settings.nvidia_gpu,
            script="",
            # Run as a command, with this very Python, since a CML worker's own kernel may not have
            # our packages.
            code=f"!{shlex.join([sys.executable, str(WORKER_SCRIPT)])}",
            env={ORDERS: json.dumps(orders_of_workers)},
        )
        created = [str(worker["id"]) for worker in launched if worker.get("id")]
        refused = [worker for worker in launched if not worker.get("id")]
        if refused:
            count = f"{len(refused)} of {len(launched)} workers"
            reason = reason_of(refused[0]) or "it does not say why"
            size = size_of_worker(self.settings)
            remedy = f"ask for fewer pods or less than {size} each, or have the quota raised"
            self.failure = f"CML cannot create {count}: {reason}; {remedy}"
        return (*in_session, *created)

    def list(self) -> Sequence[Worker]:
        return [*super().list(), *self._cml_workers()]

    def stop(self, ids: Sequence[str]) -> None:
        super().stop(ids)
        running = []
        for worker in self._cml_workers():
            if worker.id in ids and not worker.has_ended:
                running.append(worker.id)
        # Without ids, CML would stop all workers of the session.
        if running:
            self._module.stop_workers(*running)

    def _cml_workers(self) -> Sequence[Worker]:
        listed = self._module.list_workers()
        # A worker that was never created may be listed too, and has no id.
        return [described(worker, self.settings) for worker in listed if worker.get("id")]


def described(listed: Mapping[str, Any], settings: Settings) -> Worker:
    """A worker as CML describes it, whatever words its version uses."""
    status = str(listed.get("status") or "unknown").lower()
    has_ended = bool(listed.get("finished_at")) or status in ENDED_STATUSES
    is_waiting = not has_ended and status != "running"
    if is_waiting:
        size = size_of_worker(settings)
        words = reason_of(listed) or WAITS_FOR.get(status, WAITS_FOR_ROOM).format(size=size)
    elif listed.get("app_url"):
        words = f"see {listed['app_url']}"
    else:
        words = "it wrote nothing"
    state = _how_it_ended(listed, status) if has_ended else f"is {status}"
    return Worker(str(listed["id"]), has_ended, f"worker {listed['id']} {state}; {words}")


def _how_it_ended(listed: Mapping[str, Any], status: str) -> str:
    code = listed.get("exit_code")
    if code is None:
        return f"ended with status {status}"
    return f"ended with exit code {code}"


def reason_of(listed: Mapping[str, Any]) -> str | None:
    """Why a worker waits or could not be created, in CML's words on one line; None where it does
    not say."""
    for name in REASON_FIELDS:
        if listed.get(name):
            return " ".join(str(listed[name]).split())
    return None


def size_of_worker(settings: Settings) -> str:
    """What each worker needs."""
    return f"{settings.cpu:g} cores, {settings.memory:g} GiB and {settings.nvidia_gpu} GPUs"


def cml_module() -> ModuleType:
    """CML's module; `UserError` where it is not installed."""
    for name in MODULES:
        with suppress(ImportError):
            return import_module(name)
    remedy = "run this in a CML session, or choose --backend local"
    raise UserError(f"backend cml: neither {' nor '.join(MODULES)} can be imported; {remedy}")


def is_session() -> bool:
    """Whether this process runs in a CML session that can start workers."""
    if not any(map(os.environ.get, SESSION_VARIABLES)):
        return False
    try:
        cml_module()
    except UserError:
        return False
    return True
