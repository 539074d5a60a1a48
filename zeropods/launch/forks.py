"""Runs of a training script by forks: `python -m zeropods.launch.forks SCRIPT -- PROCESSES FOLDER FLAGS -- ...`.

One process imports everything, which takes longer than a small run, and forks the ranks of each run. It never trains
itself: DeepSpeed does not begin twice in one process, and threads of OpenMP do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess as Rank
from pathlib import Path
from typing import IO, TYPE_CHECKING

from zeropods.errors import UserError, guarded
from zeropods.launch.hangs import LOOK_SECONDS, Standstill
from zeropods.launch.local import end_standstill, to_end, watched
from zeropods.launch.series import SEPARATOR
from zeropods.pods.processes import deferred, ending_in_order
from zeropods.programs import free_port, own_programs_first, use_own_cache, wait_passively
from zeropods.train.script import run_parsed

if TYPE_CHECKING:
    from zeropods.train.tasks import Task


FORK = multiprocessing.get_context("fork")
GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL for the ranks that are left when one has failed."""


def main() -> int:
    """Run all, one after the other; one that did not begin ends the series."""
    wait_passively()
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    script, *words = sys.argv[1:]
    task = task_of(script, with_deepspeed="--deepspeed" in words)
    with ending_in_order():
        for processes, folder, *flags in _parts(words):
            standstill = watched(Path(folder))
            ended = to_end(partial(_run, task, [script, *flags], int(processes), standstill), Path(folder))
            print("\n".join(ended.lines), flush=True)
            if ended.record is None and ended.status != 0:
                return 1
    return 0


def task_of(script: str, *, with_deepspeed: bool) -> type[Task]:
    """The task of one of our scripts, with all that a run of it needs imported."""
    from zeropods.train.arguments import CausalArguments, arguments_of

    kind = arguments_of(script)
    if kind is None:
        raise UserError(f"{script}: runs by forks are for this project's own training scripts")
    if with_deepspeed:
        import deepspeed  # noqa: F401
    import zeropods.train.run  # noqa: F401

    if kind is CausalArguments:
        from zeropods.train.causal import Causal

        return Causal
    from zeropods.train.text2sql import TextToSQL

    return TextToSQL


def _parts(words: Sequence[str]) -> Iterator[list[str]]:
    """The words behind each separator."""
    starts = [number for number, word in enumerate(words) if word == SEPARATOR]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield list(words[start + 1 : end])


def _run(task: type[Task], argv: list[str], processes: int, standstill: Standstill, output: IO[bytes]) -> int:
    """Fork the ranks of a run and wait for them; returns the status of the first that failed, else 0."""
    port = free_port()
    ranks = [
        FORK.Process(target=_rank, args=(task, argv, _variables(rank, processes, port), output), name=f"rank {rank}")
        for rank in range(processes)
    ]
    with deferred():
        for rank in ranks:
            rank.start()
    try:
        return _awaited(ranks, standstill)
    finally:
        _end(ranks)


def _awaited(ranks: Sequence[Rank], standstill: Standstill) -> int:
    """Wait until one has failed or all have ended; `StandstillError` where nothing goes on."""
    while True:
        left = [rank for rank in ranks if rank.is_alive()]
        failed = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        if failed or not left:
            return failed
        wait([rank.sentinel for rank in left], LOOK_SECONDS)
        end_standstill(standstill)


def _end(ranks: Sequence[Rank]) -> None:
    """End what is left of a run, such as ranks that wait for one that is gone; they write their records."""
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """What a launcher gives a rank."""
    if processes == 1:
        return {}
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    # torchrun and DeepSpeed's launcher have two names for it; accelerate takes the first to be 1 where it is not there.
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(processes))
    return {**own, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _rank(task: type[Task], argv: list[str], variables: dict[str, str], output: IO[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.environ.update(variables)
    sys.exit(guarded(lambda: run_parsed(task, argv)))


if __name__ == "__main__":
    sys.exit(guarded(main))
