"""The thread that writes a rank's beat, and what answers the signal that asks for its stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO

from zeropods.measure.heartbeat import Beat, beat_file, write_beat
from zeropods.pods.processes import STACKS

PAUSE_SECONDS = 1.0
STACKS_FOLDER = "stacks"
JOIN_SECONDS = 5.0


class Beating:
    """Writes `ranks/N.beat` each second while it is entered; a step costs it two additions."""

    def __init__(self, folder: Path, rank: int, phase: Callable[[], str]) -> None:
        """Prepare; nothing is written yet.

        Args:
            folder: the run folder.
            phase: what the rank is doing.
        """
        self.training = False
        """Whether steps follow one another now."""
        self.step = 0
        self._marks = self._alive = 0
        self._folder = folder
        self._rank = rank
        self._phase = phase
        self._began = time.time()
        self._main = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Beating:
        self._main = threading.get_ident()
        self._began = time.time()
        # A disk that takes no more is for the training to complain of.
        with contextlib.suppress(OSError):
            beat_file(self._folder, self._rank).parent.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(stacks_on_signal(self._folder / STACKS_FOLDER / f"{self._rank}.txt"))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(JOIN_SECONDS)
        with contextlib.suppress(OSError):
            self._open.close()
        with contextlib.suppress(OSError):
            beat_file(self._folder, self._rank).unlink(missing_ok=True)

    def mark(self, step: int | None = None) -> None:
        """A piece of work is done; with its number, an optimizer step."""
        self._marks += 1
        if step is not None:
            self.step = step

    def _run(self) -> None:
        while True:
            try:
                write_beat(self._folder, self._beat())
            except OSError:
                # An old beat would look like a rank that is stopped; none looks like one that does not tell.
                with contextlib.suppress(OSError):
                    beat_file(self._folder, self._rank).unlink(missing_ok=True)
            if self._ending.wait(PAUSE_SECONDS):
                return

    def _beat(self) -> Beat:
        self._alive += 1
        frame, phase = sys._current_frames().get(self._main), self._phase()
        return Beat(
            rank=self._rank,
            pid=os.getpid(),
            began_unix_seconds=self._began,
            alive=self._alive,
            marks=self._marks,
            step=self.step,
            phase=phase,
            patient=not (phase == "evaluate" or (phase == "steady" and self.training)),
            stack=tuple(map(described, _above(frame))),
            called_from=next((described(each) for each in _above(frame) if _is_own(each)), None),
        )


@contextlib.contextmanager
def stacks_on_signal(path: Path) -> Iterator[None]:
    """Write the stacks of all threads into a file whenever `STACKS` comes, whoever holds Python's lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        _register(file)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS)
    if path.stat().st_size == 0:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _register(file: IO[str]) -> None:
    # Unregistered, it must not mean what it means by default: the end of the process.
    if threading.current_thread() is threading.main_thread():
        signal.signal(STACKS, signal.SIG_IGN)
    faulthandler.register(STACKS, file=file, all_threads=True)


def _above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def described(frame: FrameType) -> str:
    """`FILE:LINE FUNCTION`; a file of Python or of a package without what leads there."""
    path = frame.f_code.co_filename
    for root in (*_roots(), os.getcwd()):
        path = path.removeprefix(root + os.sep)
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_own(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return os.path.isabs(path) and not path.startswith(tuple(root + os.sep for root in _roots()))


@cache
def _roots() -> tuple[str, ...]:
    """Where packages and Python's own modules are, packages first: they may be below the others."""
    paths = sysconfig.get_paths()
    return paths["purelib"], paths["platlib"], paths["stdlib"]
