"""The demo page with t5-tiny: from the click to the first answer in a browser, and its memory."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from benchmarks.figure import Figure
from tests.chromium import opened_chromium
from tests.full.demo_page import Served, start, untrained_runs
from zeropods.data.sample import write_sample
from zeropods.tables import MIB

RUNS = "random weights, which write longer queries than trained ones"
PEAK = "VmHWM:"
"""What the line of a process's peak memory begins with (proc(5), `status`); it is in KiB."""


def measure(work: Path) -> list[Figure]:
    """Seconds to the first answer after the page was started, and the page's peak memory by
    then."""
    sample = work / "sample"
    write_sample(sample)
    runs = untrained_runs(work / "runs", sample)
    served = start(["-m", "zeropods", "demo", runs, "--data", sample], work / "log")
    try:
        seconds = _first_answer(served)
        resident_bytes = _peak_resident_bytes(served.process.pid)
    finally:
        served.end()
    note = RUNS
    if seconds is None:
        note = "no chromium"
    return [
        Figure(
            name="demo page, t5-tiny, from the click to the first answer",
            value=seconds,
            unit="s",
            asked="under 1",
            note=note,
        ),
        Figure(
            name="demo page with t5-tiny loaded, peak resident",
            value=resident_bytes / MIB,
            unit="MiB",
            asked="under 700",
        ),
    ]


def _first_answer(served: Served) -> float | None:
    """Seconds from the click that asks the preset question to its answer; None without a
    browser."""
    if shutil.which("chromium") is None:
        return None
    with opened_chromium() as browser:
        page = browser.new_page()
        page.goto(served.address)
        page.wait_for_selector("#zp-examples tbody tr")
        began = time.perf_counter()
        page.click("#zp-ask")
        page.wait_for_selector("#zp-answer .zp-card")
        return time.perf_counter() - began


def _peak_resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    lines = [line for line in status.splitlines() if line.startswith(PEAK)]
    (line,) = lines
    kibibytes = line.split()[1]
    return int(kibibytes) * 1024
