"""Run a program that ends with its parent: `python -m zeropods.launch.bound PARENT SIGNAL PROGRAM ARGUMENT ...`.

The kernel sends the signal to a bound program when its parent is gone, however that went (Linux).
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h; it survives `execve`."""


def bound_argv(argv: list[str], at_end: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command that runs `argv` bound to the process that starts it.

    Args:
        at_end: what the program gets when that process is gone.
    """
    return [sys.executable, "-m", "zeropods.launch.bound", str(os.getpid()), str(int(at_end)), *argv]


def bind(parent: int, at_end: int) -> None:
    """Bind this process to its parent, or end it where that is gone already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, at_end)
        if os.getppid() != parent:
            sys.exit(1)


def main() -> None:
    """Bind this process to its parent, then become the program."""
    parent, at_end, *argv = sys.argv[1:]
    bind(int(parent), int(at_end))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
