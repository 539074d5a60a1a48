"""Training processes that the project's own fork server forks: importing takes longer than most tests train.

A process of tests has one server, which ends with it.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.full.launches import ROOT
from zeropods.launch import forks
from zeropods.programs import child_environment, free_port, variable_set

SECONDS = 600.0
"""Ranks that have not ended by then hang; before the limit of a test, which would not say where."""


def place(rank: int, ranks: int, port: int, slots: int | None) -> dict[str, str]:
    """What a launcher says to a rank; nothing to one that is alone."""
    if ranks == 1:
        return {}
    slots = slots or ranks
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % slots), "LOCAL_SIZE": str(slots),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


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


def train_ranks(
    argv: Sequence[object],
    ranks: int,
    said: Path,
    *,
    script: str = "textsql_train.py",
    status: int = 0,
    slots: int | None = None,
) -> str:
    """Train on so many ranks to their end, with that status; returns what rank 0 said.

    Args:
        said: how the names of files begin that the ranks write their words to.
        slots: number of ranks that believe to be on one pod; all of them if not given.
    """
    begun = begin_ranks(argv, ranks, said, script=script, slots=slots)
    deadline = time.monotonic() + SECONDS
    while any(rank.returncode is None for rank in begun):
        if any(rank.returncode for rank in begun) and status == 0:
            # The others would wait for it.
            deadline = 0.0
        if time.monotonic() > deadline:
            for rank in begun:
                rank.send_signal(signal.SIGABRT)
        time.sleep(0.02)
    told = [rank.communicate(SECONDS) for rank in begun]
    assert {rank.returncode for rank in begun} == {status}, "\n".join(text[-4000:] for text in told)
    return told[0]


def begin_ranks(
    argv: Sequence[object],
    ranks: int,
    said: Path,
    *,
    script: str = "textsql_train.py",
    slots: int | None = None,
    **variables: str,
) -> list[Forked]:
    """Fork so many ranks that train, with further environment variables."""
    port, command = free_port(), [str(ROOT / script), *map(str, argv)]
    return [
        _fork(command, child_environment() | place(rank, ranks, port, slots) | variables, Path(f"{said}.{rank}"))
        for rank in range(ranks)
    ]


def _fork(command: list[str], environment: Mapping[str, str], said: Path) -> Forked:
    process = None
    with open(said, "wb") as words, open("/dev/null", "r+b") as nothing, variable_set("OMP_NUM_THREADS", "1"):
        streams = (nothing.fileno(), nothing.fileno(), words.fileno())
        # A server whose code was replaced meanwhile refuses, and ends.
        for _ in range(2):
            server = forks.own_server()
            process = process or (server and forks.fork(server, command, environment, streams))
    assert process
    return Forked(process, said)
