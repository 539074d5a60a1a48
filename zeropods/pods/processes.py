"""Processes that are known again later, process trees, and signals that reach only the process that was meant."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

# Processes that are known again later, and signals that reach only the process that was meant.

PROC = Path("/proc")
PAUSE_SECONDS = 0.05
KILL_SECONDS = 5.0
"""What is there so long after SIGKILL hangs in the kernel."""


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same number by its start."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start: field 22 of /proc/PID/stat (proc(5))."""
    parent: int = field(default=0, compare=False)
    name: str = field(default="", compare=False)
    """At most 15 bytes of its program's name."""
    zombie: bool = field(default=False, compare=False)
    """Ended, and not yet reaped."""


def read_process(pid: int) -> Process | None:
    """One process; None where there is none of this number."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name may hold blanks and brackets: the last bracket ends it.
    head, _, tail = stat.rpartition(b")")
    fields = tail.split()
    name = head.partition(b"(")[2].decode(errors="replace")
    return Process(pid, int(fields[19]), int(fields[1]), name, zombie=fields[0] in (b"Z", b"X"))


def is_there(process: Process) -> bool:
    """Whether it still runs; one that has ended and was not reaped does not."""
    now = read_process(process.pid)
    return now == process and not now.zombie


def send(process: Process, signum: int) -> bool:
    """Send a signal to this process and no other; False where it has ended.

    The handle is opened first and the start compared then, so that a number that went to another
    process meanwhile is noticed.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return False
        return _is_still(process) and _kill(process.pid, signum)  # Linux before 5.3
    try:
        if not _is_still(process):
            return False
        signal.pidfd_send_signal(handle, signum)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def end(processes: Iterable[Process], seconds: float) -> None:
    """End processes together: SIGTERM, SIGKILL for those that are there `seconds` later; none is left."""
    left = list(processes)
    for signum, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, KILL_SECONDS)):
        for process in left:
            send(process, signum)
        deadline = time.monotonic() + patience
        while (left := [process for process in left if is_there(process)]) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)


def to_record(process: Process) -> list[object]:
    """A process on disk: after another boot the same number and start may be another's."""
    return [process.pid, process.start_ticks, _boot()]


def from_record(record: list[object]) -> Process | None:
    """The process of a record; None where it ended with an earlier boot."""
    pid, start_ticks, boot = record
    if boot != _boot() or not isinstance(pid, int) or not isinstance(start_ticks, int):
        return None
    return Process(pid, start_ticks)


def _is_still(process: Process) -> bool:
    return read_process(process.pid) == process


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except OSError:
        return False
    return True


def _boot() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


# Processes below another one, read from /proc, and what can be asked about each.

READINGS = 4
"""A parent that ends while /proc is read leaves its child with nobody above it; then it is read again."""


class Tree:
    """All processes at one moment, by parent."""

    def __init__(self, table: dict[int, Process]) -> None:
        self.table = table
        self._children: dict[int, list[Process]] = {}
        for process in table.values():
            self._children.setdefault(process.parent, []).append(process)

    @classmethod
    def read(cls) -> Tree:
        """Read /proc; processes that start or end meanwhile may be missing."""
        lost: set[int] = set()
        for _ in range(READINGS):
            before, table = lost, {process.pid: process for process in _processes()}
            lost = {process.pid for process in table.values() if process.parent and process.parent not in table}
            # The same ones again: their parents are there, and hidden from this user.
            if lost == before:
                break
        return cls(table)

    def children(self, pid: int) -> list[Process]:
        """Processes whose parent is `pid`."""
        return self._children.get(pid, [])

    def below(self, pid: int) -> list[Process]:
        """Every descendant of `pid`, parents before their children."""
        found = list(self.children(pid))
        for process in found:
            found += self.children(process.pid)
        return found


def variable(process: Process, name: str) -> str | None:
    """An environment variable as the process was started with; None where it has none or cannot be asked."""
    marker = f"{name}=".encode()
    for entry in _read(process, "environ").split(b"\0"):
        if entry.startswith(marker):
            return entry[len(marker) :].decode(errors="replace")
    return None


def arguments(process: Process) -> list[str]:
    """The process's argument list; empty where it cannot be asked."""
    return _read(process, "cmdline").decode(errors="replace").split("\0")[:-1]


def child_pids(pid: int) -> list[int] | None:
    """Children of a process of one thread; None where this kernel does not tell. Far cheaper than a tree."""
    try:
        return [int(child) for child in (PROC / str(pid) / "task" / str(pid) / "children").read_bytes().split()]
    except OSError:
        return None


def _processes() -> Iterator[Process]:
    for name in os.listdir(PROC):
        if name.isdecimal() and (process := read_process(int(name))) is not None:
            yield process


def _read(process: Process, file: str) -> bytes:
    try:
        return (PROC / str(process.pid) / file).read_bytes()
    except OSError:
        return b""


# Interrupts that come at a bad moment are taken up after it.

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STACKS = int(signal.SIGRTMIN) + 7
"""Asks a rank for the stacks of its threads; by default it ends a process, so only who catches it may get it."""


@contextmanager
def deferred() -> Iterator[None]:
    """Let what is inside come to its end before Ctrl-C or SIGTERM take effect.

    Without it, an interrupt could fall between starting a process and writing down that it is ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            os.kill(os.getpid(), first)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `SystemExit` inside, where they would end the process without clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    plain = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in plain:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in plain:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


# How often the kernel has ended a process for want of memory, where this process lives.

CGROUPS = Path("/sys/fs/cgroup")


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


# Processes asked for the stacks of their threads.


def ask_for_stacks(processes: Iterable[Process]) -> int:
    """Send `STACKS` to those that catch it, and to no other: it would end them. Returns how many got it."""
    return sum(send(process, STACKS) for process in processes if catches(process, STACKS))


def catches(process: Process, number: int) -> bool:
    """Whether a process has a handler of its own for a signal (`SigCgt`, proc(5))."""
    caught = _status(process).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_stopped(process: Process) -> bool:
    """Whether a process was stopped by SIGSTOP or the like."""
    return _status(process).get("State", "?")[0] in "Tt"


def _status(process: Process) -> dict[str, str]:
    try:
        lines = (PROC / str(process.pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# A process that inherits the orphans below it, reaps them, and can end all of them.

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
REAP_PAUSE_SECONDS = 0.02


def become_subreaper() -> None:
    """From now on whatever is orphaned below this process becomes its child (Linux 3.4)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, signum: signal.Signals) -> None:
    """Get `signum` when the parent ends, at once if it has ended already; survives `execve`, not `fork`."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def reap() -> tuple[dict[int, int], bool]:
    """Collect children that have ended.

    Returns:
        Their exit codes by pid, negative for a signal, and whether there are other children. For a
        subreaper "no children" means that no descendant is left either.
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = os.waitstatus_to_exitcode(status)


def end_descendants(seconds: float) -> bool:
    """SIGKILL everything below this subreaper until nothing is left; False if something still is after `seconds`."""
    deadline = time.monotonic() + seconds
    while reap()[1]:
        for process in Tree.read().below(os.getpid()):
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(REAP_PAUSE_SECONDS)
    return True


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
