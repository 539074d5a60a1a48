"""A child process that ends with its parent, and with everything that it started.

`python -m zeropods.launch.child PARENT SIGNAL PROGRAM ARGUMENT ...` runs a program that gets the signal when its parent
is gone, however that went (Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

from zeropods.errors import UserError
from zeropods.programs import own_programs_first

POLL_SECONDS = 0.2
GRACE_SECONDS = 30.0
"""From SIGTERM to SIGKILL: time for a run to write its record."""
HANG_GRACE_SECONDS = 8.0
"""The same for a run that hangs: a rank that hears the signal takes 2 s, and one that is stopped hears nothing."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h; it survives `execve`."""


class OverdueError(Exception):
    """A command took longer than it was given."""


class HangError(OverdueError):
    """A command does nothing any more."""


def check_timeout(seconds: float | None) -> None:
    """Refuse a time that ends a run at once, or never."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UserError(f"timeout of {seconds:g} seconds; expected more than 0")


def overdue(seconds: float) -> str:
    """The reason of a run that was ended because it took too long."""
    # What is left for an attempt is less by the moment that was spent on beginning it.
    return f"took longer than {round(seconds, 2):g} s"


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
        tick: called some times per second while the command runs; a `HangError` that it raises ends the command.
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
        while exit_status(process) is None:
            if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                raise OverdueError(overdue(timeout_seconds))
            tick()
            time.sleep(POLL_SECONDS)
        tick()
    except HangError:
        grace_seconds = min(grace_seconds, HANG_GRACE_SECONDS)
        raise
    finally:
        _end(process, grace_seconds)
    return process.returncode


def child_environment() -> dict[str, str]:
    """This process's environment, with the programs of its Python first."""
    return {**os.environ, "PATH": own_programs_first(os.environ.get("PATH"))}


def exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status, negative for a signal; None while it runs. It is left to be reaped: its number stays its own."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a process has ended, at most so long."""
    deadline = time.monotonic() + seconds
    while exit_status(process) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def bound_argv(argv: list[str], at_end: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command that runs `argv` bound to the process that starts it.

    Args:
        at_end: what the program gets when that process is gone.
    """
    return [sys.executable, "-m", "zeropods.launch.child", str(os.getpid()), str(int(at_end)), *argv]


def bind(parent: int, at_end: int) -> None:
    """Bind this process to its parent, or end it where that is gone already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, at_end)
        if os.getppid() != parent:
            sys.exit(1)


def _end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    try:
        if exit_status(process) is None:
            os.kill(process.pid, signal.SIGTERM)
            await_end(process, grace_seconds)
    finally:
        # The leader is not reaped yet, so the group's number is still its own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _main() -> None:
    parent, at_end, *argv = sys.argv[1:]
    bind(int(parent), int(at_end))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _main()
