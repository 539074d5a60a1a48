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

RECORDED_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers")


def host() -> str:
    """The pod that this process runs on: the address that its agent gave it, else the machine's
    name."""
    return os.environ.get("ZEROPODS_POD") or socket.gethostname()


def versions() -> dict[str, str | None]:
    """Versions of Python, of this code (whether installed or not) and of the packages that affect a
    run's figures, by name; None for a package that is not installed."""
    version_by_name: dict[str, str | None] = {
        "python": platform.python_version(),
        "zeropods": __version__,
    }
    for name in RECORDED_PACKAGES:
        version_by_name[name] = None
        with contextlib.suppress(PackageNotFoundError):
            version_by_name[name] = version(name)
    return version_by_name


def git_revision(folder: Path) -> str | None:
    """The commit of a checkout, with `-dirty` where files differ from it; None outside one, without
    git, or where git takes longer than ten seconds."""
    # Tags are excluded, so that it says the commit itself.
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *describe],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None


WIDEST_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Instructions that tell apart processors of the same name in virtual machines (`AMD EPYC`); the
first found counts."""


def hardware() -> dict[str, object]:
    """CPU model and its widest instructions, number of cores that this process may use, memory in
    bytes."""
    cpu = _first_cpu()
    return {
        "cpu": cpu.get("model name") or platform.processor() or None,
        "instructions": _widest_instructions(cpu.get("flags", "")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _first_cpu() -> dict[str, str]:
    """What the kernel says of the first processor, by the kernel's names."""
    values: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        # Later lines with the same name are those of other processors.
        values.setdefault(name.strip(), value.strip())
    return values


def _widest_instructions(flags: str) -> str | None:
    """The first of `WIDEST_INSTRUCTIONS` among a processor's flags; None where it has none."""
    names = flags.split()
    for instructions in WIDEST_INSTRUCTIONS:
        if instructions in names:
            return instructions
    return None


def machine() -> str:
    """The kernel's boot id: it differs between machines, not between pods on one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_age_seconds() -> float:
    """Seconds since this process began, interpreter and imports included."""
    # The start is field 22, in clock ticks since boot (proc(5)). The name, field 2, is in
    # parentheses and may contain spaces, so fields are counted from the third, after the name.
    fields_from_third = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields_from_third[22 - 3]) / os.sysconf("SC_CLK_TCK")
    # A tick that is not yet over may put the start a little into the future.
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
