"""Interrupts that come at a bad moment are taken up after it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STACKS = int(signal.SIGRTMIN) + 7
"""Asks a rank for the stacks of its threads; by default it ends a process, so only who catches it may get it."""


@contextmanager
def deferred() -> Iterator[None]:
    """Let what is inside come to its end before Ctrl-C or SIGTERM take effect.

    Without it, an interrupt could fall between starting a process and writing down that it is ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            os.kill(os.getpid(), first)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `SystemExit` inside, where they would end the process without clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    plain = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in plain:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in plain:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
