"""What a run ran on: versions, revision, hardware, and what NVIDIA's management library says of a GPU."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zeropods import __version__

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers")


def host() -> str:
    """The pod that this process runs on: the address that its agent gave it, else the machine's name."""
    return os.environ.get("ZEROPODS_POD") or socket.gethostname()


def versions() -> dict[str, str | None]:
    """Versions of what decides a run's figures, our own being this code's; None where a package is missing."""
    found: dict[str, str | None] = {"python": platform.python_version(), "zeropods": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_revision(folder: Path) -> str | None:
    """The commit of a checkout, with `-dirty` where files differ from it; None outside one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""What tells processors apart that share a name in virtual machines (`AMD EPYC`); the first that one has counts."""


def hardware() -> dict[str, object]:
    """CPU model and its widest instructions, cores this process may use, memory in bytes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return {
        "cpu": told.get("model name") or platform.processor() or None,
        "instructions": next((each for each in INSTRUCTIONS if each in told.get("flags", "").split()), None),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def machine() -> str:
    """The kernel's boot id: it differs between machines, not between pods of one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_age_seconds() -> float:
    """Seconds since this process began, interpreter and imports included."""
    # The name, in parentheses, may hold blanks; the start is field 22, in clock ticks since boot (proc(5)).
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


class Gpu:
    """One GPU, read through NVML as `nvidia-smi` does, all processes together; None where it does not tell."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml`: the module `pynvml`, initialised; `handle`: the device's."""
        self._nvml = nvml
        self._handle = handle

    def read(self) -> dict[str, float | None]:
        """Used memory (bytes), utilisation of the GPU and of its memory (percent of the driver's last period) and
        power (watts) now."""
        nvml, handle = self._nvml, self._handle
        return {
            # Version 2 leaves out what the driver keeps for itself, as `nvidia-smi` does.
            "device_used_bytes": self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used),
            "utilization_percent": self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory_utilization_percent": self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory),
            "power_watts": self._told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1_000),
        }

    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded, by the GPU's own counter (Volta and later)."""
        return self._told(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1_000)

    def _told(self, ask: Callable[[], float]) -> float | None:
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


SHORTEST_SECONDS = 0.1
"""Ten ticks of the clock by which the kernel counts a process's time."""


class Cpu:
    """The cores that this process may use, since they were last read."""

    def __init__(self) -> None:
        import psutil

        self._process, self._cores = psutil.Process(), len(os.sched_getaffinity(0))
        self._machine_times = psutil.cpu_times_percent
        # The first call of each begins the time that the next one is about.
        self._process.cpu_percent()
        self._machine_times()
        self._since = time.monotonic()

    def read(self) -> dict[str, float | None]:
        """The process's share of its cores, and what of the machine's time went into waiting for disks (percent).

        Nothing where too little time has passed for the kernel's clock ticks to tell a share.
        """
        if time.monotonic() - self._since < SHORTEST_SECONDS:
            return {}
        self._since = time.monotonic()
        used = min(100.0, self._process.cpu_percent() / self._cores)
        return {"cpu_percent": used, "io_wait_percent": getattr(self._machine_times(), "iowait", None)}


def find_gpu(names: Iterable[str]) -> Gpu | None:
    """The GPU of the first UUID (`GPU-...`) or PCI bus id (`00000000:3B:00.0`) that NVML knows.

    CUDA numbers devices in its own order, and `CUDA_VISIBLE_DEVICES` hides some: a number would name another one.

    Returns:
        None where there is no NVML, or none of the names is known to it.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    for name in names:
        by_uuid = name.startswith(("GPU-", "MIG-"))
        find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByPciBusId
        try:
            return Gpu(pynvml, find(name))
        except pynvml.NVMLError:
            continue
    return None
