"""What a run ran on: versions, revision, hardware."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zeropods import __version__

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers")


def host() -> str:
    """The pod that this process runs on: the address that its agent gave it, else the machine's name."""
    return os.environ.get("ZEROPODS_POD") or socket.gethostname()


def versions() -> dict[str, str | None]:
    """Versions of the packages that affect a run's figures, our own being this code's; None where one is missing."""
    found: dict[str, str | None] = {"python": platform.python_version(), "zeropods": __version__}
    for name in PACKAGES:
        found[name] = None
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_revision(folder: Path) -> str | None:
    """The commit of a checkout, with `-dirty` where files differ from it; None outside one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None
    return None


INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Instructions that tell apart processors of the same name in virtual machines (`AMD EPYC`); the first found counts."""


def hardware() -> dict[str, object]:
    """CPU model and its widest instructions, number of cores that this process may use, memory in bytes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return {
        "cpu": told.get("model name") or platform.processor() or None,
        "instructions": next((each for each in INSTRUCTIONS if each in told.get("flags", "").split()), None),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def machine() -> str:
    """The kernel's boot id: it differs between machines, not between pods on one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_age_seconds() -> float:
    """Seconds since this process began, interpreter and imports included."""
    # The name, in parentheses, may contain spaces; the start is field 22, in clock ticks since boot (proc(5)).
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
