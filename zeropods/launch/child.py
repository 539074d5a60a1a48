"""A child process in a session of its own, ended with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO

from zeropods.errors import UserError
from zeropods.launch.bound import bound_argv
from zeropods.launch.outcome import overdue
from zeropods.programs import own_programs_first

POLL_SECONDS = 0.2
GRACE_SECONDS = 30.0
"""From SIGTERM to SIGKILL: time for a run to write its record."""


STILL_GRACE_SECONDS = 8.0
"""The same where a run stands still: who hears takes 2 s, and who is stopped does not."""


class OverdueError(Exception):
    """A command took longer than it was given."""


class StandstillError(OverdueError):
    """A command does nothing any more."""


def check_timeout(seconds: float | None) -> None:
    """Refuse a time that ends a run at once, or never."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UserError(f"timeout of {seconds:g} seconds; expected more than 0")


def run_child(
    argv: list[str],
    output: IO[bytes],
    tick: Callable[[], object] = lambda: None,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float | None = None,
) -> int:
    """Run a command to its end and return its exit status, negative for a signal.

    Where the caller is interrupted, or the command's time is over, it gets SIGTERM, then SIGKILL; either
    way nothing of its process group is left when this returns or raises.

    Args:
        output: takes what the command writes on stdout and stderr.
        tick: called some times a second while the command runs; a `StandstillError` of it ends the command.
        timeout_seconds: a command that takes longer is ended, and `OverdueError` raised.
    """
    check_timeout(timeout_seconds)
    started = time.monotonic()
    process = subprocess.Popen(
        bound_argv(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=child_environment(),
    )
    try:
        while not has_ended(process):
            if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                raise OverdueError(overdue(timeout_seconds))
            tick()
            time.sleep(POLL_SECONDS)
        tick()
    except StandstillError:
        grace_seconds = min(grace_seconds, STILL_GRACE_SECONDS)
        raise
    finally:
        _end(process, grace_seconds)
    return process.returncode


def child_environment() -> dict[str, str]:
    """This process's environment, with the programs of its Python first."""
    return {**os.environ, "PATH": own_programs_first(os.environ.get("PATH"))}


def _end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    try:
        if not has_ended(process):
            os.kill(process.pid, signal.SIGTERM)
            _await_end(process, grace_seconds)
    finally:
        # The leader is not reaped yet, so the group's number is still its own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended, which leaves it to be reaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
