"""Which rank began the end of a run, and why, judging by what the ranks measured and what their
parents saw of them.

The cause is the rank that ended first for a reason of its own. The others lose their connection to
it and say so in torch's words; they are not to blame, and those words are not the reason.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zeropods.launch.logs import OF_SCRIPT
from zeropods.measure.exits import ExitNote
from zeropods.measure.heartbeat import Beat
from zeropods.measure.record import UNSAID, RankMeasurement, lost_connection
from zeropods.tables import counted

ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b.*")
"""Matches the last line of a traceback."""
NO_LAST_WORDS = re.compile(r"\s|\[[\d:., -]+\] \[[A-Z]+\] |.*Warning: ")
"""Matches lines that say nothing about an end: indented ones, those of DeepSpeed's logger, and
warnings."""
SHELL_SIGNALS = range(128, 128 + 65)
"""Exit statuses by which a shell tells that its command was killed by a signal: 128 plus the
signal's number."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """What is known of the end of one rank."""

    rank: int
    pod: str | None
    measured: RankMeasurement | None = None
    """What the rank measured; None where it left nothing."""
    note: ExitNote | None = None
    """What the process that started the rank saw up to the supervisor's verdict; None where nobody
    watched the rank."""
    beat: Beat | None = None
    """Its last heartbeat; a rank that ends in order leaves none."""
    steps_done: int = 0
    """Number of optimizer steps that any rank is known to have done, which none can do without the
    others."""
    session_status: int | None = None
    """Exit status of the launcher's session on the rank's pod, over ssh or by an agent; None where
    the session did not fail, or the pod has other ranks too."""

    @property
    def exit_status(self) -> int | None:
        """Exit status of the rank, negative for a signal; None if its end was not seen, or if it
        ran until the verdict."""
        return None if self.note is None else self.note.exit.status

    @property
    def ended_well(self) -> bool:
        """Whether the rank finished its work."""
        return self.measured is not None and self.measured.status == "ok"

    @property
    def is_unknown(self) -> bool:
        """Whether the rank left nothing, and nobody saw what became of it."""
        return self.measured is None and self.note is None

    @property
    def lost_others(self) -> bool:
        """Whether all that the rank says is that it lost its connection to other ranks."""
        if self.measured is not None:
            return lost_connection(self.measured.reason)
        if self.note is None or self.exit_status is None:
            return False
        # A rank cannot foresee SIGKILL, so its last lines do not say why it ended.
        if self.exit_status == -signal.SIGKILL:
            return False
        return any(lost_connection(line) for line in self.note.last_lines)

    @property
    def was_interrupted(self) -> bool:
        """Whether the rank was asked to end, and had ended before the supervisor's verdict."""
        if self.exit_status is None:
            return False
        if self.measured is not None:
            return self.measured.status == "interrupted"
        return self.exit_status == -signal.SIGTERM

    @property
    def has_own_cause(self) -> bool:
        """Whether the rank ended badly for a reason of its own, by all that is known."""
        if self.lost_others or self.was_interrupted:
            return False
        if self.measured is not None:
            return self.measured.status in ("oom", "failed")
        return self.exit_status is not None

    @property
    def ended_at(self) -> float:
        """When the rank ended, in seconds since 1970 by its pod's clock; infinite where that is not
        known."""
        if self.measured is not None and self.measured.ended_unix_seconds is not None:
            return self.measured.ended_unix_seconds
        if self.note is not None and self.note.exit.ended_unix_seconds is not None:
            return self.note.exit.ended_unix_seconds
        return math.inf

    @property
    def refused(self) -> bool:
        """Whether the rank ended with an error status, without a measurement."""
        return self.measured is None and self.exit_status is not None and self.exit_status > 0

    @property
    def says_why(self) -> bool:
        """Whether an error message is among the rank's last lines."""
        lines = [] if self.note is None else self.note.last_lines
        return any(OF_SCRIPT.match(line) or ERROR_LINE.fullmatch(line) for line in lines)

    def described(self, *, memory_is_counted: bool = True) -> str:
        """How the rank, which left no measurement, ended: as text, with its phase, steps and last
        words as far as they are known.

        Args:
            memory_is_counted: whether the kernel of the rank's pod counts the processes that it
                kills for lack of memory.
        """
        how = self._how_it_ended(memory_is_counted)
        if self.beat is not None:
            how += f", phase {self.beat.phase}, {counted(self.steps_done, 'step')} done"
        last_words = self._last_words()
        if last_words is not None:
            how += f"; its last words: {last_words}"
        return how

    def _how_it_ended(self, memory_is_counted: bool) -> str:
        """How the rank's process ended or, where that was not seen, its launcher's session."""
        status = self.exit_status
        if status is None:
            if self.session_status is None:
                return UNSAID
            return f"its launcher's session {_end_of_session(self.session_status)}"
        if status == 0:
            return "ended with status 0 before the run was finished"
        if status > 0:
            return f"ended with status {status}"
        name = signal_name(-status)
        # Where the kernel counts the processes that it kills for lack of memory, it is known by now
        # that this rank is none of them.
        if name == "SIGKILL" and not memory_is_counted:
            return "killed by SIGKILL, perhaps by the kernel for lack of memory"
        return f"killed by {name}"

    def _last_words(self) -> str | None:
        """The last line by which the rank may say why it ended; None where it wrote no such line,
        or where SIGKILL ended it, which a rank cannot foresee."""
        if self.note is None or self.exit_status == -signal.SIGKILL:
            return None
        lines = [line for line in self.note.last_lines if not NO_LAST_WORDS.match(line)]
        return lines[-1] if lines else None


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that ended first for a reason of its own; None if none did."""
    causes = [end for end in ends if end.has_own_cause]
    if not causes:
        return None
    causes.sort(key=lambda end: end.ended_at)
    first = causes[0]
    if first.refused and not first.says_why:
        # Where all ranks refuse to train, one of them says why, and the others may end before it
        # without a word.
        for end in causes:
            if end.refused and end.says_why:
                return end
    return first


def _end_of_session(status: int) -> str:
    """How a launcher's session ended, by its exit status, as text."""
    if status in SHELL_SIGNALS:
        return f"ended with status {status}, as after {signal_name(status - 128)}"
    return f"ended with status {status}"


def signal_name(number: int) -> str:
    """Name of a signal, such as `SIGKILL`; `signal NUMBER` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
