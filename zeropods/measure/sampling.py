"""Memory of a rank, and use of its GPU and cores: over time in `memory/N.csv` of a run folder;
peaks by phase."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from zeropods.measure.record import PHASES, PhasePeak, Statistics
from zeropods.tables import MIB

SAMPLED_COLUMNS = (
    "allocated_bytes",
    "reserved_bytes",
    "device_used_bytes",
    "resident_bytes",
    "utilization_percent",
    "power_watts",
    "memory_utilization_percent",
    "cpu_percent",
    "io_wait_percent",
)
"""Columns with numbers; each is empty where its value is not known."""
HEADER = ("unix_seconds", "phase", *SAMPLED_COLUMNS)
SAMPLES_BEFORE_DOUBLING = 4_096
"""Number of samples after which the pause between samples doubles, each time anew: three days take
30,000 samples."""
SAMPLER_JOIN_SECONDS = 5.0
"""Seconds to wait for the thread to end: a driver that does not answer must not keep a run from
ending."""

log = logging.getLogger(__name__)


class Sampler:
    """A thread that appends a line to `memory/N.csv` at an interval, inside a `with` block.

    A file that cannot be written is reported in one log line and ends the sampling, never the run.
    """

    def __init__(
        self,
        path: Path,
        interval: float,
        read: Callable[[], Mapping[str, float | None]],
        phase: Callable[[], str],
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            path: the file; a later attempt of the run appends to it.
            interval: seconds between two samples at first; 0: no samples.
            read: returns the present values of some of `SAMPLED_COLUMNS`; None is left empty in the
                file.
            phase: returns what the rank is doing.
        """
        self.path = path
        self.interval = interval
        self.last: Mapping[str, float | None] = {}
        """The values of the latest sample, by column."""
        self._values = {column: array("d") for column in SAMPLED_COLUMNS}
        """By column, in turn a value and the seconds until the next sample: v, s, v, s ... One
        array, so that no copy of it has a value without its seconds."""
        self._read = read
        self._phase = phase
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Sampler:
        if self.interval:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self.interval:
            self._thread.join(SAMPLER_JOIN_SECONDS)

    def statistics(self) -> dict[str, Statistics]:
        """Statistics of the samples so far, weighted by time, by column; columns without numbers
        are left out."""
        # Copied first: the thread may still add to them.
        copies = {column: values[:] for column, values in self._values.items()}
        statistics = {}
        for column, values in copies.items():
            statistics_of_column = Statistics.of(values[::2], weights=values[1::2])
            if statistics_of_column is not None:
                statistics[column] = statistics_of_column
        return statistics

    def _run(self) -> None:
        """Sample into the file until the `with` block ends; runs in the thread."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+", newline="", encoding="utf-8") as file:
                self._sample_into(file)
        except OSError as error:
            log.warning("%s: %s; memory is no longer sampled", self.path, error.strerror or error)

    def _sample_into(self, file: TextIO) -> None:
        """Append samples to an open file until the `with` block ends, and one more then."""
        lines = csv.DictWriter(file, HEADER, lineterminator="\n")
        if file.tell() == 0:
            lines.writeheader()
        else:
            _end_cut_off_line(file)
        is_last = False
        pause = 0.0
        for number in count():
            # No pause follows the last sample, which weighs as much as the one before it.
            if not is_last:
                doublings = number // SAMPLES_BEFORE_DOUBLING
                pause = min(self.interval * 2**doublings, threading.TIMEOUT_MAX)
            lines.writerow(self._sample(pause))
            file.flush()
            if is_last:
                return
            is_last = self._ending.wait(pause)

    def _sample(self, pause: float) -> dict[str, str | float]:
        """Take a sample, keep it in `last` and in `_values`, and return the line for it.

        Args:
            pause: seconds until the next sample, the weight of this one.
        """
        self.last = self._read()
        rounded = {}
        for column, value in self.last.items():
            if value is not None:
                self._values[column].extend((value, pause))
                rounded[column] = round(value, 3)
        return {"unix_seconds": f"{time.time():.3f}", "phase": self._phase(), **rounded}


def _end_cut_off_line(file: TextIO) -> None:
    """Write the line break that the last line of a file lacks where a process was killed while it
    wrote. The file is not empty, and is at its end."""
    file.seek(file.tell() - 1)
    if file.read() != "\n":
        file.write("\n")


# What else is sampled: a GPU, through NVIDIA's management library, and the cores.


@dataclass(frozen=True)
class Gpu:
    """One GPU, read through NVML as `nvidia-smi` does, all processes together; None where NVML
    gives no value."""

    nvml: Any
    """The module `pynvml`, initialised."""
    handle: Any
    """NVML's handle of the device."""

    def read(self) -> dict[str, float | None]:
        """Used memory (bytes), utilisation of the GPU and of its memory (percent of the driver's
        last period) and power (watts) now."""
        nvml = self.nvml
        handle = self.handle
        return {
            # Version 2 leaves out what the driver reserves for itself, as `nvidia-smi` does.
            "device_used_bytes": self._value_of(
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used
            ),
            "utilization_percent": self._value_of(
                lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            ),
            "memory_utilization_percent": self._value_of(
                lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory
            ),
            "power_watts": self._value_of(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1_000),
        }

    def total_bytes(self) -> int | None:
        """Memory of the whole GPU, or of a slice of it, in bytes, as `nvidia-smi` shows it."""
        nvml = self.nvml
        total = self._value_of(
            lambda: nvml.nvmlDeviceGetMemoryInfo(self.handle, nvml.nvmlMemory_v2).total
        )
        return None if total is None else int(total)

    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded, by the GPU's own counter (Volta and later)."""
        return self._value_of(
            lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1_000
        )

    def _value_of(self, read: Callable[[], float]) -> float | None:
        """What a call of NVML returns; None where NVML has no such value."""
        try:
            return read()
        except self.nvml.NVMLError:
            return None


