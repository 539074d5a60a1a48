"""Memory over time: the file, its statistics, and what happens to the sampler."""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from zeropods.measure.sampler import COLUMNS, Sampler, resident_bytes
from zeropods.tables import MIB

KNOWN = """
import json, time
from pathlib import Path
import numpy
from zeropods.measure.sampler import resident_bytes
from zeropods.measure.sampler import Sampler
read = lambda: {"resident_bytes": resident_bytes()}
with Sampler(Path("memory/0.csv"), 0.02, read, lambda: "load") as sampler:
    time.sleep(0.1)
    before = sampler.statistics()["resident_bytes"].peak
    kept = numpy.ones(256 * 2**20, dtype=numpy.uint8)
    time.sleep(0.1)
print(json.dumps([before, sampler.statistics()["resident_bytes"].peak]))
"""


class Counting:
    """A reader of 100, 200, 300 ... bytes; every second time the power is not told."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Mapping[str, float | None]:
        self.calls += 1
        return {"resident_bytes": 100 * self.calls, "power_watts": None if self.calls % 2 else 70.25}


def sample(path: Path, count: int, phase: str = "steady") -> Sampler:
    """Sample until so many samples are there; one more comes at the end."""
    read = Counting()
    with Sampler(path, 0.005, read, lambda: phase) as sampler:
        deadline = time.monotonic() + 10
        while read.calls < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return sampler


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_child_that_allocates_256_mib_is_seen_to_grow_by_them(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KNOWN], cwd=tmp_path, capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert after - before == pytest.approx(256 * MIB, rel=0.02)
    seen = [int(row["resident_bytes"]) for row in rows(tmp_path / "memory" / "0.csv")]
    assert max(seen) - seen[0] == pytest.approx(256 * MIB, rel=0.02)


def test_the_file_has_a_line_a_sample_with_time_and_phase(tmp_path: Path) -> None:
    began = time.time()
    sample(tmp_path / "memory" / "3.csv", 4, phase="evaluate")
    lines = rows(tmp_path / "memory" / "3.csv")
    assert list(lines[0]) == ["unix_seconds", "phase", *COLUMNS]
    assert [line["resident_bytes"] for line in lines[:3]] == ["100", "200", "300"]
    assert {line["phase"] for line in lines} == {"evaluate"}
    times = [float(line["unix_seconds"]) for line in lines]
    assert times == sorted(times) and began - 0.001 <= times[0] and times[-1] <= time.time() + 0.001


def test_what_was_not_measured_is_empty_and_not_zero(tmp_path: Path) -> None:
    sample(tmp_path / "0.csv", 3)
    first, second, *_ = rows(tmp_path / "0.csv")
    assert (first["power_watts"], second["power_watts"]) == ("", "70.25")
    assert {first[column] for column in ("allocated_bytes", "device_used_bytes")} == {""}


def test_statistics_are_of_the_columns_that_hold_numbers(tmp_path: Path) -> None:
    sampler = sample(tmp_path / "0.csv", 3)
    found, count = sampler.statistics(), len(rows(tmp_path / "0.csv"))
    assert set(found) == {"resident_bytes", "power_watts"}
    resident = found["resident_bytes"]
    assert (resident.samples, resident.minimum, resident.peak) == (count, 100.0, 100.0 * count)
    assert resident.mean == pytest.approx(50.0 * (count + 1))
    assert found["power_watts"].samples == count // 2


def test_a_later_attempt_goes_on_in_the_file_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "0.csv"
    sample(path, 2)
    kept = path.read_text()
    path.write_text(kept + "1700000000.5,ste")
    sample(path, 2)
    lines = path.read_text().splitlines()
    assert lines[: len(kept.splitlines())] == kept.splitlines()
    assert lines.count(lines[0]) == 1
    assert lines[len(kept.splitlines())] == "1700000000.5,ste"
    assert lines[len(kept.splitlines()) + 1].endswith(",steady,,,,100,,")


def test_an_interval_of_zero_reads_and_writes_nothing(tmp_path: Path) -> None:
    read = Counting()
    with Sampler(tmp_path / "0.csv", 0, read, lambda: "load") as sampler:
        pass
    assert (read.calls, sampler.statistics(), list(tmp_path.iterdir())) == (0, {}, [])


def test_a_full_disk_ends_the_sampling_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "0.csv"
    path.symlink_to("/dev/full")
    read = Counting()
    with caplog.at_level(logging.WARNING), Sampler(path, 0.005, read, lambda: "load"):
        time.sleep(0.1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: No space left on device; memory is sampled no more"
    ]


def test_the_thread_ends_with_the_attempt(tmp_path: Path) -> None:
    read = Counting()
    with Sampler(tmp_path / "0.csv", 60.0, read, lambda: "load"):
        began = time.monotonic()
    assert time.monotonic() - began < 1.0
    calls = read.calls
    time.sleep(0.05)
    assert read.calls == calls == 2


def test_resident_bytes_are_what_the_kernel_says_of_this_process() -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    said = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    assert resident_bytes() == pytest.approx(said, rel=0.02)
