"""Process trees and how they end, with psutil; interrupts at a bad moment; OOM kills; folders held
by a process."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from psutil import Process

from zeropods.files import held
from zeropods.measure.heartbeat import STACKS
from zeropods.programs import bound_argv, child_environment

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows its processes, and its control groups."""
CGROUP_FILES = (
    ("memory", "memory.oom_control"),
    ("", "memory.events"),
    ("unified", "memory.events"),
)
"""Hierarchies of control groups, each with the file of a group that has the count of OOM kills."""
RUN = "ZEROPODS_RUN"
"""Environment variable that marks the processes of a run: its launcher exports it on every pod, and
the agents find and end the processes by it. Its value is the name of the run's lease."""
FORKS_VARIABLE = "ZEROPODS_FORKS"
"""Environment variable that tells a pod's sessions the socket of the server that forks ranks
(`launch/forks.py`)."""
MARK_GAP = ("ZEROPODS_GAP", "0" * 16)
"""Name and value of an environment variable of that server. They are as long as the name and the
value of `RUN`, with which each fork overwrites them in its memory."""
SIGNAL_PAUSE_SECONDS = 0.05
"""Seconds between two looks at the processes that are ended."""
KILL_SECONDS = 20.0
"""Seconds for which SIGKILL is repeated; a process that is left then hangs in the kernel."""
SHELLS = frozenset(
    {"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh", "busybox"}
)
DEEPSPEED_LAUNCHERS = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py")
"""How the argument ends with which Python is told to run DeepSpeed's launcher."""

# One process, which psutil tells from a later one with the same pid by its creation time.


def find_process(pid: int) -> Process | None:
    """The process with this pid, even one that has ended but was not reaped; None where there is
    none."""
    with suppress(psutil.NoSuchProcess):
        return Process(pid)
    return None


def is_alive(process: Process) -> bool:
    """Whether a process still runs; one that has ended but was not reaped does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def send(process: Process, signum: int) -> None:
    """Send a signal to this process and no other, unless it has ended or is not ours."""
    with suppress(psutil.Error):
        process.send_signal(signum)


def variable(process: Process, name: str) -> str | None:
    """Value of an environment variable with which a process was started; None where it was started
    without this variable, or its environment cannot be read."""
    with suppress(psutil.Error, OSError):
        value: str | None = process.environ().get(name)
        return value
    return None


def processes_with(name: str, value: str) -> list[Process]:
    """Processes of this machine that were started with an environment variable of this value."""
    return [process for process in psutil.process_iter() if variable(process, name) == value]


def catches(process: Process, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal (`SigCgt`, proc(5))."""
    status = _text(PROC / str(process.pid) / "status")
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    if match is None:
        return False
    caught_signals = int(match[1], 16)
    # Bit 0 stands for signal 1.
    bit = 1 << (signum - 1)
    return bool(caught_signals & bit)


def ask_for_stacks(processes: Iterable[Process]) -> None:
    """Send `STACKS` to those processes that catch it, and to no others, since it would end them."""
    for process in processes:
        if catches(process, STACKS):
            send(process, STACKS)


# Trees of processes, from their start to their end.