SHORTEST_SECONDS = 0.1
"""Shortest time between two readings: ten ticks of the clock by which the kernel counts a process's
time."""


class Cpu:
    """How busy this process keeps the cores that it may use, and how much the machine waits for its
    disks, since the last reading."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._cores = len(os.sched_getaffinity(0))
        self._machine_times = psutil.cpu_times_percent
        # The first call of each begins the period that the next call reports on.
        self._process.cpu_percent()
        self._machine_times()
        self._since = time.monotonic()
        """Beginning of the present period, by the monotonic clock."""

    def read(self) -> dict[str, float | None]:
        """The process's share of its cores, and the share of the machine's time spent waiting for
        disks (percent), since the last reading; a new period begins.

        Empty, and the period goes on, where too little time has passed for the kernel's clock ticks
        to show a share.
        """
        if time.monotonic() - self._since < SHORTEST_SECONDS:
            return {}
        self._since = time.monotonic()
        # psutil counts a whole core as 100 %; clock ticks may make it a little more than all cores.
        cpu_percent = min(100.0, self._process.cpu_percent() / self._cores)
        return {
            "cpu_percent": cpu_percent,
            "io_wait_percent": getattr(self._machine_times(), "iowait", None),
        }


def find_gpu(names: Iterable[str]) -> Gpu | None:
    """The GPU of the first UUID (`GPU-...`) or PCI bus id (`00000000:3B:00.0`) that NVML knows.

    It is not found by its number: CUDA numbers devices in its own order, and `CUDA_VISIBLE_DEVICES`
    hides some, so that the number might be that of another GPU.

    Returns:
        None where there is no NVML, or where NVML knows none of the names.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    for name in names:
        is_uuid = name.startswith(("GPU-", "MIG-"))
        try:
            if is_uuid:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            else:
                handle = pynvml.nvmlDeviceGetHandleByPciBusId(name)
        except pynvml.NVMLError:
            continue
        return Gpu(pynvml, handle)
    return None


