"""What one attempt measures of itself: its phases, its steps, its memory over time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from zeropods.measure import environment
from zeropods.measure.phases import Phases
from zeropods.measure.rank import RankMeasurement
from zeropods.measure.sampler import Sampler
from zeropods.train.beating import Beating
from zeropods.train.device import MemoryReader, counters, gpu_by_nvml, gpu_name
from zeropods.train.step_clock import step_clock


class Meter:
    """Measures while it is entered, and fills in a rank's measurement at any time."""

    def __init__(self, folder: Path, measured: RankMeasurement, *, interval: float, age_seconds: float) -> None:
        """Begin with phase `load`.

        Args:
            folder: the run folder.
            interval: seconds between two samples of memory; 0: none.
            age_seconds: how long ago the process began.
        """
        measured.machine, measured.gpu = environment.machine(), gpu_name()
        self.phases = Phases(counters(), age_seconds)
        self.clock = step_clock()
        self._gpu = gpu_by_nvml()
        self._energy = self._gpu.energy_joules() if self._gpu else None
        path = folder / "memory" / f"{measured.rank}.csv"
        self.read = MemoryReader(self._gpu)
        self.sampler = Sampler(path, interval, self.read, lambda: self.phases.phase)
        self.beating = Beating(folder, measured.rank, lambda: self.phases.phase)
        self.failed_in: str | None = None
        """The phase in which an error came up."""

    def __enter__(self) -> Meter:
        self.beating.__enter__()
        self.sampler.__enter__()
        return self

    def __exit__(self, *about: object) -> None:
        if about[0] is not None:
            self.failed_in = self.failed_in or self.phases.phase
        self.sampler.__exit__(*about)
        self.beating.__exit__(*about)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase between steps: the device is waited for at both ends, and no step counts it in."""
        self.clock.settle()
        before = self.phases.enter(phase)
        self.beating.mark()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            self.clock.settle()
            self.phases.enter(before)
            self.beating.mark()
            self.clock.restart()

    def fill(self, measured: RankMeasurement) -> None:
        """Write what was measured so far into a measurement, whole steps only."""
        steps = self.clock.steps()
        measured.step_seconds = [step.seconds for step in steps]
        measured.step = measured.first_step + len(steps)
        measured.source_tokens = sum(int(step.tokens.source) for step in steps)
        measured.target_tokens = sum(step.tokens.target for step in steps)
        measured.padded_tokens = sum(step.tokens.padded for step in steps)
        measured.phases, most = self.phases.measured()
        measured.peak_resident_bytes = most.resident
        measured.peak_allocated_bytes, measured.peak_reserved_bytes = most.allocated, most.reserved
        measured.wall_seconds = sum(phase.seconds for phase in measured.phases.values())
        measured.sampled = self.sampler.statistics()
        energy = self._gpu.energy_joules() if self._gpu else None
        if energy is not None and self._energy is not None:
            measured.energy_joules = energy - self._energy