def start_bound(
    argv: Sequence[str], at_end: signal.Signals = signal.SIGTERM, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command without stdin, in a session of its own, which no terminal's Ctrl-C reaches.

    Args:
        at_end: signal that the command gets when this process is gone.
        options: further arguments of `Popen`; `env`, if not given, is `child_environment()`.
    """
    options = {"env": child_environment(), **options}
    return subprocess.Popen(
        bound_argv(argv, at_end), stdin=subprocess.DEVNULL, start_new_session=True, **options
    )


def descendants(pid: int) -> list[Process]:
    """Every process below `pid`, parents before their children; none where `pid` has ended.

    A process whose parent ends meanwhile may be missing: ask again before concluding that none is
    left.
    """
    with suppress(psutil.NoSuchProcess):
        return list(Process(pid).children(recursive=True))
    return []


def child_pids(pid: int) -> list[int]:
    """Pids of the children of a process's first thread; none where the kernel does not tell. This
    is far cheaper than reading a tree."""
    children = _text(PROC / str(pid) / "task" / str(pid) / "children")
    return [int(child) for child in children.split()]


def end(
    find: Callable[[], Iterable[Process]], seconds: float, sent_sigterm: set[Process] | None = None
) -> int:
    """End processes and wait until they have ended: SIGTERM to those that take it, SIGKILL to all
    that are left `seconds` later.

    Args:
        find: returns the processes. It is called until none of them is alive twice in a row, since
            a process may be missed while its parent ends.
        sent_sigterm: processes that were sent SIGTERM already; those that are sent it here are
            added. A second SIGTERM would cut their end short.

    Returns:
        Number of processes that are left nevertheless; they hang in the kernel.
    """
    if sent_sigterm is None:
        sent_sigterm = set()
    kill_at = time.monotonic() + seconds
    times_empty = 0
    while True:
        alive = [process for process in find() if is_alive(process)]
        times_empty = 0 if alive else times_empty + 1
        seconds_of_killing = time.monotonic() - kill_at
        if times_empty == 2 or seconds_of_killing > KILL_SECONDS:
            return len(alive)
        for process in alive:
            if seconds_of_killing >= 0:
                send(process, signal.SIGKILL)
            elif process not in sent_sigterm and takes_sigterm(process):
                sent_sigterm.add(process)
                send(process, signal.SIGTERM)
        time.sleep(SIGNAL_PAUSE_SECONDS)


def takes_sigterm(process: Process) -> bool:
    """Whether a process is sent SIGTERM before it is killed.

    Shells and sshd are not, since they would cut off the output of their children; nor is
    DeepSpeed's launcher, which responds by ending its ranks over 30 s. They end by themselves after
    the ranks. A launcher that has not started its ranks yet does not catch SIGTERM and is sent it,
    since nothing else would end it.
    """
    try:
        name = process.name()
        arguments = process.cmdline()
    except psutil.Error:
        # It has ended meanwhile, or is not ours.
        return False
    if name in SHELLS or name.startswith("sshd"):
        return False
    is_launcher = any(argument.endswith(DEEPSPEED_LAUNCHERS) for argument in arguments)
    return not (is_launcher and catches(process, signal.SIGTERM))


def reap() -> dict[int, int]:
    """Reap children that have ended; return their exit codes by pid, negative for a signal."""
    codes: dict[int, int] = {}
    # The error says that there is no child at all.
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


# Interrupts that come at a bad moment.


@contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle these signals with `handler` inside the block; outside of the main thread nothing is
    changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former_handler in former_handlers.items():
            signal.signal(number, former_handler)


@contextmanager
def noted_signals() -> Iterator[list[str]]:
    """Note SIGINT, SIGTERM and SIGHUP inside the block: the list gets their names as they come.
    They interrupt nothing, so that no clean-up is cut short."""
    noted: list[str] = []
    with handled(ENDING, lambda number, _: noted.append(signal.Signals(number).name)):
        yield noted


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Let the block finish before Ctrl-C, SIGTERM or SIGHUP takes effect; of several, the first one
    does.

    Without it, an interrupt could fall between starting a process and writing down that it is ours.
    """
    received: list[int] = []
    try:
        with handled(ENDING, lambda number, _: received.append(number)):
            yield
    finally:
        if received:
            # The handlers are the former ones again.
            os.kill(os.getpid(), received[0])


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `SystemExit` inside the block where they have no handler, and
    would end the process without clean-up. The status is 128 and the signal's number, as a shell
    has it."""
    unhandled = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            unhandled.append(number)
    with handled(unhandled, lambda number, _: sys.exit(128 + number)):
        yield


# Memory.


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The kernel's count of OOM kills in this process's memory cgroup; None where it keeps none.

    The count is in `memory.oom_control` (cgroup v1) or `memory.events` (v2), cgroups(7). For a
    process outside of any group it is that of the whole machine (`oom_kill` in /proc/vmstat). In a
    container the group's path is not the one that it has outside, and the container's own group is
    the root of what it sees.
    """
    files = [*_cgroup_files(proc, cgroups), proc / "vmstat"]
    for file in files:
        count = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE)
        if count is not None:
            return int(count[1])
    return None


def _cgroup_files(proc: Path, cgroups: Path) -> list[Path]:
    """Files that may have the count of this process's group, the most likely one first; none where
    the kernel has no groups."""
    lines = _text(proc / "self" / "cgroup").splitlines()
    if not lines:
        return []
    # The root comes too, which is the group of a container.
    group_paths = {""}
    for line in lines:
        # A line is NUMBER:CONTROLLERS:PATH.
        group_paths.add(line.split(":", 2)[2].lstrip("/"))
    # The longest path comes first: it is the group's own where there are several hierarchies.
    paths = sorted(group_paths, key=len, reverse=True)
    files = []
    for hierarchy, file in CGROUP_FILES:
        for path in paths:
            files.append(cgroups / hierarchy / path / file)
    return files


def oom_kills_since(before: int | None) -> int | None:
    """Number of OOM kills since the kernel's count was `before`; None where it keeps no count."""
    now = oom_kills()
    if now is None or before is None:
        return None
    return now - before


def _text(file: Path) -> str:
    """Content of a file of the kernel's; nothing where it cannot be read."""
    with suppress(OSError):
        return file.read_text(encoding="ascii", errors="replace")
    return ""


# Folders for a pod's keys, or for what visitors of a page upload, each of which is held while its
# process lives.

POD = "zeropods-pod-"
DEMO = "zeropods-demo-"
"""Prefixes of the names of these folders."""
FRESH_SECONDS = 60.0
"""Age in seconds below which a folder that nobody holds may be about to be held."""


def make_private_folder(prefix: str) -> Path:
    """Make a folder that only this user can read; it is held by this process and its forks until
    they end.

    Folders with this prefix that killed processes have left are removed first, since nobody holds
    them.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # It is held, or another process has just removed it.
        with suppress(OSError):
            _remove_abandoned(path)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # Never closed: the kernel releases the lock when the last of the processes has ended.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user's that nobody holds and that is not fresh; `OSError` where
    somebody holds it."""
    status = folder.lstat()
    is_ours = status.st_uid == os.geteuid()
    if is_ours and time.time() - status.st_mtime > FRESH_SECONDS:
        with held(folder):
            shutil.rmtree(folder, ignore_errors=True)
