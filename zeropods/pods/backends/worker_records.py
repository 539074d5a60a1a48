"""Local workers on disk: a file for each, written by whoever starts it, stops it or notices its end."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from zeropods import atomic
from zeropods.pods.backends.workers import Worker


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
        atomic.write_json(self._folder / f"{record['id']}.json", record)


def now() -> str:
    """The time, as records have it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
