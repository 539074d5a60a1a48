"""Processes below another one, read from /proc, and what can be asked about each."""

from __future__ import annotations

import os
from collections.abc import Iterator

from zeropods.pods.processes import PROC, Process, read_process

READINGS = 4
"""A parent that ends while /proc is read leaves its child with nobody above it; then it is read again."""


class Tree:
    """All processes at one moment, by parent."""

    def __init__(self, table: dict[int, Process]) -> None:
        self.table = table
        self._children: dict[int, list[Process]] = {}
        for process in table.values():
            self._children.setdefault(process.parent, []).append(process)

    @classmethod
    def read(cls) -> Tree:
        """Read /proc; processes that start or end meanwhile may be missing."""
        lost: set[int] = set()
        for _ in range(READINGS):
            before, table = lost, {process.pid: process for process in _processes()}
            lost = {process.pid for process in table.values() if process.parent and process.parent not in table}
            # The same ones again: their parents are there, and hidden from this user.
            if lost == before:
                break
        return cls(table)

    def children(self, pid: int) -> list[Process]:
        """Processes whose parent is `pid`."""
        return self._children.get(pid, [])

    def below(self, pid: int) -> list[Process]:
        """Every descendant of `pid`, parents before their children."""
        found = list(self.children(pid))
        for process in found:
            found += self.children(process.pid)
        return found


def variable(process: Process, name: str) -> str | None:
    """An environment variable as the process was started with; None where it has none or cannot be asked."""
    marker = f"{name}=".encode()
    for entry in _read(process, "environ").split(b"\0"):
        if entry.startswith(marker):
            return entry[len(marker) :].decode(errors="replace")
    return None


def arguments(process: Process) -> list[str]:
    """The process's argument list; empty where it cannot be asked."""
    return _read(process, "cmdline").decode(errors="replace").split("\0")[:-1]


def child_pids(pid: int) -> list[int] | None:
    """Children of a process of one thread; None where this kernel does not tell. Far cheaper than a tree."""
    try:
        return [int(child) for child in (PROC / str(pid) / "task" / str(pid) / "children").read_bytes().split()]
    except OSError:
        return None


def _processes() -> Iterator[Process]:
    for name in os.listdir(PROC):
        if name.isdecimal() and (process := read_process(int(name))) is not None:
            yield process


def _read(process: Process, file: str) -> bytes:
    try:
        return (PROC / str(process.pid) / file).read_bytes()
    except OSError:
        return b""
