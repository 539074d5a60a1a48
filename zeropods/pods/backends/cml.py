"""A session of Cloudera Machine Learning as a pod, and CML workers beside it.

Source: Cloudera's documentation, "Workers API" (https://docs.cloudera.com/machine-learning/).
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from zeropods.errors import UserError
from zeropods.files import HOME
from zeropods.pods.agent import ORDERS
from zeropods.pods.backends.base import Settings, Worker
from zeropods.pods.backends.local import WORKER_SCRIPT, Place, ProcessWorkers
from zeropods.pods.hostfile import own_address

MODULES = ("cml.workers_v1", "cdsw")
"""The newer and the older module, which have the same functions."""
SESSION_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_PROJECT")
GIVEN_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", HOME)
"""Variables that a worker is given where this session has them: by them its agent finds the same
programs, libraries and clusters. CML gives a worker its own and the project's variables, and none
that was set within the session."""
RUNNER = "import subprocess; subprocess.run({argv!r}, stdin=subprocess.DEVNULL, check=True)"
"""Code for a worker's kernel that runs a command, and fails where the command does.

A line that begins with `!` would run it too, but IPython does not fail with the command, runs it on
a terminal, and expands `$` and braces in its words.
"""
NEWER_PARAMETERS = {
    "accelerator_label_id": "accelerator_label",
    "resource_profile_id": "resource_profile",
}
"""Parameters of `launch_workers` that older versions of CML lack, and the settings that they
take."""
REASON_FIELDS = ("reason", "status_reason", "status_message", "message", "k8sMessage")
"""Names of the fields in which CML may say why a worker waits or could not be created; older
versions use the last."""
WAITS_FOR = {
    "scheduling": "CML looks for a machine with {size}",
    "starting": "its machine fetches the runtime's image, which can take minutes on a new one",
}
"""What a worker waits for, by CML's word for its status; `{size}` is the size of a worker."""
WAITS_FOR_ROOM = "it waits for {size}; the quota is used up, or no machine is free"
"""What a worker waits for where its status is any other word."""
CALL_AGAIN = "call again once CML answers"
MOST_LETTERS = 60
"""Length to which a reason is cut in a line of progress."""
ENDED_STATUSES = frozenset(
    {
        "succeeded", "success", "failed", "failure", "error", "stopped", "killed", "timedout",
        "terminated", "exited",
    }
)  # fmt: skip
"""Words for the status of a worker that has ended; they vary with CML's version."""


