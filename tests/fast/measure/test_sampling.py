"""A rank's memory: true peaks by phase, samples over time with their statistics; and what a run ran on."""

import csv
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zeropods import __version__
from zeropods.measure import environment
from zeropods.measure.record import PhasePeak
from zeropods.measure.sampling import (
    SAMPLED_COLUMNS,
    Counters,
    Phases,
    Sampler,
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
)
from zeropods.tables import MIB


def peak(resident: int | None = None, allocated: int | None = None, reserved: int | None = None) -> PhasePeak:
    bytes_of = {"peak_resident_bytes": resident, "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
    return PhasePeak(seconds=0.0, **bytes_of)


class ByHand(Counters):
    """Counters that a test sets: the peaks of each phase, and whether the kernel resets its own."""

    def __init__(self, resets: bool) -> None:
        self.now = peak()
        self.resets = resets

    def peaks(self) -> PhasePeak:
        return self.now

    def reset(self) -> bool:
        return self.resets


def hold(mib: int) -> None:
    """Fill so much memory and let it go."""
    np.ones(mib * MIB, dtype=np.uint8)


def test_each_phase_has_the_peak_of_its_own_arrays() -> None:
    if not reset_peak_resident():
        pytest.skip("this kernel does not reset VmHWM")
    phases, base = Phases(Counters(), 0.0), resident_bytes()
    # Above 32 MiB the allocator always asks for new pages; below, it may have some that earlier tests have left.
    sizes = {"first_step": 80, "steady": 40, "evaluate": 120, "save": 0}
    for phase, mib in sizes.items():
        phases.enter(phase)
        hold(mib)
    found, most = phases.measured()
    above = {phase: (found[phase].peak_resident_bytes or 0) - base for phase in sizes}
    # The allocator keeps a little beside the arrays.
    assert above == {phase: pytest.approx(mib * MIB, abs=3 * MIB) for phase, mib in sizes.items()}
    assert most.peak_resident_bytes == max(phase.peak_resident_bytes or 0 for phase in found.values())
    hold(50)
    before = peak_resident_bytes()
    assert reset_peak_resident()
    assert (before or 0) - (peak_resident_bytes() or 0) > 45 * MIB


def test_a_phase_that_comes_again_keeps_its_largest_peak_and_adds_its_seconds() -> None:
    counters = ByHand(resets=True)
    phases = Phases(counters, 5.0)
    counters.now = peak(10)
    for phase, peaks in (
        ("steady", peak(30, 60, 90)),
        ("evaluate", peak(20, 40, 80)),
        ("steady", peak(25, 65, 85)),
        ("evaluate", peak(5, 10, 15)),
    ):
        phases.enter(phase)
        counters.now = peaks
        time.sleep(0.01)
    found, most = phases.measured()
    assert found["steady"].seconds >= 0.02
    assert found["load"].seconds == pytest.approx(5.0, abs=0.5)
    expected = {"load": peak(10), "steady": peak(30, 65, 90), "evaluate": peak(20, 40, 80)}
    assert {name: replace(each, seconds=0.0) for name, each in found.items()} == expected
    assert replace(most, seconds=0.0) == peak(30, 65, 90)


def test_where_the_kernel_does_not_reset_only_the_first_phase_and_the_whole_have_a_resident_peak() -> None:
    counters = ByHand(resets=False)
    phases = Phases(counters, 0.0)
    for phase, peaks in (("first_step", peak(10)), ("steady", peak(40, allocated=7))):
        counters.now = peaks
        phases.enter(phase)
    found, most = phases.measured()
    assert [found[name].peak_resident_bytes for name in ("load", "first_step", "steady")] == [10, None, None]
    assert (found["first_step"].peak_allocated_bytes, most.peak_resident_bytes) == (7, 40)


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


def test_each_sample_is_a_line_and_counts_in_the_statistics(tmp_path: Path) -> None:
    began, path = time.time(), tmp_path / "memory" / "3.csv"
    found = sample(path, 4, phase="evaluate").statistics()
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    count = len(lines)
    assert list(lines[0]) == ["unix_seconds", "phase", *SAMPLED_COLUMNS]
    assert [line["resident_bytes"] for line in lines] == [str(100 * (number + 1)) for number in range(count)]
    # What was not measured is empty, and not zero.
    assert [lines[0]["power_watts"], lines[1]["power_watts"], lines[0]["allocated_bytes"]] == ["", "70.25", ""]
    assert {line["phase"] for line in lines} == {"evaluate"}
    times = [float(line["unix_seconds"]) for line in lines]
    assert times == sorted(times) and began - 0.001 <= times[0] and times[-1] <= time.time() + 0.001
    assert set(found) == {"resident_bytes", "power_watts"}
    resident = found["resident_bytes"]
    assert (resident.samples, resident.minimum, resident.peak) == (count, 100.0, 100.0 * count)
    assert resident.mean == pytest.approx(50.0 * (count + 1))
    assert found["power_watts"].samples == count // 2


def test_a_long_run_is_sampled_less_often_and_its_statistics_are_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeropods.measure.sampling.SAMPLES_BEFORE_DOUBLING", 4)
    found = sample(tmp_path / "0.csv", 14).statistics()["resident_bytes"]
    with open(tmp_path / "0.csv", newline="") as file:
        times = [float(line["unix_seconds"]) for line in csv.DictReader(file)]
    pauses = [0.005 * 2 ** (number // 4) for number in range(len(times))]
    # Times are rounded to milliseconds; a sample may come late, but not early.
    assert (np.diff(times)[:-1] > np.array(pauses[:-2]) - 0.002).all()
    values = 100 * np.arange(1, len(times) + 1)
    pauses[-1] = pauses[-2]
    assert (found.peak, found.mean) == (values[-1], pytest.approx(np.average(values, weights=pauses)))
    assert found.mean > values.mean()


def test_a_later_attempt_goes_on_in_the_file_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "0.csv"
    sample(path, 2)
    kept = path.read_text()
    path.write_text(kept + "1700000000.5,ste")
    sample(path, 2)
    assert path.read_text().startswith(f"{kept}1700000000.5,ste\n")
    later = path.read_text().removeprefix(f"{kept}1700000000.5,ste\n")
    assert later.splitlines()[0].endswith(",steady,,,,100,,,,,")
    assert path.read_text().count("unix_seconds") == 1


def test_a_full_disk_ends_the_sampling_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "0.csv"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), Sampler(path, 0.005, Counting(), lambda: "load"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: No space left on device; memory is no longer sampled"
    ]


# What a run ran on: versions, and a GPU through NVML's real binding, which loads a small library of our own.

SOURCE = """
#include <string.h>

struct memory { unsigned version; unsigned long long total, reserved, free, used; };
struct rates { unsigned gpu, memory; };
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
static int device;

int nvmlInitWithFlags(unsigned flags) { return OK; }
const char *nvmlErrorString(int status) { return "said by the test"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{ *handle = &device; return strcmp(uuid, "GPU-1234") ? NOT_FOUND : OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{ *handle = &device; return strcmp(bus, "00000000:3B:00.0") ? NOT_FOUND : OK; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory *found)
{
    if (handle != &device || found->version != (sizeof *found | 2u << 24)) return INVALID;
    found->used = 7; found->reserved = 11; found->total = 1000; return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, struct rates *found) { found->gpu = 87; found->memory = 12; return OK; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return NOT_SUPPORTED; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{ *millijoules = 1234567; return OK; }
"""
ASK = """
import json, sys
from zeropods.measure.sampling import find_gpu
found = [find_gpu(names) for names in json.loads(sys.argv[1])]
whole = lambda gpu: {"energy": gpu.energy_joules(), "total": gpu.total_bytes()}
print(json.dumps([None if gpu is None else gpu.read() | whole(gpu) for gpu in found]))
"""
TOLD = {
    "device_used_bytes": 7,
    "utilization_percent": 87,
    "memory_utilization_percent": 12,
    "power_watts": None,
    "energy": 1234.567,
    "total": 1000,
}


def ask(library: Path, *names: list[str]) -> list[object]:
    """What a process that finds such a library is told of GPUs, each with several names."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    command = [sys.executable, "-c", ASK, json.dumps(names)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=240).stdout)


def test_a_gpu_is_found_by_any_of_its_names_and_read_and_there_is_none_without_a_driver(tmp_path: Path) -> None:
    assert ask(tmp_path, ["GPU-1234"]) == [None]
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libnvidia-ml.so.1")]
    subprocess.run(made, input=SOURCE, text=True, check=True, timeout=240)
    found = ask(tmp_path, ["GPU-1234"], ["MIG-1234", "GPU-1234"], ["GPU-other", "00000000:3B:00.0"], ["GPU-other"])
    assert found == [TOLD, TOLD, TOLD, None]


def test_a_record_names_the_versions_of_the_code_that_ran_and_of_what_is_installed() -> None:
    found = environment.versions()
    assert found["zeropods"] == __version__ and found["torch"] == importlib.metadata.version("torch")
