"""A visitor's query: on one table in memory that it can only read, for a limited time."""

from __future__ import annotations

import sqlite3
import time

from zeropods.data.wikisql import Table
from zeropods.sql.execute import Execution

SECONDS = 2.0
INSTRUCTIONS = 1_000
"""SQLite looks at the clock after so many steps of its machine."""
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


class BoundedExecution(Execution):
    """An `Execution` that only reads, and for `seconds` in all; what takes longer gives None, and `overdue` is set."""

    def __init__(self, table: Table, seconds: float = SECONDS) -> None:
        super().__init__(table)
        self.overdue = False
        self._deadline = time.monotonic() + seconds
        self._database.execute("PRAGMA query_only = ON")
        self._database.set_authorizer(_may)
        self._database.set_progress_handler(self._is_over, INSTRUCTIONS)

    def _is_over(self) -> bool:
        self.overdue = time.monotonic() > self._deadline
        return self.overdue


def _may(action: int, first: str | None, *_: object) -> int:
    """Reading the one table, and nothing else."""
    allowed = action in READING and (action != sqlite3.SQLITE_READ or first == "cells")
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
