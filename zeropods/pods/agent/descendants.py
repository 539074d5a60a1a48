"""Processes below another one, read from /proc, and signals that reach only the process that was meant."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
READINGS = 4
"""A parent that ends while /proc is read leaves its child with nobody above it; then it is read again."""


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same number by its start."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start: field 22 of /proc/PID/stat."""
    parent: int = field(compare=False)
    name: str = field(compare=False)
    """At most 15 bytes of its program's name."""
    zombie: bool = field(compare=False)
    """Ended, and not yet reaped."""


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


def read_process(pid: int) -> Process | None:
    """One process; None where there is none of this number."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name may hold blanks and brackets: the last bracket ends it.
    head, _, tail = stat.rpartition(b")")
    fields = tail.split()
    name = head.partition(b"(")[2].decode(errors="replace")
    return Process(pid, int(fields[19]), int(fields[1]), name, zombie=fields[0] in (b"Z", b"X"))


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


def send(process: Process, signum: signal.Signals) -> bool:
    """Send a signal to this process and no other; False where it has ended.

    The handle is opened first and the start compared then, so that a number that went to another
    process meanwhile is noticed.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return False
        return _is_still(process) and _kill(process.pid, signum)  # Linux before 5.3
    try:
        if not _is_still(process):
            return False
        signal.pidfd_send_signal(handle, signum)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def is_there(process: Process) -> bool:
    """Whether it still runs; one that has ended and was not reaped does not."""
    now = read_process(process.pid)
    return now == process and not now.zombie


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


def _is_still(process: Process) -> bool:
    return read_process(process.pid) == process


def _kill(pid: int, signum: signal.Signals) -> bool:
    try:
        os.kill(pid, signum)
    except OSError:
        return False
    return True