class CmlWorkers(ProcessWorkers):
    """One agent in this session, the others on CML workers.

    CML's module is called with the parameters that every version of its documentation names, and
    with a newer one where the module has it.
    """

    has_processes_here = False
    shares_folder = True
    can_replace = True
    # A machine may first have to be added to CML's cluster, and to fetch an image of 20 GB.
    ready_seconds = 900.0

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self._module = cml_module()

    @classmethod
    def is_for_here(cls) -> bool:
        """Whether this process runs in a session of CML that can start workers."""
        return is_session()

    @classmethod
    def check_request(cls, nvidia_gpu: int | None, **of_cml: int | None) -> None:
        """Raise `UserError` outside of a session, and where this version of CML does not know one
        of its own settings; any number of GPUs may be asked for."""
        parameters = parameters_of(cml_module())
        for parameter, setting in NEWER_PARAMETERS.items():
            value = of_cml.get(setting)
            if value is not None and parameter not in parameters:
                flag = setting.replace("_", "-")
                reason = f"this version of CML has no {parameter} for its workers"
                raise UserError(f"--{flag} {value}: {reason}; leave it out")

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
        return (*in_session, *self._launch(self.settings.count - 1, orders))

    def may_replace(self, worker: str) -> bool:
        workers_here = [record.id for record in self.processes()]
        return worker not in workers_here

    def replace(self, worker: str, orders: Mapping[str, object]) -> tuple[str, ...]:
        self._stop_workers([worker])
        return self._launch(1, orders)

    def withdraw(self, workers: Sequence[str]) -> None:
        self._stop_workers(workers)

    def _launch(self, count: int, orders: Mapping[str, object]) -> tuple[str, ...]:
        """Ask CML for so many workers; return the ids of those that it has created. Where it could
        not create all, `failure` is set to the reason."""
        launched = self._workers_from("launch_workers", **self._request(count, orders))
        created = [str(worker["id"]) for worker in launched if worker.get("id")]
        refused = [worker for worker in launched if not worker.get("id")]
        if refused:
            number = f"{len(refused)} of {len(launched)} workers"
            reason = reason_of(refused[0]) or "it does not say why"
            self.failure = f"CML cannot create {number}: {reason}; {remedy_of(self.settings)}"
        return tuple(created)

    def _request(self, count: int, orders: Mapping[str, object]) -> dict[str, object]:
        """The arguments of `launch_workers`."""
        # Pod 0 is in this session. The value of pod 1 is that of all workers: none, unless GPUs are
        # hidden from every pod.
        orders_of_workers = {**orders, "slots": self.settings.slots, "gpus": self.gpus_of(1)}
        variables = {ORDERS: json.dumps(orders_of_workers)}
        for name in GIVEN_VARIABLES:
            if name in os.environ:
                variables[name] = os.environ[name]
        request: dict[str, object] = {
            "n": count,
            "cpu": self.settings.cpu,
            "memory": self.settings.memory,
            "nvidia_gpu": self.settings.nvidia_gpu,
            "script": "",
            # This very Python, since a CML worker's own kernel may not have our packages.
            "code": RUNNER.format(argv=[sys.executable, str(WORKER_SCRIPT)]),
            "env": variables,
        }
        if "name" in parameters_of(self._module):
            request["name"] = f"zeropods {self.folder.name}"
        for parameter, setting in NEWER_PARAMETERS.items():
            value = getattr(self.settings, setting)
            if value is not None:
                request[parameter] = value
        return request

    def list(self) -> Sequence[Worker]:
        return [*super().list(), *self._cml_workers()]

    def stop(self, ids: Sequence[str]) -> None:
        super().stop(ids)
        self._stop_workers(ids)

    def _stop_workers(self, ids: Sequence[str]) -> None:
        """End those of these workers that are CML's and have not ended."""
        running = []
        for worker in self._cml_workers():
            if worker.id in ids and not worker.has_ended:
                running.append(worker.id)
        # Without ids, CML would stop all workers of the session.
        if running:
            self._call("stop_workers", *running)

    def _cml_workers(self) -> Sequence[Worker]:
        """The session's workers that CML knows, those that have ended included."""
        listed = self._workers_from("list_workers")
        # A worker that was never created may be listed too, and has no id.
        return [described(worker, self.settings) for worker in listed if worker.get("id")]

    def _workers_from(self, function: str, **settings: object) -> Sequence[Mapping[str, Any]]:
        """The workers that a function of CML's returns a list of, which may be empty; `UserError`
        where it returns anything else."""
        answer = self._call(function, **settings)
        is_sequence = isinstance(answer, Sequence)
        if not is_sequence or not all(isinstance(worker, Mapping) for worker in answer):
            text = " ".join(str(answer).split())
            raise UserError(f"CML's {function}: gave {text:.200}, no list of workers; {CALL_AGAIN}")
        return answer

    def _call(self, function: str, *arguments: object, **settings: object) -> Any:
        """What a function of CML's module returns.

        Raises:
            UserError: it raised something. Of which kind that may be is not documented; besides
                errors of a connection there are those of an answer that is not JSON, and its own.
        """
        try:
            return getattr(self._module, function)(*arguments, **settings)
        except Exception as error:
            text = " ".join(str(error).split()) or "it does not say why"
            reason = f"{type(error).__name__}: {text:.300}"
            raise UserError(f"CML's {function}: {reason}; {CALL_AGAIN}") from error


def described(listed: Mapping[str, Any], settings: Settings) -> Worker:
    """A worker as CML describes it, whatever words its version uses.

    Args:
        listed: the worker as CML's `list_workers` returns it.
        settings: those of its cluster, which have the size that it waits for.
    """
    status = str(listed.get("status") or "unknown").lower()
    has_ended = bool(listed.get("finished_at")) or status in ENDED_STATUSES
    is_running = not has_ended and status == "running"
    is_waiting = not has_ended and not is_running
    reason = reason_of(listed)
    words = []
    if reason is not None and not is_running:
        words.append(reason)
    elif is_waiting:
        size = size_of_worker(settings)
        words.append(WAITS_FOR.get(status, WAITS_FOR_ROOM).format(size=size))
    if listed.get("app_url") and not is_waiting:
        words.append(f"see {listed['app_url']}")
    text = "; ".join(words) or "it wrote nothing"
    state = _how_it_ended(listed, status) if has_ended else f"is {status}"
    description = f"worker {listed['id']} {state}; {text}"
    shown_status = status
    if reason is not None:
        shown_status = f"{status} ({reason[:MOST_LETTERS]})"
    return Worker(str(listed["id"]), has_ended, description, shown_status)


def _how_it_ended(listed: Mapping[str, Any], status: str) -> str:
    """How a worker that has ended did so, in words."""
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
    """The size of each worker in words."""
    gpus = f"{settings.nvidia_gpu} GPUs"
    if settings.resource_profile is not None:
        return f"resource profile {settings.resource_profile} and {gpus}"
    return f"{settings.cpu:g} cores, {settings.memory:g} GiB and {gpus}"


def remedy_of(settings: Settings) -> str:
    """What to do where CML cannot create a worker."""
    choices = ["ask for fewer pods"]
    if settings.resource_profile is None:
        choices.append(f"less than {size_of_worker(settings)} each")
    else:
        choices.append(f"another profile than --resource-profile {settings.resource_profile}")
    if settings.accelerator_label is not None:
        choices.append(f"another label than --accelerator-label {settings.accelerator_label}")
    return f"{' or '.join(choices)}, or have the quota raised"


def parameters_of(module: ModuleType) -> Collection[str]:
    """Names of the parameters of CML's `launch_workers`, which differ by version."""
    return inspect.signature(module.launch_workers).parameters.keys()


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
