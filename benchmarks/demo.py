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


def measure(work: Path) -> list[Figure]:
    """Seconds to the first answer after the page was started, and the page's peak memory by then."""
    write_sample(work / "sample")
    runs = untrained_runs(work / "runs", work / "sample")
    served = start(["-m", "zeropods", "demo", runs, "--data", work / "sample"], work / "log")
    try:
        seconds = _first_answer(served)
        resident = _peak_resident_bytes(served.process.pid) / MIB
    finally:
        served.end()
    name = "demo page, t5-tiny, from the click to the first answer"
    missing = "no chromium" if seconds is None else RUNS
    return [
        Figure(name=name, value=seconds, unit="s", asked="under 1", note=missing),
        Figure(name="demo page with t5-tiny loaded, peak resident", value=resident, unit="MiB", asked="under 700"),
    ]


def _first_answer(served: Served) -> float | None:
    """Seconds from the click that asks the preset question to its answer; None without a browser."""
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
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
