"""The four calls inside Cloudera Machine Learning, where pods are CML workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.backends.workers import Worker

MODULES = ("cml.workers_v1", "cdsw")
"""The newer and the older name of the same functions."""
SESSION_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_PROJECT")


class CmlWorkers:
    """CML's module, called only with the parameters that its documentation names.

    Raises:
        UserError: neither module is there.
    """

    def __init__(self) -> None:
        module = workers_module()
        if module is None:
            raise UserError(
                f"backend cml: neither {' nor '.join(MODULES)} can be imported; run this in a CML session, "
                "or choose --backend local"
            )
        self._module = module

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
        """Start CML workers. `kernel` is for legacy engines, and `name` not in every version: left out if usual."""
        unusual = {"kernel": kernel} if kernel != "python3" else {}
        named = {"name": name} if name else {}
        return self._module.launch_workers(
            n=n, cpu=cpu, memory=memory, nvidia_gpu=nvidia_gpu, script=script, code=code, env=dict(env or {}),
            **unusual, **named,
        )  # fmt: skip

    def list_workers(self) -> list[Worker]:
        """The session's workers."""
        return self._module.list_workers()

    def await_workers(
        self,
        workers: Sequence[Worker | str] = (),
        wait_for_completion: bool = True,
        timeout_seconds: float | None = None,
    ) -> dict[str, list[Worker]]:
        """Wait; None is no time limit, which CML calls 0."""
        return self._module.await_workers(
            workers or self.list_workers(),
            wait_for_completion=wait_for_completion,
            timeout_seconds=timeout_seconds or 0,
        )

    def stop_workers(self, *ids: str) -> Any:
        """End workers; none for no id, whatever CML would do."""
        return self._module.stop_workers(*ids) if ids else None


def workers_module() -> ModuleType | None:
    """CML's module, None where it is not installed."""
    for name in MODULES:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def is_session() -> bool:
    """Whether this process runs in a CML session that can start workers."""
    return any(map(os.environ.get, SESSION_VARIABLES)) and workers_module() is not None
