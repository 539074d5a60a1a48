"""Processes that are known again later, and signals that reach only the process that was meant."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
PAUSE_SECONDS = 0.05
KILL_SECONDS = 5.0
"""What is there so long after SIGKILL hangs in the kernel."""


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same number by its start."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start: field 22 of /proc/PID/stat (proc(5))."""
    parent: int = field(default=0, compare=False)
    name: str = field(default="", compare=False)
    """At most 15 bytes of its program's name."""
    zombie: bool = field(default=False, compare=False)
    """Ended, and not yet reaped."""


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


def is_there(process: Process) -> bool:
    """Whether it still runs; one that has ended and was not reaped does not."""
    now = read_process(process.pid)
    return now == process and not now.zombie


def send(process: Process, signum: int) -> bool:
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


def end(processes: Iterable[Process], seconds: float) -> None:
    """End processes together: SIGTERM, SIGKILL for those that are there `seconds` later; none is left."""
    left = list(processes)
    for signum, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, KILL_SECONDS)):
        for process in left:
            send(process, signum)
        deadline = time.monotonic() + patience
        while (left := [process for process in left if is_there(process)]) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)


def to_record(process: Process) -> list[object]:
    """A process on disk: after another boot the same number and start may be another's."""
    return [process.pid, process.start_ticks, _boot()]


def from_record(record: list[object]) -> Process | None:
    """The process of a record; None where it ended with an earlier boot."""
    pid, start_ticks, boot = record
    if boot != _boot() or not isinstance(pid, int) or not isinstance(start_ticks, int):
        return None
    return Process(pid, start_ticks)


def _is_still(process: Process) -> bool:
    return read_process(process.pid) == process


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except OSError:
        return False
    return True


def _boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
