"""What a rank is doing, and the true peaks of its memory while it does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zeropods.measure.record import PHASES, PhasePeak
from zeropods.measure.sampler import peak_resident_bytes, reset_peak_resident

NOTHING = PhasePeak(seconds=0.0, peak_resident_bytes=None, peak_allocated_bytes=None, peak_reserved_bytes=None)


@dataclass(frozen=True)
class Peaks:
    """Peaks since the counters were last reset, in bytes; None where there is no such counter."""

    resident: int | None
    allocated: int | None = None
    reserved: int | None = None


class Counters:
    """The kernel's peak of this process; a subclass adds an allocator's."""

    def peaks(self) -> Peaks:
        """The peaks since the last reset."""
        return Peaks(peak_resident_bytes())

    def reset(self) -> bool:
        """Reset the peaks; False where the kernel's peak cannot be reset."""
        return reset_peak_resident()


@dataclass(frozen=True)
class _State:
    ended: dict[str, PhasePeak]
    phase: str
    since: float
    resident_is_its_own: bool


class Phases:
    """Follows a rank through its phases; the first, `load`, began with the process."""

    def __init__(self, counters: Counters, age_seconds: float) -> None:
        """`age_seconds`: how long ago the process began."""
        self.counters = counters
        self.most = Peaks(None)
        # One object, replaced whole: an interrupted change of phase leaves the one before or the one after.
        self._state = _State({}, PHASES[0], time.monotonic() - age_seconds, True)

    @property
    def phase(self) -> str:
        """The present phase."""
        return self._state.phase

    def enter(self, phase: str) -> str:
        """End a phase and begin another; returns the one that ended."""
        before = self._state.phase
        if phase != before:
            ended, self.most = self.measured()
            self._state = _State(ended, phase, time.monotonic(), self.counters.reset())
        return before

    def measured(self) -> tuple[dict[str, PhasePeak], Peaks]:
        """Peaks by phase, the present one included, and the peaks of all of them."""
        state, most, now = self._state, self.most, self.counters.peaks()
        earlier = state.ended.get(state.phase, NOTHING)
        resident = now.resident if state.resident_is_its_own else None
        present = PhasePeak(
            seconds=earlier.seconds + time.monotonic() - state.since,
            peak_resident_bytes=larger(earlier.peak_resident_bytes, resident),
            peak_allocated_bytes=larger(earlier.peak_allocated_bytes, now.allocated),
            peak_reserved_bytes=larger(earlier.peak_reserved_bytes, now.reserved),
        )
        highest = Peaks(
            larger(most.resident, now.resident),
            larger(most.allocated, now.allocated),
            larger(most.reserved, now.reserved),
        )
        return {**state.ended, state.phase: present}, highest


def larger(one: int | None, other: int | None) -> int | None:
    """The larger of two figures, either of which may not have been measured."""
    return max((value for value in (one, other) if value is not None), default=None)
