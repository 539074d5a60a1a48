"""How the threads of a process wait for one another."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait; call it before torch is loaded.

    By default they spin, and where another process wants the core (several pods on one machine, a
    browser, a second run) each parallel region then waits out a time slice: a matrix product of
    t5-tiny ran 3 times slower beside one busy process, and with sleeping threads 1.1 times.
    A value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
