"""Training processes that a server forks, which has imported what takes longer than most tests train.

A process of tests has one server, `fork_server()`, which ends with it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeropods.programs import child_environment, free_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
"""Ranks that have not ended by then hang; before the limit of a test, which would not say where."""


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process's tests. It ends when nothing can write to it any more."""
    return ForkServer()


def place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher says to a rank; nothing to one that is alone."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


class ForkServer:
    """`fork_server.py`, as long as the block lasts."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.full.fork_server"]
        # A rank that is ended by SIGABRT says where it was.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def end(self) -> None:
        """End the server; forks of it go on."""
        self._process.kill()
        self._process.communicate()

    def train(
        self, argv: Sequence[object], ranks: int, said: Path, *, script: str = "textsql_train.py", status: int = 0
    ) -> str:
        """Train on so many ranks to their end, with that status; returns what rank 0 said.

        Args:
            said: how the names of files begin that the ranks write their words to.
        """
        forks = self.begin(argv, ranks, said, script=script)
        deadline = time.monotonic() + SECONDS
        while any(fork.returncode is None for fork in forks):
            if any(fork.returncode for fork in forks) and status == 0:
                # The others would wait for it.
                deadline = 0.0
            if time.monotonic() > deadline:
                for fork in forks:
                    fork.send_signal(signal.SIGABRT)
            time.sleep(0.02)
        told = [fork.communicate(SECONDS) for fork in forks]
        assert {fork.returncode for fork in forks} == {status}, "\n".join(text[-4000:] for text in told)
        return told[0]

    def begin(
        self, argv: Sequence[object], ranks: int, said: Path, *, script: str = "textsql_train.py", **variables: str
    ) -> list[Forked]:
        """Fork so many ranks that train, with further environment variables."""
        port, words = free_port(), [str(word) for word in argv]
        return [
            self.start(
                words, child_environment() | place(rank, ranks, port) | variables, Path(f"{said}.{rank}"), script=script
            )
            for rank in range(ranks)
        ]

    def start(
        self, argv: list[str], environment: Mapping[str, str], said: Path, *, script: str = "textsql_train.py"
    ) -> Forked:
        """Fork a process that trains."""
        assert self._process.stdin is not None and self._process.stdout is not None
        Path(f"{said}.status").unlink(missing_ok=True)
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
