"""Which machine a cluster was started on, and whether it lives: several machines may share the
folder of clusters."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeropods.measure import environment

ID_DIGITS = 10
SPACES = ("pid", "net")
"""Namespaces, namespaces(7), that a machine here consists of: of its processes and of its
network."""
LIFE_SECONDS = 60.0
"""Seconds between two signs of life of a pod."""
LONG_SILENCE_SECONDS = 10 * LIFE_SECONDS
"""Seconds without a sign of life after which pods have ended, if they do not answer either."""


@dataclass(frozen=True)
class Machine:
    """A machine, or a container that has processes and a network of its own, such as a session or
    worker of CML."""

    id: str
    """Ten hexadecimal digits. A process id, or a loopback address, means the same only where they
    are equal."""
    hostname: str
    """Its name, for people: two machines may have the same."""


def this_machine() -> Machine:
    """The machine that this process runs on.

    Its id is made of the kernel's boot id, which pods on one node share, and of the numbers of its
    namespaces, which no two that live at a time share on one kernel. A machine that was started
    again is another one.
    """
    numbers = [os.readlink(f"/proc/self/ns/{space}") for space in SPACES]
    text = " ".join([environment.machine(), *numbers])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Machine(digest[:ID_DIGITS], socket.gethostname())


def name_of_process(kind: str) -> str:
    """A cluster's name that no other process has, here or on another machine:
    `KIND-PID-MACHINE`."""
    return f"{kind}-{os.getpid()}-{this_machine().id}"


# Signs of life, which machines see that share a cluster's folder and reach no pod


def show_life(file: str) -> None:
    """Touch a file in the cluster's folder for ever, every `LIFE_SECONDS`; it never returns."""
    while True:
        # A host of the user's own may have no such file, and a file server may fail for a while.
        with suppress(OSError):
            os.utime(file)
        time.sleep(LIFE_SECONDS)


def seconds_of_silence(folder: Path) -> float:
    """Seconds since anything in a cluster's folder was last changed or touched, by the clock of its
    file system."""
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    # A new file on the same file system has the time of that clock, which may not be ours.
    with tempfile.TemporaryFile(dir=folder.parent) as file:
        return os.fstat(file.fileno()).st_mtime - newest
