"""Training processes that a server forks, for tests that need several and signal each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.full.conftest import ROOT


class ForkServer:
    """`fork_server.py`, as long as the block lasts."""

    def __enter__(self) -> ForkServer:
        command = [sys.executable, "-m", "tests.full.fork_server"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(
        self, argv: list[str], environment: Mapping[str, str], said: Path, *, script: str = "textsql_train.py"
    ) -> Forked:
        """Fork a process that trains."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"script": script, "argv": argv, "environment": dict(environment), "said": str(said)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return Forked(int(self._process.stdout.readline()), said)


class Forked:
    """One such process, used as a `subprocess.Popen`."""

    def __init__(self, pid: int, said: Path) -> None:
        self.pid = pid
        self._said = said

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it goes on."""
        status = Path(f"{self._said}.status")
        return int(status.read_text()) if status.exists() else None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> str:
        """What it said on stderr, once it has ended."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self._said), timeout)
            time.sleep(0.02)
        return self._said.read_text(errors="replace")
