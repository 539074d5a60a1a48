"""Tell what was being tested when a run of the tests was cut short, and end every process that it left behind."""

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

MARK = "TESTS_RUN"
"""Variable in the environment of every process that a test starts, and of those that they start."""
OWN = b"zeropods.launch.forks"
GRACE_SECONDS = 15.0
"""Seconds that processes have to end by themselves once their test has ended; a pod's lease takes the longest."""


class Watch:
    """A plugin of the process that reports; the tests may run in other processes."""

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        self._begun: dict[str, float] = {}
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        os.environ[MARK] = self._mark.partition("=")[2]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begun[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._begun.pop(nodeid, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the tests that had not ended, and kill the processes that are left."""
        for nodeid, began in self._begun.items():
            terminalreporter.write_line(f"NOT ENDED after {time.monotonic() - began:.0f} s: {nodeid}", red=True)
        for pid, line in self._killed().items():
            terminalreporter.write_line(f"LEFT BEHIND and killed: {pid} {line}", red=True)

    def _killed(self) -> dict[int, str]:
        """Kill what the tests started and what has not ended within the grace; returns its command lines."""
        deadline = time.monotonic() + self._grace_seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _left(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            # Other processes come and go meanwhile, or are not ours to read.
            with suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    # This process's own fork server ends with it.
                    if OWN in words and f"PPid:\t{os.getpid()}\n" in (folder / "status").read_text():
                        continue
                    found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
        return found
