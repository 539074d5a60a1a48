"""What a supervisor sees of a run, moment by moment."""

from __future__ import annotations

import os
import subprocess
import time

from zeropods.launch.heartbeat import Heartbeat
from zeropods.launch.output import Output
from zeropods.launch.ranks import Ranks
from zeropods.launch.standstill import Standstill
from zeropods.launch.verdict import Sight

LATE_SECONDS = 3.0
"""A look that comes so long after the one before: this process was stopped, or its machine slept."""


class Sighting:
    """Looks at launcher, agents, ranks and output; remembers since when things are as they are."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        heartbeat: Heartbeat,
        ranks: Ranks,
        written: Output,
        signals: list[str],
        timeout_seconds: float | None = None,
        standstill: Standstill | None = None,
    ) -> None:
        self._process = process
        self._heartbeat = heartbeat
        self._ranks = ranks
        self._written = written
        self._signals = signals
        self._timeout_seconds = timeout_seconds
        self._standstill = standstill
        self._started = self._looked = time.monotonic()
        self._first_rank: float | None = None
        self._measured: float | None = None

    def now(self) -> Sight:
        """What is seen at this moment."""
        now = time.monotonic()
        if now - self._looked > LATE_SECONDS:
            self._heartbeat.forgive()
        self._looked = now
        pulses = self._heartbeat.pulses()
        if self._first_rank is None and any(pulse.most for pulse in pulses):
            self._first_rank = now
        if self._measured is None and self._ranks.have_all_measured():
            self._measured = now
        quiet = any(pulse.most and not pulse.processes for pulse in pulses) or self._measured is not None
        return Sight(
            pulses=pulses,
            launcher_status=self._launcher_status(),
            signal=self._signals[0] if self._signals else None,
            failed_sessions=self._written.failed_sessions(),
            done=self._ranks.done() if quiet else frozenset(),
            since_start=now - self._started,
            timeout_seconds=self._timeout_seconds,
            since_first_rank=0.0 if self._first_rank is None else now - self._first_rank,
            since_measured=0.0 if self._measured is None else now - self._measured,
            stands_still=self._standstill.look() if self._standstill and self._measured is None else None,
        )

    def _launcher_status(self) -> int | None:
        """The launcher's exit status, negative for a signal. It is left to be reaped: its number stays its own."""
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
