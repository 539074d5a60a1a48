"""True peaks of memory by phase, with tensors of known size."""

from __future__ import annotations

import time

import numpy as np
import pytest

from zeropods.measure.phases import Counters, Peaks, Phases
from zeropods.measure.sampler import peak_resident_bytes, reset_peak_resident, resident_bytes
from zeropods.tables import MIB


class ByHand(Counters):
    """Counters that a test sets: the peaks of each phase, and whether the kernel resets its own."""

    def __init__(self, resets: bool) -> None:
        self.now = Peaks(None)
        self.resets = resets

    def peaks(self) -> Peaks:
        return self.now

    def reset(self) -> bool:
        return self.resets


@pytest.fixture
def kernel_resets() -> None:
    if not reset_peak_resident():
        pytest.skip("this kernel does not reset VmHWM")


def hold(mib: int) -> None:
    """Fill so much memory and let it go."""
    np.ones(mib * MIB, dtype=np.uint8)


def test_each_phase_has_the_peak_of_its_own_tensors(kernel_resets: None) -> None:
    phases = Phases(Counters(), 0.0)
    phases.enter("first_step")
    base = resident_bytes()
    hold(128)
    phases.enter("steady")
    hold(64)
    phases.enter("evaluate")
    hold(192)
    phases.enter("save")
    found, most = phases.measured()
    above = {name: (found[name].peak_resident_bytes or 0) - base for name in ("first_step", "steady", "evaluate")}
    assert above == {name: pytest.approx(size * MIB, abs=3 * MIB) for name, size in
                     {"first_step": 128, "steady": 64, "evaluate": 192}.items()}  # fmt: skip
    assert (found["save"].peak_resident_bytes or 0) - base < 3 * MIB
    assert most.resident == max(phase.peak_resident_bytes or 0 for phase in found.values())


def test_a_phase_that_comes_again_keeps_its_largest_peak_and_adds_its_seconds() -> None:
    counters = ByHand(resets=True)
    phases = Phases(counters, 5.0)
    counters.now = Peaks(10)
    for phase, peaks in (
        ("steady", Peaks(30, 60, 90)),
        ("evaluate", Peaks(20, 40, 80)),
        ("steady", Peaks(25, 65, 85)),
        ("evaluate", Peaks(5, 10, 15)),
    ):
        phases.enter(phase)
        counters.now = peaks
        time.sleep(0.01)
    found, most = phases.measured()
    assert found["steady"].seconds >= 0.02
    assert found["load"].seconds == pytest.approx(5.0, abs=0.5)
    peaks_of = {
        name: (p.peak_resident_bytes, p.peak_allocated_bytes, p.peak_reserved_bytes) for name, p in found.items()
    }
    assert peaks_of == {"load": (10, None, None), "steady": (30, 65, 90), "evaluate": (20, 40, 80)}
    assert most == Peaks(30, 65, 90)


def test_where_the_kernel_does_not_reset_only_the_first_phase_and_the_whole_have_a_resident_peak() -> None:
    counters = ByHand(resets=False)
    phases = Phases(counters, 0.0)
    counters.now = Peaks(10)
    phases.enter("first_step")
    counters.now = Peaks(40, allocated=7)
    phases.enter("steady")
    found, most = phases.measured()
    assert [found[name].peak_resident_bytes for name in ("load", "first_step", "steady")] == [10, None, None]
    assert found["first_step"].peak_allocated_bytes == 7
    assert most.resident == 40


def test_the_kernel_s_peak_begins_anew(kernel_resets: None) -> None:
    hold(100)
    before = peak_resident_bytes()
    assert reset_peak_resident()
    after = peak_resident_bytes()
    assert before is not None and after is not None and before - after > 90 * MIB
