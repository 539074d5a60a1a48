"""A process that is known again later: its number alone may by then be another's."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process of this machine; numbers are used again, but not with the same start time and boot."""

    pid: int
    start_ticks: int
    """Field 22 of `/proc/PID/stat` (proc(5)): clock ticks from boot."""
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number now; it has not been reaped."""
        return cls(pid, _start_ticks(pid) or 0, _boot())

    def is_alive(self) -> bool:
        """Whether it still runs; one that only waits to be reaped does not."""
        return self.boot == _boot() and _start_ticks(self.pid, zombies=False) == self.start_ticks

    def send(self, number: signal.Signals) -> None:
        """Send a signal, to this process or to none."""
        handle = self._open()
        if handle is None:
            return
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)

    def await_end(self, seconds: float) -> bool:
        """Wait until it has ended; returns whether it has."""
        handle = self._open()
        if handle is None:
            return True
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(max(0.0, seconds) * 1000))
        finally:
            os.close(handle)

    def _open(self) -> int | None:
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_alive():
            return handle
        os.close(handle)
        return None


def end(processes: Iterable[Process], seconds: float) -> None:
    """End processes together: SIGTERM, SIGKILL for those that are there `seconds` later; none is left."""
    left = list(processes)
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
        for process in left:
            process.send(number)
        deadline = time.monotonic() + patience
        left = [process for process in left if not process.await_end(deadline - time.monotonic())]


def _start_ticks(pid: int, *, zombies: bool = True) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything; the state is the first field after it.
    values = stat.rpartition(")")[2].split()
    return int(values[19]) if zombies or values[0] not in "ZX" else None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
