"""Look after workers while they start: say how far they are, and stop waiting for one that never comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zeropods.errors import UserError
from zeropods.pods.backends.fleet import Fleet
from zeropods.pods.backends.workers import Worker, has_ended, is_pending, status_of
from zeropods.pods.state import Settings

LIST_SECONDS = 1.0
"""Between two questions to the backend."""
PENDING_SECONDS = 5.0
"""A worker that is still to start is mentioned after so long."""
BAR_SECONDS = 2.0
REASONS = ("reason", "status_reason", "status_message", "message")
"""Under these names a backend may say why a worker waits."""


class Arrivals:
    """Called with the ids of the workers that have registered, some times a second."""

    def __init__(self, fleet: Fleet, workers: tuple[str, ...], settings: Settings, bar: Any) -> None:
        self._fleet = fleet
        self._workers = workers
        self._settings = settings
        self._bar = bar
        self._began = self._listed = time.monotonic()
        self._mentioned: set[str] = set()

    def __call__(self, registered: frozenset[str]) -> None:
        """`UserError` for a worker that has ended."""
        self._bar.update(len(registered) - self._bar.n)
        now = time.monotonic()
        if now - self._listed < LIST_SECONDS:
            return
        self._listed = now
        for worker in self._fleet.listed(self._workers):
            if has_ended(worker):
                raise UserError(self._ended(worker))
            if is_pending(worker) and now - self._began >= PENDING_SECONDS:
                self._mention(worker)

    def missing(self, registered: frozenset[str]) -> str:
        """Who has not registered, and what it does instead."""
        absent = [worker for worker in self._fleet.listed(self._workers) if str(worker["id"]) not in registered]
        return "; ".join(self._described(worker) for worker in absent)

    def _described(self, worker: Worker) -> str:
        if is_pending(worker):
            return f"{_shown(worker)} is {status_of(worker)}: {self._reason(worker)}"
        return f"{_shown(worker)} is {status_of(worker)}{self._last_line(worker)}"

    def _ended(self, worker: Worker) -> str:
        code = worker.get("exit_code")
        status = f"exit code {code}" if code is not None else f"status {status_of(worker)}"
        return f"{_shown(worker)} ended with {status} before the cluster was ready{self._last_line(worker)}"

    def _last_line(self, worker: Worker) -> str:
        line = self._fleet.last_line(str(worker["id"]))
        if line:
            return f"; its last line: {line}"
        return f"; see {worker['app_url']}" if worker.get("app_url") else "; it wrote nothing"

    def _reason(self, worker: Worker) -> str:
        asked = self._settings
        size = f"{asked.cpu:g} cores, {asked.memory:g} GiB and {asked.nvidia_gpu} GPUs"
        said = next((str(worker[name]) for name in REASONS if worker.get(name)), "")
        return said or f"it waits for {size}; quota or a free machine is missing"

    def _mention(self, worker: Worker) -> None:
        if worker["id"] not in self._mentioned:
            self._mentioned.add(worker["id"])
            self._bar.clear()
            print(f"{_shown(worker)} is {status_of(worker)}: {self._reason(worker)}", file=sys.stderr, flush=True)


@contextmanager
def counting(total: int) -> Iterator[Any]:
    """A bar of the pods that are there, where somebody looks at it and it takes longer than two seconds."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(
        desc="pods", unit=" pods", total=total, file=sys.stderr, delay=BAR_SECONDS, leave=False, disable=not shown
    ) as bar:
        yield bar


def _shown(worker: Worker) -> str:
    address = worker.get("ip_address")
    return f"worker {worker['id']} ({address})" if address else f"worker {worker['id']}"
