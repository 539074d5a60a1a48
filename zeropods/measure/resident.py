"""Resident memory of this process: now, and the kernel's own peak of it, which can be begun anew."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
