"""How often the kernel has ended a process for want of memory, where this process lives."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The kernel's count of OOM kills in this process's memory cgroup; None where it keeps none.

    A process outside of any group is counted by the whole machine (`oom_kill` of /proc/vmstat). In a container the
    group's path is another than outside of it, and its own group is the root of what it sees.
    """
    for file in _files(proc, cgroups):
        found = _count(file)
        if found is not None:
            return found
    return _count(proc / "vmstat")


def _files(proc: Path, cgroups: Path) -> list[Path]:
    """Where the count may stand: cgroup v1 `memory.oom_control`, v2 `memory.events` (cgroups(7)); nearest first."""
    files = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = path.lstrip("/")
        if "memory" in controllers.split(","):
            root = cgroups / "memory"
            files += [root / own / "memory.oom_control", *([] if own == "" else [root / "memory.oom_control"])]
        elif number == "0" and controllers == "":
            for root in (cgroups, cgroups / "unified"):
                files += [root / own / "memory.events", root / "memory.events"]
    return files


def _count(file: Path) -> int | None:
    for line in _text(file).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
