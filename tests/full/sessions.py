"""Sessions that share a file system and nothing else, as pods of one CML project do: namespaces of Linux.

A session has processes, mounts, a host name and a network of its own. Linux, root, util-linux and iproute2 are needed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest

from tests.full.clusters import SECONDS, command

HOLDER = 'hostname "$0" && ip link set lo up && echo up && exec sleep infinity'
NEXT_PID = 'echo "$0" >/proc/sys/kernel/ns_last_pid && "$@"; exit $?'
"""Script for sh that runs a command as a child, whose process id is the next one after the given number."""
PROGRAMS = ("unshare", "nsenter", "ip", "hostname", "sleep")


@dataclass(frozen=True)
class Session:
    """A session: `pid` is its first process, as this machine numbers it."""

    pid: int
    spaces: tuple[str, ...]

    def inside(self, argv: list[str]) -> list[str]:
        """The command as it is run in the session, in this working folder."""
        return ["nsenter", "--target", str(self.pid), *self.spaces, f"--wd={os.getcwd()}", *argv]

    def zeropods(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """What a call of the command line came to there."""
        argv = self.inside(command(*arguments))
        return subprocess.run(argv, capture_output=True, text=True, timeout=2 * SECONDS, check=False)

    def program(self, code: str, pid: int) -> subprocess.Popen[str]:
        """A Python program there that has this process id and is followed through stdin and stdout."""
        argv = self.inside(["sh", "-c", NEXT_PID, str(pid - 1), sys.executable, "-c", code])
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def session(hostname: str, *, has_network: bool = True) -> Iterator[Session]:
    """A session until the block ends, and every process in it with it; without a network of its own it has ours."""
    spaces = ["--pid", "--mount", "--uts"]
    if has_network:
        spaces.append("--net")
    argv = ["unshare", *spaces, "--fork", "--kill-child", "--mount-proc", "sh", "-c", HOLDER, hostname]
    # Without the variables by which a test knows what was started for it.
    path = {"PATH": os.environ["PATH"]}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=path) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "up\n"
            (first,) = psutil.Process(holder.pid).children()
            yield Session(first.pid, tuple(spaces))
        finally:
            holder.kill()


def are_possible() -> bool:
    """Whether this process may make such sessions."""
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        return False
    argv = ["unshare", "--pid", "--mount", "--uts", "--net", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"]
    return subprocess.run(argv, capture_output=True, timeout=SECONDS, check=False).returncode == 0


needs_sessions = pytest.mark.skipif(not are_possible(), reason="namespaces need root, util-linux and iproute2")
