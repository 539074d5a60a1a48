"""Run a command that must show life soon and end in time; it is killed with all that it started otherwise."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

POLL_SECONDS = 0.05
MAX_OUTPUT_BYTES = 1_048_576
"""Of each stream; the last ones are kept."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a bounded command ended."""

    status: int | None
    """Its exit status, negative for a signal; None where it was killed by us."""
    alive_seconds: float | None
    """From the start to the first sign of life; None where there was none."""
    output: str
    errors: str


class _Pipes:
    """What a process has written so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.output = bytearray()
        self.errors = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ, self.output)
        self._selector.register(process.stderr, selectors.EVENT_READ, self.errors)

    def read(self, seconds: float) -> bool:
        """Wait that long for output; whether some came."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        came = False
        for key, _ in self._selector.select(seconds):
            block = os.read(key.fd, 65_536)
            key.data.extend(block)
            del key.data[:-MAX_OUTPUT_BYTES]
            came = came or bool(block)
            if not block:
                self._selector.unregister(key.fileobj)
        return came

    def close(self) -> None:
        self._selector.close()

    def texts(self) -> tuple[str, str]:
        return self.output.decode(errors="replace"), self.errors.decode(errors="replace")


def run_bounded(
    argv: list[str],
    *,
    alive: Callable[[str, str], bool],
    alive_seconds: float,
    seconds: float,
    stop: threading.Event,
) -> Ended:
    """Run a command in a process group of its own.

    Args:
        alive: whether what was written so far, (stdout, stderr), shows that the other side is alive.
        alive_seconds: the command is killed if it has not shown life by then.
        seconds: the command is killed if it has not ended by then.
        stop: the command is killed once this is set.
    """
    started = time.monotonic()
    life: float | None = None
    with _started(argv) as process, closing(_Pipes(process)) as pipes:
        try:
            while not (ended := _has_ended(process)) and not stop.is_set():
                if time.monotonic() - started > (alive_seconds if life is None else seconds):
                    break
                if pipes.read(POLL_SECONDS) and life is None and alive(*pipes.texts()):
                    life = time.monotonic() - started
            while ended and pipes.read(0):
                pass
        finally:
            # The leader is not reaped yet, so the group's number is still its own.
            os.killpg(process.pid, signal.SIGKILL)
    output, errors = pipes.texts()
    if life is None and ended and alive(output, errors):
        life = time.monotonic() - started
    return Ended(status=process.returncode if ended else None, alive_seconds=life, output=output, errors=errors)


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended, which leaves it to be reaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
