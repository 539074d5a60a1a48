"""Training processes that the project's own fork server forks: importing takes longer than most tests train.

A process of tests has one server, `fork_server()`, which ends with it.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeropods.launch import forks
from zeropods.programs import child_environment, free_port, variable_set

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
"""Ranks that have not ended by then hang; before the limit of a test, which would not say where."""


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process's tests."""
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
    """Forks for tests, whose words go to files."""

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
        with open(said, "wb") as words, open("/dev/null", "r+b") as nothing:
            streams = (nothing.fileno(), nothing.fileno(), words.fileno())
            command = [str(ROOT / script), *argv]
            # A server whose code was replaced meanwhile refuses, and ends.
            process = self._fork(command, environment, streams) or self._fork(command, environment, streams)
        assert process is not None
        return Forked(process, said)

    def _fork(self, command: list[str], environment: Mapping[str, str], streams: Sequence[int]) -> forks.Forked | None:
        with variable_set("OMP_NUM_THREADS", "1"):
            server = forks.own_server()
        return None if server is None else forks.fork(server, command, environment, streams)


class Forked:
    """One such process, used as a `subprocess.Popen`."""

    def __init__(self, process: forks.Forked, said: Path) -> None:
        self.pid, self.send_signal = process.pid, process.send_signal
        self._process, self._said = process, said

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it goes on."""
        return self._process.poll()

    def communicate(self, timeout: float) -> str:
        """What it said on stderr, once it has ended."""
        self._process.wait(timeout)
        return self._said.read_text(errors="replace")
