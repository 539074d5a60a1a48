"""A rank's memory over time, and resident memory of a process."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from zeropods.measure.record import Sampled

# Statistics of a column of numbers that are not kept.


class Series:
    """Count, largest, smallest and mean of the numbers that were added; None is not a number."""

    def __init__(self) -> None:
        self.samples = 0
        self.total = 0.0
        self.largest = -math.inf
        self.smallest = math.inf

    def add(self, value: float | None) -> None:
        """Count a value in, if it was measured."""
        if value is None:
            return
        self.total += value
        self.largest = max(self.largest, value)
        self.smallest = min(self.smallest, value)
        self.samples += 1

    def sampled(self) -> Sampled | None:
        """The statistics; None where nothing was measured."""
        if self.samples == 0:
            return None
        mean = self.total / self.samples
        return Sampled(samples=self.samples, peak=float(self.largest), mean=mean, minimum=float(self.smallest))


# A rank's memory over time: a thread beside the training one, and the file that it appends to.

COLUMNS = (
    "allocated_bytes",
    "reserved_bytes",
    "device_used_bytes",
    "resident_bytes",
    "utilization_percent",
    "power_watts",
)
HEADER = ",".join(("unix_seconds", "phase", *COLUMNS))
JOIN_SECONDS = 5.0
"""A driver that does not answer must not keep a run from ending."""

log = logging.getLogger(__name__)


class Sampler:
    """Appends a line to `memory/N.csv` every so often, while it is entered.

    What happens to it is told in one log line and ends the sampling, never the run.
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
            path: the file; a later attempt of the run goes on in it.
            interval: seconds between two samples; 0: no samples.
            read: the present values of some of `COLUMNS`; None is left empty.
            phase: what the rank is doing.
        """
        self.path = path
        self.interval = min(interval, threading.TIMEOUT_MAX)
        self.series = {column: Series() for column in COLUMNS}
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
            self._thread.join(JOIN_SECONDS)

    def statistics(self) -> dict[str, Sampled]:
        """Peak, mean and minimum so far, of the columns that hold numbers."""
        found = {column: series.sampled() for column, series in self.series.items()}
        return {column: sampled for column, sampled in found.items() if sampled is not None}

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+", encoding="utf-8") as file:
                file.write(_beginning(file))
                ending = False
                while not ending:
                    self._sample(file)
                    ending = self._ending.wait(self.interval)
                self._sample(file)
        except OSError as error:
            log.warning("%s: %s; memory is sampled no more", self.path, error.strerror or error)

    def _sample(self, file: TextIO) -> None:
        values = self._read()
        for column, series in self.series.items():
            series.add(values.get(column))
        numbers = (_text(values.get(column)) for column in COLUMNS)
        file.write(",".join((f"{time.time():.3f}", self._phase(), *numbers)) + "\n")
        file.flush()


def _text(value: float | None) -> str:
    return "" if value is None else str(round(value, 3))


def _beginning(file: TextIO) -> str:
    """What must stand before the next line: the header of a new file, the end of a line that was cut off."""
    if file.tell() == 0:
        return HEADER + "\n"
    file.seek(file.tell() - 1)
    return "" if file.read() == "\n" else "\n"


# Resident memory of this process: now, and the kernel's own peak of it, which can be begun anew.

PAGE = os.sysconf("SC_PAGE_SIZE")
RESET_PEAK = "5"
"""What `/proc/PID/clear_refs` takes for "set VmHWM to the present size" (Linux 4.0, proc(5))."""
SLACK_BYTES = 64 * 2**20
"""The kernel counts pages of each core apart and adds them up now and then."""


def resident_bytes() -> int | None:
    """Bytes in memory now; None where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except FileNotFoundError:
        return None


def peak_resident_bytes() -> int | None:
    """VmHWM: the most bytes in memory since the process began or the peak was reset; None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return None
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)
    return int(peak.split()[1]) * 1024 if peak else None


def reset_peak_resident() -> bool:
    """Begin the peak anew; False where the kernel (or a sandbox before it) does not."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        peak, now = peak_resident_bytes(), resident_bytes()
        # Some sandboxes take the write and do nothing.
        return peak is not None and now is not None and peak <= now + SLACK_BYTES
    return False
