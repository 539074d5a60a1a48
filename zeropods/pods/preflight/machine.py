"""What this machine has: programs, files, room, ports, GPUs. Nothing here imports torch or changes anything."""

from __future__ import annotations

import shutil
from pathlib import Path

from zeropods.data.checksum import sha256


def find_program(name: str) -> str | None:
    """A program on PATH, or where daemons are, which an ordinary user's PATH may lack."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


def digest(file: Path) -> str | None:
    """SHA-256 of a file; None where there is none that can be read."""
    try:
        return sha256(file)
    except OSError:
        return None


def free_bytes(folder: Path) -> int | None:
    """Room on the file system of a folder; None where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def gpus() -> list[dict[str, int]] | None:
    """`free_bytes` and `total_bytes` of each GPU as NVML knows it; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        memories = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return [{"free_bytes": memory.free, "total_bytes": memory.total} for memory in memories] or None


def memory_available() -> int | None:
    """Bytes of main memory that could be used at once; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:
        return None
    stated = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(stated.split()[1]) * 1024 if stated else None
