"""How a cell's programs run: each in a process of its own, or by forks of this one where there is no GPU.

CUDA does not survive a fork; on a CPU importing takes longer than a cell trains.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from zeropods.errors import guarded
from zeropods.launch.local import CommandEnd, OverdueError, run_child, run_to_end, to_end
from zeropods.programs import end_with_parent, own_programs_first, use_own_cache, wait_passively

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "textsql_train.py"
TRAIN = ROOT / SCRIPT
LAST_CHARACTERS = 600
GRACE_SECONDS = 10.0


class Jobs(Protocol):
    """Runs programs of the project, one after the other."""

    def train(self, flags: Sequence[str], folder: Path, seconds: float, without: str | None = None) -> CommandEnd:
        """Run textsql_train.py into a run folder; one that takes longer is ended, and has a record all the same.

        Args:
            without: a measure of `without.TAKEN`.
        """

    def call(self, module: str, words: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run a module as a program; its status, and the end of what it said."""


class OwnProcesses:
    """Each in a process of its own, as users start them."""

    def __init__(self) -> None:
        wait_passively()
        use_own_cache()

    def train(self, flags: Sequence[str], folder: Path, seconds: float, without: str | None = None) -> CommandEnd:
        script = [str(TRAIN)] if without is None else ["-m", "benchmarks.gpu.without", without]
        return run_to_end([sys.executable, *script, *flags], folder, seconds)

    def call(self, module: str, words: Sequence[str], seconds: float) -> tuple[int, str]:
        argv = [sys.executable, "-m", module, *words]
        return _heard(lambda output: run_child(argv, output, timeout_seconds=seconds))


class Forks:
    """Forks of this process, which has imported what they need and never trains."""

    def __init__(self, *, with_deepspeed: bool) -> None:
        wait_passively()
        os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
        # Another's cache may hold the lock of a compilation that was killed.
        use_own_cache()
        if with_deepspeed:
            import deepspeed  # noqa: F401
        import zeropods.train.run
        import zeropods.train.text2sql  # noqa: F401

    def train(self, flags: Sequence[str], folder: Path, seconds: float, without: str | None = None) -> CommandEnd:
        return to_end(lambda output, _: _forked(partial(_train, list(flags), without), output, seconds), folder)

    def call(self, module: str, words: Sequence[str], seconds: float) -> tuple[int, str]:
        return _heard(lambda output: _forked(partial(_module, module, list(words)), output, seconds))


def _heard(run: Callable[[IO[bytes]], int]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        try:
            status, why = run(output), ""
        except OverdueError as error:
            status, why = 1, str(error)
        output.seek(0)
        text = output.read().decode("utf-8", "replace").strip()
    return status, why or text[-LAST_CHARACTERS:]


def _forked(work: Callable[[], int | None], output: IO[bytes], seconds: float) -> int:
    """Do some work in a fork, and wait for its status; nothing of it is left when this returns or raises."""
    child = multiprocessing.get_context("fork").Process(target=_become, args=(work, output, os.getpid()))
    child.start()
    deadline = time.monotonic() + seconds
    try:
        child.join(seconds)
        if child.is_alive() or time.monotonic() > deadline:
            raise OverdueError(f"took longer than {seconds:g} s, and was ended")
    finally:
        child.terminate()
        child.join(GRACE_SECONDS)
        child.kill()
        child.join()
    return int(child.exitcode or 0)


def _become(work: Callable[[], int | None], output: IO[bytes], parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGTERM)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.exit(guarded(work))


def _train(flags: list[str], without: str | None) -> int:
    if without is not None:
        from benchmarks.gpu.without import train_without

        return train_without(without, flags)
    from zeropods.train import run_parsed
    from zeropods.train.text2sql import TextToSQL

    return run_parsed(TextToSQL, [SCRIPT, *flags])


def _module(module: str, words: list[str]) -> int:
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
