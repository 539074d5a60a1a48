"""The process of a rank, as the process that starts it sees it: its output is passed on, and how it
ended is noted."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zeropods.launch.forks import Forked
from zeropods.launch.logs import LAST_LINES
from zeropods.measure import environment
from zeropods.measure.exits import write_exit
from zeropods.measure.record import RankExit

PIPE_CHUNK_BYTES = 1 << 16
DRAIN_SECONDS = 1.0
"""Seconds to wait, after a rank's end, for output that is still in its pipe: what it left running
may keep it open."""
NOTE_SECONDS = 2.0
"""Seconds that this process waits at its own end for notes of ranks that have just ended."""
Process = subprocess.Popen[bytes] | Forked
"""Type of a process that was started here, or forked on request."""


class WatchedRank:
    """A rank whose output passes through this process, used like a `subprocess.Popen`;
    `start_watched` makes one.

    Threads pass the output on and wait for the end, of which `ranks/N.exit` keeps a note.
    `returncode` is set only once the note of the rank's end is written: whoever reacts to it finds
    the note.
    """

    def __init__(self, rank: int, folder: Path, process: Process, reading: int, to: int) -> None:
        """Watch a process that has been started.

        Args:
            rank: its number in the run.
            folder: the run folder.
            reading: file descriptor from which its stdout and stderr are read; it is closed at the
                end.
            to: file descriptor to which they are passed on.
        """
        self.pid = process.pid
        self.returncode: int | None = None
        self._process = process
        self._folder = folder
        self._exit = RankExit(rank=rank, host=environment.host(), pid=process.pid)
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._lock = threading.Lock()
        """Guards the last lines, which one thread adds and another reads."""
        self._write_note()
        # Whoever opened `to` may close it while something that the rank left running still writes.
        self._reader = threading.Thread(
            target=self._pass_on, args=(reading, os.dup(to)), daemon=True
        )
        self._reader.start()
        self._waiter = threading.Thread(target=self._await_end, daemon=True)
        self._waiter.start()
        atexit.register(self._waiter.join, NOTE_SECONDS)

    def poll(self) -> int | None:
        """Exit status of the process, negative for a signal; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the rank has ended and the note of it is written, and return the exit status;
        `subprocess.TimeoutExpired` after `timeout` seconds without one."""
        self._waiter.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"rank {self._exit.rank}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process unless it is known to have ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _pass_on(self, reading: int, to: int) -> None:
        """Pass the output on until the rank, and whatever it has started, have closed it; keep its
        last lines. Both descriptors are closed then."""
        unfinished = b""
        has_reader = True
        # `to` is opened only to be closed with the pipe: what is written goes to the descriptor.
        with open(reading, "rb", buffering=0) as pipe, open(to, "wb", buffering=0):
            while chunk := pipe.read(PIPE_CHUNK_BYTES):
                *lines, unfinished = (unfinished + chunk).split(b"\n")
                # A line that never ends takes no more memory than this.
                unfinished = unfinished[-PIPE_CHUNK_BYTES:]
                self._keep(lines)
                # Where nobody reads any more, the pipe is still emptied, so that the rank is
                # neither blocked nor ended.
                if has_reader:
                    has_reader = _write_all(to, chunk)
        self._keep([unfinished])

    def _keep(self, lines: list[bytes]) -> None:
        """Add lines to the last ones, but for empty ones."""
        with self._lock:
            for line in lines:
                # A progress bar writes over its own line.
                text = line.decode("utf-8", "replace").rstrip().rpartition("\r")[2]
                if text:
                    self._last_lines.append(text)

    def _await_end(self) -> None:
        """Wait for the end of the process, write the note of it, then set `returncode`."""
        status = _wait_for_status(self._process)
        self._exit.ended_unix_seconds = time.time()
        self._exit.status = status
        self._reader.join(DRAIN_SECONDS)
        self._write_note()
        self.returncode = status
        atexit.unregister(self._waiter.join)

    def _write_note(self) -> None:
        """Write what is known of the rank's process now in place of what was known before."""
        with self._lock:
            last_lines = list(self._last_lines)
        # Training itself complains about a disk that is full, and a run needs no notes to go on.
        with suppress(OSError):
            write_exit(self._folder, self._exit, last_lines)


def start_watched(
    rank: int, folder: Path, start: Callable[[int], Process | None], to: int
) -> WatchedRank | None:
    """Start a rank and watch it.

    Args:
        rank: its number in the run.
        folder: the run folder.
        start: starts the process, or returns None if it cannot; it is given the file descriptor for
            stdout and stderr.
        to: file descriptor to which the output is passed on; it stays open.

    Returns:
        The rank; None where `start` has started nothing.
    """
    reading, writing = os.pipe()
    process = None
    try:
        process = start(writing)
    finally:
        # The process has its own copy. While this one is open, reading would never come to an end.
        os.close(writing)
        if process is None:
            os.close(reading)
    if process is None:
        return None
    return WatchedRank(rank, folder, process, reading, to)


def _write_all(to: int, chunk: bytes) -> bool:
    """Write all of a chunk; returns whether that was possible, which it is not where nobody reads
    any more."""
    while chunk:
        try:
            chunk = chunk[os.write(to, chunk) :]
        except OSError:
            return False
    return True


def _wait_for_status(process: Process) -> int:
    """Wait for the end of a process, reap it, and return its exit status, negative for a signal."""
    if isinstance(process, Forked):
        return process.wait()
    status = None
    # First without reaping: DeepSpeed's launcher waits for the ranks that it ends too, and whoever
    # comes second is told nothing.
    with suppress(ChildProcessError):
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if end is not None:
            was_killed = end.si_code != os.CLD_EXITED
            status = -end.si_status if was_killed else end.si_status
    reaped_status = process.wait()
    if status is None:
        return reaped_status
    return status