# Resident memory of this process: now, and the kernel's own peak of it, which can be reset.

RESET_PEAK = "5"
"""Value that `/proc/PID/clear_refs` takes to mean "set VmHWM to the present size" (Linux 4.0,
proc(5))."""
SLACK_BYTES = 64 * MIB
"""Bytes of tolerance: the kernel counts pages of each core separately and adds them up only now and
then."""


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """VmHWM: the most bytes in memory since the process began or the peak was reset; None where it
    is not reported."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
    return None


def reset_peak_resident() -> bool:
    """Reset the kernel's peak of this process's resident memory to what is resident now; False
    where the kernel (or a sandbox in front of it) does not do so."""
    # A kernel that refuses raises; the peak then goes on from the beginning of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        peak = peak_resident_bytes()
        # Some sandboxes accept the write and do nothing.
        return peak is not None and peak <= resident_bytes() + SLACK_BYTES
    return False


# What a rank is doing, and the true peaks of its memory while it does so.

PEAKS = ("peak_resident_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
NO_PEAK = PhasePeak(seconds=0.0, **dict.fromkeys(PEAKS))


class Counters:
    """The kernel's peak memory of this process; a subclass adds the peaks of an allocator."""

    def peaks(self) -> PhasePeak:
        """The peaks since the last reset; the seconds are 0."""
        return replace(NO_PEAK, peak_resident_bytes=peak_resident_bytes())

    def reset(self) -> bool:
        """Reset the peaks; False where the kernel's peak cannot be reset."""
        return reset_peak_resident()


@dataclass(frozen=True)
class _State:
    """A rank's present phase, and what was measured of earlier ones."""

    ended: dict[str, PhasePeak]
    """Seconds and peaks by phase; a phase that comes again is added to."""
    phase: str
    since: float
    """When the present phase began, by the monotonic clock."""
    resident_is_its_own: bool
    """Whether the kernel's peak was reset when the present phase began."""


class Phases:
    """Follows a rank through its phases; the first, `load`, began with the process."""

    def __init__(self, counters: Counters, age_seconds: float) -> None:
        """Begin with the first phase; `age_seconds` is how long ago the process began."""
        self.counters = counters
        self.most = NO_PEAK
        """Peaks over all phases that have ended; its seconds are not counted."""
        # One object, replaced as a whole: a signal that interrupts a change of phase leaves either
        # the old state or the new one.
        self._state = _State({}, PHASES[0], time.monotonic() - age_seconds, True)

    @property
    def phase(self) -> str:
        """The present phase."""
        return self._state.phase

    def enter(self, phase: str) -> str:
        """End the present phase, begin another and reset the peaks, unless they are the same;
        returns the phase before."""
        before = self._state.phase
        if phase != before:
            ended, self.most = self.measured()
            self._state = _State(ended, phase, time.monotonic(), self.counters.reset())
        return before

    def measured(self) -> tuple[dict[str, PhasePeak], PhasePeak]:
        """Seconds and peaks by phase, the present one included, and the peaks over all phases."""
        state = self._state
        peaks_since_reset = self.counters.peaks()
        present = replace(peaks_since_reset, seconds=time.monotonic() - state.since)
        if not state.resident_is_its_own:
            # A peak that was not reset may be that of an earlier phase.
            present.peak_resident_bytes = None
        earlier = state.ended.get(state.phase, NO_PEAK)
        by_phase = {**state.ended, state.phase: _together(earlier, present)}
        return by_phase, _together(self.most, peaks_since_reset)


def _together(one: PhasePeak, other: PhasePeak) -> PhasePeak:
    """Combine two measurements: seconds add up; of two peaks the larger one counts, and one that is
    None does not."""
    peaks = {}
    for key in PEAKS:
        known = []
        for measured in (one, other):
            peak = getattr(measured, key)
            if peak is not None:
                known.append(peak)
        peaks[key] = max(known, default=None)
    return PhasePeak(seconds=one.seconds + other.seconds, **peaks)
