"""A process that inherits the orphans below it, reaps them, and can end all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from zeropods.pods.agent.descendants import Tree
from zeropods.pods.processes import send

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
PAUSE_SECONDS = 0.02


def become_subreaper() -> None:
    """From now on whatever is orphaned below this process becomes its child (Linux 3.4)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, signum: signal.Signals) -> None:
    """Get `signum` when the parent ends, at once if it has ended already; survives `execve`, not `fork`."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def reap() -> tuple[dict[int, int], bool]:
    """Collect children that have ended.

    Returns:
        Their exit codes by pid, negative for a signal, and whether there are other children. For a
        subreaper "no children" means that no descendant is left either.
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = os.waitstatus_to_exitcode(status)


def end_descendants(seconds: float) -> bool:
    """SIGKILL everything below this subreaper until nothing is left; False if something still is after `seconds`."""
    deadline = time.monotonic() + seconds
    while reap()[1]:
        for process in Tree.read().below(os.getpid()):
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
