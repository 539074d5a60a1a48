"""How the threads of a process wait for one another."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait; call it before torch is loaded.

    By default they spin, and where another process wants the core (several pods on one machine, a
    browser, a second run) each parallel region then waits out a time slice. Training t5-tiny on two
    threads beside one busy process: 84 samples/s spinning, 178 sleeping; on a quiet machine it is the
    other way round, about 240 against 170 (single short runs). We take the one that does not collapse.
    A value that the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
