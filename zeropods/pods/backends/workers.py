"""The four calls by which workers are started and ended: those of CML's `cml.workers_v1`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from zeropods import files

# The four calls by which workers are started and ended: those of CML's `cml.workers_v1`.
#
# Source: Cloudera's documentation, "Workers API" (https://docs.cloudera.com/machine-learning/).

Worker = dict[str, Any]
"""A description of a worker: `id`, `app_url`, and once it is listed `status`, `ip_address`, `created_at`,
`running_at`, `finished_at`, `exit_code`."""

ENDED = frozenset(
    {"succeeded", "success", "failed", "failure", "error", "stopped", "killed", "timedout", "terminated", "exited"}
)
"""The words that a status can be when a worker is over."""


class Workers(Protocol):
    """Where workers run."""

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
        """Start workers and return their descriptions at once.

        Args:
            cpu: cores of each; `memory`: gigabytes of each; `nvidia_gpu`: GPUs of each.
            script: a Python file that each runs; else
            code: Python code, or a command after `!`.
        """
        ...

    def list_workers(self) -> list[Worker]:
        """Every worker there is or was."""
        ...

    def await_workers(
        self,
        workers: Sequence[Worker | str] = (),
        wait_for_completion: bool = True,
        timeout_seconds: float | None = None,
    ) -> dict[str, list[Worker]]:
        """Wait until workers have ended well or, if not `wait_for_completion`, run.

        Returns:
            `workers`: those that do; `failures`: those that do not, because they failed or time ran out.
        """
        ...

    def stop_workers(self, *ids: str) -> Any:
        """End workers."""
        ...


def status_of(worker: Worker) -> str:
    """The status in small letters; CML's words vary with its version."""
    return str(worker.get("status") or "unknown").lower()


def has_ended(worker: Worker) -> bool:
    """Whether a listed worker is over, well or not."""
    return bool(worker.get("finished_at")) or status_of(worker) in ENDED


def is_pending(worker: Worker) -> bool:
    """Whether a listed worker has still to start."""
    return not has_ended(worker) and status_of(worker) != "running"


# Local workers on disk: a file for each, written by whoever starts it, stops it or notices its end.


class WorkerRecords:
    """The workers of one cluster: CML's keys, and `process`, by which the worker is known again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[Worker]:
        """All records, in the order of their start."""
        found = (json.loads(path.read_text(encoding="utf-8")) for path in self._folder.glob("*.json"))
        return sorted(found, key=lambda record: (record["created_at"], record["id"]))

    def write(self, record: Worker) -> None:
        """Write a record, or write it anew."""
        files.write_json(self._folder / f"{record['id']}.json", record)


def now() -> str:
    """The time, as records have it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
